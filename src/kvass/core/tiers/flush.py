"""Flushing: rows of L1 are stored in the tiers, in the background.

A row that a tier reads is pinned by its operation, so nothing writes to it meanwhile. Each tier
stores at most ``FLUSH_BYTES`` at a time. A queued row may be evicted before it is stored; such rows
are counted (``flushes_lost``).

With ``write_through`` rows are queued when they become READY. With ``on_evict`` they are queued
when L1 is nearly full and they are the least recently used. A row that a tier refuses is not queued
for it again. Rows of a session that its client has ended are not queued. A tier that is down is
asked again after a while, for the rows that are still in L1.

While a tier reports that it is over its write budget (``over_budget``), rows that no lookup has hit
are left out when their turn comes. Such a row is queued again at its first hit. It is not known
which rows a tier left out, so from then on every first hit queues its rows for that tier, which
stores what it does not hold.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from kvass.core.effects import Stored, TierStore
from kvass.core.pending.follow_ups import FirstHit, Published
from kvass.core.pending.tier_operations import Flushing
from kvass.core.pending.tier_state import Queued, TierState
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_table import READY, ClassRows
from kvass.core.state import State
from kvass.core.tiers import epochs
from kvass.types import I64Array

FLUSH_BYTES: Final = 64 << 20
"""The most bytes that a tier stores at a time. All tiers together store at most an eighth of L1."""
STORE_BYTES: Final = 16 << 20
"""The most bytes that one operation stores."""
REST_S: Final = 1.0
"""How long a tier that was down is not asked to store."""
_ROOM_SHARE: Final = 8
"""``on_evict`` begins to queue rows when only 1/8 of L1 is free."""
_AHEAD: Final = 256
"""How many rows of a class ``on_evict`` looks at, least recently used first."""
_FORGET: Final = 4096
"""How many parts of a removed tier's queue one step drops: 1 ms of work."""
_LEAVE_OUT: Final = 128
"""In how many parts of a tier's queue one call leaves out rows that are over its budget."""
_LOOK: Final = 16
"""How many parts of a queue one step looks at for rows whose epoch is known."""


# ---------------------------------------------------------------- queueing


def published(state: State, told: list[Published]) -> None:
    """Queue the rows that became READY, and count their tokens as stored."""
    for part in told:
        row_class = state.classes.by_id.get(part.row_class)
        ns = None if row_class is None else state.namespaces[row_class.namespace]
        if ns is not None and ns.classes[0] is row_class:
            ns.traffic.stored_tokens += len(part.rows) * ns.chunk_tokens
        queue_written(state, part, state.tiers.used)


def queue_written(state: State, part: ClassRows, tiers: list[TierState]) -> None:
    """``write_through``: queue rows that became READY for ``tiers``."""
    if len(part.rows) and state.config.flush == "write_through" and not state.stopping:
        _queue(state, part, tiers)


def queue_next_victims(state: State) -> None:
    """``on_evict``: queue the rows that will be evicted next, if L1 is nearly full."""
    size = state.config.arena_bytes
    if state.config.flush == "on_evict" and state.classes.extents.free_bytes <= size // _ROOM_SHARE:
        for row_class in state.classes.by_id.values():
            if len(row_class.free) * row_class.spec.row_bytes <= size // _ROOM_SHARE:
                _queue_new(state, row_class, row_class.order.oldest(_AHEAD, state.rows.table.clock))


def hit_first(state: State, told: list[FirstHit]) -> None:
    """Queue the rows that lookups hit for the first time, for the tiers that have left out rows.
    With ``on_evict``, only those whose turn was before. No tails: no lookup asks a tier for one."""
    tiers = [tier for tier in state.tiers.used if tier.counters["rows_over_budget"]]
    for part in told if tiers else ():
        rows = part.rows[state.rows.table.offered[part.rows]]
        row_class = state.classes.by_id.get(part.row_class)
        if row_class is not None and row_class.blocks is not None:
            rows = rows[~row_class.blocks.prints.tails(rows)]
        if len(rows) and not state.stopping:
            _queue(state, ClassRows(part.row_class, rows), tiers)


