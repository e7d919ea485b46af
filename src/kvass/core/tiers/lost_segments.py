"""Removing chunks from the segment index that neither L1 nor a tier has any more (blend)."""

from __future__ import annotations

from kvass.core.pending.promotion import IN_NO_TIER, Promotion
from kvass.core.rows.index import ABSENT
from kvass.core.state import State
from kvass.core.tiers import epochs


def forget_lost(state: State, promotion: Promotion) -> None:
    """Remove a promotion's chunks from the index that neither L1 nor the tiers have."""
    ns = promotion.namespace
    if ns.id not in state.followers.segments.of:
        return
    if len(epochs.usable(state, ns)) < len(state.tiers.used) or not all(
        tier.report.get("up", True) for tier in state.tiers.used
    ):
        return  # a tier that was not asked may have them
    for c, home in zip(ns.classes, promotion.homes, strict=True):
        keys = promotion.keys[home == IN_NO_TIER]
        state.followers.segments.forget(ns.id, keys[c.index.find(keys) == ABSENT])
