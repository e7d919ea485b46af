"""Planning a promotion: which rows are loaded, from which tier.

The plan is the longest hit for which L1 and the tiers together have the rows. It is cut to what
fits (law 12). Nothing is loaded if loading takes longer than computing.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.core.pending.promotion import Promotion
from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import LOADING
from kvass.core.state import State
from kvass.core.tiers import answer, flush, load, lost_segments
from kvass.types import I64Array
from kvass.worth import compute_s, worth_loading

LOADING_SHARE: Final = 0.5
"""LOADING rows take no more of L1 than this (law 12)."""
AHEAD_SHARE: Final = 0.25
"""A prefetch loads nothing beyond this, so that it leaves room to lookups."""
AHEAD_KEEPS_S: Final = 10.0
"""A prefetch evicts no row that was used in so many seconds: what others wait for, or use often.
One of a session that comes back sooner evicts what was used before that: an L1 that keeps rows for
less time would lose what is fetched, too."""


def plan(state: State, promotion: Promotion) -> None:
    """Load the rows that the longest hit needs and L1 lacks, as many as fit. Pin that hit."""
    lost_segments.forget_lost(state, promotion)
    n, weighed = len(promotion.keys), False
    protect, share = state.rows.table.clock, LOADING_SHARE
    if promotion.ahead:
        keeps_s = min(AHEAD_KEEPS_S, promotion.soon_s)
        protect, share = state.rows.uses.since(keeps_s), AHEAD_SHARE
    # A tier may have been removed since it was asked. The three last entries of ``known`` are for
    # the homes NOT_ASKED, DUPLICATE and IN_NO_TIER, which are negative indexes.
    known = np.array([e is not None for e in promotion.namespace.tier_epochs] + [False] * 3)
    while n > promotion.first:
        view = promotion.view(state.rows, n)
        lacking = [
            (rows == ABSENT) & known[home[:n]]
            for rows, home in zip(view.found, promotion.homes, strict=True)
        ]
        coming = view.there(LOADING)
        end = view.longest([a | b for a, b in zip(coming, lacking, strict=True)])
        wanted = [
            begin + np.flatnonzero(lacks[begin:upto])
            for lacks, (begin, upto) in zip(lacking, view.needs(end), strict=True)
        ]
        if not any(map(len, wanted)):
            break
        if not weighed:
            weighed = True
            if not _worth_it(state, promotion, wanted, end - view.longest(view.there())):
                promotion.why = "not_worth_it"
                break
        upto = end + promotion.spare
        n = _fitting(state, promotion.namespace, wanted, upto, share)
        if n == upto:
            view.use(end)  # so that none of the prompt's rows is evicted for the load
            n = load.load(state, promotion, wanted, upto, protect)
            if n == upto:
                flush.queue_next_victims(state)
                break
        promotion.why = "no_room"
    answer.pin_hit(state, promotion, LOADING)


def _worth_it(state: State, promotion: Promotion, wanted: list[I64Array], chunks: int) -> bool:
    """Whether loading is worth it (``kvass.worth``)."""
    if not state.config.skip_slow_loads:
        return True
    ns, tiers = promotion.namespace, state.tiers.all
    sizes = np.zeros(len(tiers), np.int64)
    for c, home, w in zip(ns.classes, promotion.homes, wanted, strict=True):
        sizes += np.bincount(home[w], minlength=len(sizes)) * c.spec.row_bytes
    used = [(tiers[tier].speed, int(sizes[tier])) for tier in np.flatnonzero(sizes).tolist()]
    computing_s = compute_s(chunks * ns.chunk_tokens, promotion.context.prefill_tokens_s)
    if worth_loading(sum(speed.seconds(size) for speed, size in used), computing_s):
        if not worth_loading(sum(speed.measured_s(size) for speed, size in used), computing_s):
            for speed, _ in used:
                speed.trial = True
        return True
    state.counters["promotions_not_worth_it"] += 1
    for speed, _ in used:
        speed.refused()
    return False


def _fitting(state: State, ns: Namespace, wanted: list[I64Array], upto: int, share: float) -> int:
    """How many chunks, of ``upto``, can be loaded if LOADING rows take ``share`` of L1 at most."""
    sizes = np.zeros(upto, np.int64)
    for c, w in zip(ns.classes, wanted, strict=True):
        sizes[w] += c.spec.row_bytes
    left = int(state.config.arena_bytes * share) - state.loading_bytes
    return int(np.searchsorted(np.cumsum(sizes), max(left, 0), side="right"))
