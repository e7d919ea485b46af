"""Loading rows from tiers into L1.

A row is LOADING from the step that takes its slot to the step in which the tier is done with
the slot (law 3), even if no promotion waits for it any more. ``ahead.py`` says when the tier is
asked.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.core.effects import Loaded, TierLoad
from kvass.core.pending.promotion import Promotion
from kvass.core.pending.tier_operations import Loading
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import LOADING, ClassRows
from kvass.core.state import State
from kvass.core.tiers import ahead, epochs, flush
from kvass.types import I64Array

LOAD_BYTES: Final = 16 << 20
"""The most bytes that one operation loads. It is small, so that a part of a hit is READY early."""


def load(
    state: State, promotion: Promotion, wanted: list[I64Array], upto: int, protect: int
) -> int:
    """Allocate rows for the chunks ``wanted`` of each class, and ask the tiers to fill them.

    Returns ``upto``, or the first chunk for which there was no room. Then nothing is loaded.
    """
    classes, keys, context = promotion.namespace.classes, promotion.keys[:upto], promotion.context
    payer = state.tenants.payer(context.tenant)
    session = 0 if state.followers.tags.has_ended(context.session) else context.session
    rows, cut = state.allocator.allocate(classes, keys, wanted, protect, payer, LOADING, session)
    if cut < upto:
        state.counters["promotions_cut"] += 1
        for taken in rows:
            state.rows.free(taken, "no_room")
        return cut
    loads = list[TierLoad]()
    for c, w, taken, home in zip(classes, wanted, rows, promotion.homes, strict=True):
        state.rows.touch(c, taken)
        step = max(1, LOAD_BYTES // c.spec.row_bytes)
        for tier in np.unique(home[w]).tolist():
            of_tier = taken[home[w] == tier]
            for at in range(0, len(of_tier), step):
                loads.append(_load(state, promotion.namespace, c, tier, of_tier[at : at + step]))
    ahead.ask(state, promotion, loads)
    return upto


def _load(state: State, ns: Namespace, c: RowClass, tier: int, rows: I64Array) -> TierLoad:
    """Open the operation of a tier that fills LOADING rows of a class."""
    size = len(rows) * c.spec.row_bytes
    op = state.tiers.begin(Loading(tier, state.now, ClassRows(c.id, rows), size, set()))
    state.rows.table.loader[rows] = op
    records = epochs.records(ns, tier, c, state.rows.table.keys_of(rows))
    return TierLoad(tier, op, records, state.rows.slots(rows), c.spec.shard_bytes)


def loaded(state: State, event: Loaded) -> list[Promotion]:
    """A tier has finished a load: make its rows READY or FAILED. Returns the promotions that waited
    for them."""
    op = state.tiers.end(event.op, Loading)
    good, failed = op.part.rows[event.which], op.part.rows[~event.which]
    size = len(good) * (op.size_bytes // len(op.part.rows))
    tier = state.tiers.all[op.tier]
    ahead.ended(state, tier, event.op, op, size)
    tier.histograms["load_seconds"].observe(state.now - op.begun)
    tier.counters["loaded_rows"] += len(good)
    tier.counters["loaded_bytes"] += size
    tier.counters["load_misses"] += len(failed)
    state.rows.publish_loaded(good, state.config.keep_loaded)
    earlier_tiers = state.tiers.used[: max(0, tier.place - 1)]
    flush.queue_written(state, ClassRows(op.part.row_class, good), earlier_tiers)
    state.rows.fail(failed)
    waited = [p for p in map(state.promotions.all.get, sorted(op.waiters)) if p is not None]
    for promotion in waited:
        promotion.awaits.discard(event.op)
    return waited