def _queue_new(state: State, row_class: RowClass, rows: I64Array) -> None:
    """Queue for all tiers those of ``rows`` that were neither queued before nor loaded from a
    tier."""
    rows = rows[~state.rows.table.offered[rows]]
    if len(rows):
        _queue(state, ClassRows(row_class.id, rows), state.tiers.used)


def _queue(state: State, part: ClassRows, tiers: list[TierState]) -> None:
    """Queue rows, unless they belong to a session that has ended."""
    if (over := state.followers.tags.ended(part.rows)).any():
        part = ClassRows(part.row_class, part.rows[~over])
    state.rows.table.offered[part.rows] = True
    row_class = state.classes.by_id.get(part.row_class)  # None: cleared, and then dropped
    if row_class is None or state.namespaces[row_class.namespace].private:
        return
    for tier in tiers:
        _append(state, tier, part, state.now)
        if tier.queued_rows > len(state.rows.table) + _AHEAD:
            _drop_stale(state, tier, 2 * len(part.rows))
        store_next(state, tier)


def _append(state: State, tier: TierState, part: ClassRows, since: float) -> None:
    keys = state.rows.table.keys_of(part.rows).copy()
    tier.queue.append(Queued(since, part.row_class, part.rows, keys))
    tier.queued_rows += len(part.rows)


# ---------------------------------------------------------------- storing


