"""Asking the tiers, in their order, which rows of a prompt they have.

One tier is asked at a time. It is not asked for rows that an earlier tier has.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.core.effects import Probed, TierProbe
from kvass.core.matching.coverage import BoolArray
from kvass.core.matching.prefix import PrefixView
from kvass.core.pending.promotion import IN_NO_TIER, NO_TIER, NOT_ASKED, Promotion, PromotionState
from kvass.core.pending.tier_operations import Probing
from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_table import LOADING
from kvass.core.state import State
from kvass.core.tiers import answer, epochs, plan
from kvass.types import I64Array

PROBE_CHUNKS: Final = 16
"""How many chunks the first question to a tier names."""
PROBE_GROWTH: Final = 4
"""A further question to that tier names this many times the chunks of all earlier ones."""


def probe_next(state: State, promotion: Promotion) -> None:
    """Ask a tier for rows that L1 and the tiers before it lack. If none are left, make the plan.

    The first question names few chunks, and each further question names more. For no hit extends
    past a ``full`` row that nobody has, and most prompts that L1 does not have are not in the tiers
    either.
    """
    tiers = epochs.usable(state, promotion.namespace)
    if epochs.pending(promotion.namespace):
        promotion.move(PromotionState.AWAITING_EPOCH)
        return
    view = promotion.view(state.rows)
    for tier in tiers:
        wanted = _wanted_of(state, promotion, tier, view)
        if wanted is not None:
            _ask(state, promotion, tier, wanted)
            return
    if tiers and _has_lost(promotion, view.found):
        promotion.probed_tier = NO_TIER
        probe_next(state, promotion)
    else:
        plan.plan(state, promotion)


def _wanted_of(
    state: State, promotion: Promotion, tier: int, view: PrefixView
) -> list[I64Array] | None:
    """Of each class, the chunks that ``tier`` is to be asked for next; ``None`` if there are none.

    It sets ``probed_tier`` and ``probed_upto`` to the tier and to the end of these chunks.
    """
    last, first, end = promotion.probed_tier, promotion.first, len(promotion.keys)
    last_place = 0 if last == NO_TIER else state.tiers.all[last].place
    if state.tiers.all[tier].place > last_place:
        promotion.probed_tier, promotion.probed_upto = tier, first
    if tier != promotion.probed_tier:
        return None  # it was asked before ``probed_tier``
    coming = view.there(LOADING)
    while promotion.probed_upto < end and not _gap(promotion, coming):
        begin = promotion.probed_upto
        more = max(PROBE_CHUNKS, (begin - first) * PROBE_GROWTH)
        promotion.probed_upto = upto = min(first + more, end)
        wanted = []
        for rows, home in zip(view.found, promotion.homes, strict=True):
            lacks = (rows == ABSENT) & np.isin(home, (NOT_ASKED, IN_NO_TIER))
            wanted.append(begin + np.flatnonzero(lacks[begin:upto]))
        if any(map(len, wanted)):
            return wanted
    return None


def _has_lost(promotion: Promotion, found: list[I64Array]) -> bool:
    """Whether L1 has evicted a row for which no tier was asked because L1 had it.

    A further round of questions covers at least one such row, so the rounds come to an end.
    """
    probed = slice(promotion.first, promotion.probed_upto)
    return any(
        ((rows == ABSENT) & (home == NOT_ASKED))[probed].any()
        for rows, home in zip(found, promotion.homes, strict=True)
    )


def _gap(promotion: Promotion, coming: list[BoolArray]) -> bool:
    """Whether neither L1 nor a tier that was asked has some row of a group of which a hit needs
    all, so that none extends past it."""
    probed = slice(promotion.first, promotion.probed_upto)
    return any(
        not (there | (home >= 0))[probed].all()
        for c, there, home in zip(promotion.namespace.classes, coming, promotion.homes, strict=True)
        if c.spec.layout.rules.whole
    )


def _ask(state: State, promotion: Promotion, tier: int, wanted: list[I64Array]) -> None:
    """Ask a tier for the chunks ``wanted`` of each class."""
    promotion.move(PromotionState.PROBING)
    ns = promotion.namespace
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
        return  # the promotion has ended
    at = 0
    for home, wanted in zip(promotion.homes, op.wanted, strict=True):
        held = event.held[at : at + len(wanted)]
        home[wanted[held]], home[wanted[~held]] = op.tier, IN_NO_TIER
        at += len(wanted)
    if promotion.void:
        answer.answer(state, promotion)
    else:
        probe_next(state, promotion)
