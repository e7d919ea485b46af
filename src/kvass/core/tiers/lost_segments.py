"""Indexed chunks that neither L1 nor a tier has any more: they are found no more (blend)."""

from __future__ import annotations

from kvass.core.pending.tier_state import IN_NO_TIER, Promotion
from kvass.core.rows.index import ABSENT
from kvass.core.state import State
from kvass.core.tiers import epochs


def forget_lost(state: State, promotion: Promotion) -> None:
    """A promotion was told what the tiers hold: what neither they nor L1 have is found no more."""
    ns = promotion.namespace
    if ns.id not in state.classes.segments.of:
        return
    if len(epochs.usable(state, ns)) < len(state.tiers.used) or not all(
        tier.report.get("up", True) for tier in state.tiers.used
    ):
        return  # one may have them
    for c, home in zip(ns.classes, promotion.homes, strict=True):
        keys = promotion.keys[home == IN_NO_TIER]
        state.classes.segments.forget(ns.id, keys[c.index.find(keys) == ABSENT])