def store_next(state: State, tier: TierState, look: int = _LOOK) -> None:
    """Have a tier store the next rows of its queue, up to the limit of what it stores at a time."""
    if tier.rests_until is not None or not tier.place:
        return
    most = min(FLUSH_BYTES, state.config.arena_bytes // 8 // len(state.tiers.used))
    look, waiting = len(tier.queue) if state.stopping else look, 0
    left_out = 0
    while len(tier.queue) > waiting and waiting < look and tier.storing_bytes < most:
        row_class = state.classes.by_id.get(tier.queue[0].row_class)
        room = min(STORE_BYTES, most - tier.storing_bytes)
        if row_class is None:  # it was cleared
            _live(state, _pop(tier, room))
        elif tier.number in epochs.usable(state, state.namespaces[row_class.namespace]):
            rows = _live(state, _pop(tier, max(1, room // row_class.spec.row_bytes)))
            rows, some = _within_budget(state, tier, rows)
            payers = state.classes.sets.tenant[state.rows.table.set_of[rows]]
            for payer in np.unique(payers).tolist():
                name = state.tenants.named(payer)
                _store(state, tier, row_class, rows[payers == payer], name)
            if (left_out := left_out + some) == _LEAVE_OUT:
                tier.rests_until = state.now  # the next step goes on
                return
        else:
            tier.queue.rotate(-1)  # rows of other namespaces need not wait for this epoch
            waiting += 1


def _pop(tier: TierState, count: int) -> Queued:
    """Take rows from the head of the queue: at most ``count``, of one part."""
    head = tier.queue.popleft()
    if len(head.rows) > count:
        since, row_class, rows, keys = msgspec.structs.astuple(head)
        tier.queue.appendleft(Queued(since, row_class, rows[count:], keys[count:]))
        head = Queued(since, row_class, rows[:count], keys[:count])
    tier.queued_rows -= len(head.rows)
    return head


def _live(state: State, queued: Queued) -> I64Array:
    """The queued rows that are still READY under the same key. The others are counted as lost."""
    row_class, rows = state.classes.by_id.get(queued.row_class), queued.rows[:0]
    if row_class is not None:
        rows = queued.rows[row_class.index.find(queued.keys) == queued.rows]
        rows = rows[state.rows.table.state[rows] >= READY]
    state.counters["flushes_lost"] += len(queued.rows) - len(rows)
    return rows


def _within_budget(state: State, tier: TierState, rows: I64Array) -> tuple[I64Array, bool]:
    """The rows that the tier may store now: over its write budget, only those that a lookup has
    hit. Also returns whether any were left out."""
    if not tier.report.get("over_budget") or (hit := state.rows.table.read[rows]).all():
        return rows, False
    tier.counters["rows_over_budget"] += int((~hit).sum())
    tier.left_out_s = state.now
    state.settlement.notes_first_hits = True
    return rows[hit], True


def _drop_stale(state: State, tier: TierState, most: int) -> None:
    """Look at the ``most`` first rows of a tier's queue, and drop those that have left L1.

    Without this the queue grows when rows come and go faster than the tier stores. The rows that
    stay go to the end of the queue, so the next call looks at other rows.
    """
    while most > 0 and tier.queue:
        queued = _pop(tier, most)
        most -= len(queued.rows)
        if len(rows := _live(state, queued)):
            _append(state, tier, ClassRows(queued.row_class, rows), queued.since)


def _store(state: State, tier: TierState, row_class: RowClass, rows: I64Array, tenant: str) -> None:
    ns, size = state.namespaces[row_class.namespace], len(rows) * row_class.spec.row_bytes
    state.rows.pin(rows)
    tier.storing_bytes += size
    op = state.tiers.begin(Flushing(tier.number, state.now, ClassRows(row_class.id, rows), size))
    records = epochs.records(ns, tier.number, row_class, state.rows.table.keys_of(rows))
    slots, shard_bytes = state.rows.slots(rows), row_class.spec.shard_bytes
    state.out.append(TierStore(tier.number, op, records, slots, shard_bytes, tenant))


def stored(state: State, event: Stored) -> None:
    op = state.tiers.end(event.op, Flushing)
    tier, rows = state.tiers.all[op.tier], op.part.rows
    tier.storing_bytes -= op.size_bytes
    tier.histograms["store_seconds"].observe(state.now - op.begun)
    keys = state.rows.table.keys_of(rows).copy()
    state.rows.unpin(rows)
    if event.down and not state.stopping:
        tier.counters["stores_put_off"] += len(rows)
        tier.queue.appendleft(Queued(op.begun, op.part.row_class, rows, keys))
        tier.queued_rows += len(rows)
        tier.rests_until = state.now + REST_S
        return
    if event.down:
        tier.counters["stores_abandoned"] += len(rows)
    tier.counters["stored_rows"] += (count := int(event.which.sum()))
    tier.counters["stored_bytes"] += count * (op.size_bytes // len(rows))
    if count < len(rows):
        tier.left_out_s = tier.failed_s = state.now
    tier.failing_rows = 0 if count else tier.failing_rows + len(rows)
    tier.counters["store_failures"] += int((~event.which).sum())
    store_next(state, tier)


def has_all(tier: TierState, begin: float, end: float) -> bool:
    """Whether a tier has stored, or has pinned, all rows that were queued for it from ``begin`` to
    ``end``. Not if its queue is long."""
    waits = len(tier.queue) > _LOOK or any(queued.since <= end for queued in tier.queue)
    return not (waits or tier.rests_until is not None or tier.left_out_s >= begin)


# ---------------------------------------------------------------- retries, and the stop


def retry_due(state: State) -> None:
    """Ask tiers whose ``rests_until`` has passed to store again. Drop the queues of removed
    tiers."""
    for tier in state.tiers.all:
        if not tier.place:
            for _ in range(min(len(tier.queue), _FORGET)):
                state.counters["flushes_lost"] += len(_pop(tier, tier.queued_rows).rows)
        elif tier.rests_until is not None and tier.rests_until <= state.now:
            tier.rests_until = None
            store_next(state, tier)
            if tier.queue and not tier.storing_bytes and tier.rests_until is None:
                tier.rests_until = state.now + REST_S  # its epochs are not known yet


def stop(state: State) -> None:
    """The daemon stops: ask tiers that were down once more.

    With ``on_evict``, queue all rows that were not queued before.
    """
    state.stopping = True
    epochs.retry_now(state)
    for tier in state.tiers.used:
        tier.rests_until = None
        store_next(state, tier)
    if state.config.flush == "on_evict":
        table = state.rows.table
        for row_class in state.classes.by_id.values():
            rows = row_class.index.rows()
            rows = rows[table.state[rows] >= READY]
            _queue_new(state, row_class, rows[np.argsort(table.stamp[rows])])


def unflushed(state: State, tier: TierState) -> int:
    """How many rows in L1 are queued for a tier, are being stored by it, or were abandoned."""
    _drop_stale(state, tier, tier.queued_rows)
    ops = [op for op in state.tiers.ops.values() if isinstance(op, Flushing)]
    storing = sum(len(op.part.rows) for op in ops if op.tier == tier.number)
    return tier.queued_rows + storing + tier.counters["stores_abandoned"]
