"""Which rows of a prompt the tiers hold: they are asked in order, a few chunks at a time.

Law of this file: no hit gets past a full row that nobody has, so tiers are not asked beyond one.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.core.effects import Probed, TierProbe
from kvass.core.matching.coverage import BoolArray
from kvass.core.pending.promotions import IN_NO_TIER, NOT_ASKED, Promotion, PromotionState
from kvass.core.pending.tier_operations import Probing
from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_table import LOADING
from kvass.core.state import State
from kvass.core.tiers import answering, epochs, planning
from kvass.types import I64Array

PROBE_CHUNKS: Final = 16
PROBE_GROWTH: Final = 4


def probe_next(state: State, promotion: Promotion) -> None:
    """Ask a tier for more of what L1 and the tiers before it have not; if there is no more: plan.

    A few chunks first, then ever more: no hit gets past a full row that nobody has, and most
    prompts that L1 does not know the tiers do not know either.
    """
    tiers = epochs.usable(state, promotion.namespace)
    if epochs.pending(promotion.namespace):
        promotion.move(PromotionState.AWAITS_EPOCH)
        return
    view, first, end = promotion.view(state.rows), promotion.first, len(promotion.keys)
    coming = view.there(LOADING)
    asked_last = state.tiers.all[promotion.probing].place if promotion.probing >= 0 else 0
    for tier in tiers:
        if state.tiers.all[tier].place > asked_last:
            promotion.probing, promotion.reach = tier, first
        while tier == promotion.probing and promotion.reach < end and not _gap(promotion, coming):
            begin = promotion.reach
            more = max(PROBE_CHUNKS, (begin - first) * PROBE_GROWTH)
            promotion.reach = reach = min(first + more, end)
            wanted = [
                begin
                + np.flatnonzero(
                    ((rows == ABSENT) & np.isin(home, (NOT_ASKED, IN_NO_TIER)))[begin:reach]
                )
                for rows, home in zip(view.found, promotion.homes, strict=True)
            ]
            if any(map(len, wanted)):
                _probe(state, promotion, tier, wanted)
                return
    if tiers and _has_lost(promotion, view.found):
        promotion.probing = -1
        probe_next(state, promotion)
    else:
        planning.plan(state, promotion)


def _has_lost(promotion: Promotion, found: list[I64Array]) -> bool:
    """Whether no tier was asked for some row because L1 had it, and L1 has it no more. Of these
    at least one is asked for then, so this comes to an end."""
    asked = slice(promotion.first, promotion.reach)
    return any(
        ((rows == ABSENT) & (home == NOT_ASKED))[asked].any()
        for rows, home in zip(found, promotion.homes, strict=True)
    )


def _gap(promotion: Promotion, coming: list[BoolArray]) -> bool:
    """Whether some full row has been asked for in vain, so that what follows it is of no use."""
    asked = slice(promotion.first, promotion.reach)
    return any(
        not (there | (home >= 0))[asked].all()
        for c, there, home in zip(promotion.namespace.classes, coming, promotion.homes, strict=True)
        if c.spec.layout.kind == "full"
    )


def _probe(state: State, promotion: Promotion, tier: int, wanted: list[I64Array]) -> None:
    ns = promotion.namespace
    promotion.move(PromotionState.AWAITS_PROBE)
    op = state.tiers.begin(Probing(tier, promotion.id, wanted))
    batches = tuple(
        epochs.records(ns, tier, c, promotion.keys[w])
        for c, w in zip(ns.classes, wanted, strict=True)
    )
    state.out.append(TierProbe(tier, op, batches))


def probed(state: State, event: Probed) -> None:
    op = state.tiers.end(event.op, Probing)
    promotion = state.promotions.all.get(op.promotion)
    if promotion is None:
        return  # its time was up
    at = 0
    for home, wanted in zip(promotion.homes, op.wanted, strict=True):
        held = event.held[at : at + len(wanted)]
        home[wanted[held]], home[wanted[~held]] = op.tier, IN_NO_TIER
        at += len(wanted)
    if promotion.void:
        answering.answer(state, promotion)
    else:
        probe_next(state, promotion)
