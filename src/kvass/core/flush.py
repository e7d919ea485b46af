"""Flushing: rows of L1 are stored in the tiers, in the background.

Law of this file: a row that a tier reads is pinned by its operation, so nothing writes to it
meanwhile. Each tier stores at most ``FLUSH_BYTES`` at a time, and never so much that flushing keeps
the arena full. A row that left L1 before its turn came is not flushed, and counted.

With ``write_through`` rows are queued when they become READY; with ``on_evict`` when L1 is nearly
full and they are the least recently used. A tier that refuses a row is not asked again for it. A
tier that is down is asked again after a while, for the rows that are still there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvass.core import epochs
from kvass.core.effects import Stored, TierStore
from kvass.core.ledger import ClassRows
from kvass.core.row_store import Namespace, RowClass
from kvass.core.rows import READY
from kvass.core.state import State
from kvass.core.tier_state import REST_S, Flushing, Queued
from kvass.types import I64Array

FLUSH_BYTES: Final = 64 << 20
"""What a tier is storing at a time, at most; and all together no more than an eighth of L1."""
STORE_BYTES: Final = 16 << 20
"""What one operation stores."""
_ROOM_SHARE: Final = 8
"""``on_evict`` keeps the oldest part of L1, one of so many, flushed."""
_AHEAD: Final = 256
_LOOK: Final = 16
"""How much of a queue is looked at for rows whose epoch is known: a dead tier's may be long."""


def queue_published(state: State) -> None:
    """Queue what became READY in this step."""
    parts, state.settlement.published = state.settlement.published, []
    if state.config.flush == "write_through" and not state.stopping:
        for part in parts:
            _queue(state, part, range(len(state.config.tiers)))


def queue_promoted(state: State, part: ClassRows, tier: int) -> None:
    """``tier`` gave these rows: queue them for the tiers before it, which are asked first."""
    if len(part.rows) and state.config.flush == "write_through" and not state.stopping:
        _queue(state, part, range(tier))


def queue_next_victims(state: State) -> None:
    """``on_evict``: queue the rows that will be evicted next, if L1 is nearly full."""
    store, size = state.store, state.config.arena_bytes
    if state.config.flush != "on_evict" or store.extents.free_bytes > size // _ROOM_SHARE:
        return
    for row_class in store.classes.values():
        if len(row_class.free) * row_class.spec.row_bytes > size // _ROOM_SHARE:
            continue
        rows = row_class.lru.victims(_AHEAD, store.table.clock)
        rows = rows[~store.table.offered[rows]]
        if len(rows):
            _queue(state, ClassRows(row_class.id, rows), range(len(state.config.tiers)))


def queue_all_left(state: State) -> None:
    """The daemon stops: with ``on_evict`` everything that no tier was given is queued."""
    if state.config.flush != "on_evict":
        return
    for row_class in state.store.classes.values():
        rows = row_class.index.rows()
        rows = rows[(state.store.table.state[rows] >= READY) & ~state.store.table.offered[rows]]
        rows = rows[np.argsort(state.store.table.stamp[rows])]
        if len(rows):
            _queue(state, ClassRows(row_class.id, rows), range(len(state.config.tiers)))


def retry_now(state: State) -> None:
    """The daemon stops: tiers that were down are asked once more."""
    epochs.retry_now(state)
    for tier in range(len(state.flushes.queues)):
        state.flushes.rests_until[tier] = -math.inf
        store_next(state, tier)


def _queue(state: State, part: ClassRows, tiers: Iterable[int]) -> None:
    state.store.table.offered[part.rows] = True
    row_class = state.store.classes.get(part.row_class)  # gone: cleared, and then unused
    if row_class is None or state.namespaces[row_class.namespace].private:
        return
    keys = state.store.table.keys_of(part.rows).copy()
    for tier in tiers:
        state.flushes.queues[tier].append(Queued(part.row_class, part.rows, keys))
        state.flushes.rows[tier] += len(part.rows)
        if state.flushes.rows[tier] > len(state.store.table) + _AHEAD:
            _drop_stale(state, tier, 2 * len(part.rows))
        store_next(state, tier)


def store_next(state: State, tier: int, look: int = _LOOK) -> None:
    """Have a tier store the next rows of its queue, up to the limit of what it stores at a time."""
    flushes = state.flushes
    if state.now < flushes.rests_until[tier]:
        return
    most = min(FLUSH_BYTES, state.config.arena_bytes // 8 // len(flushes.queues))
    queue = flushes.queues[tier]
    waiting = 0
    look = len(queue) if state.stopping else look
    while len(queue) > waiting and waiting < look and flushes.bytes_out[tier] < most:
        row_class = state.store.classes.get(queue[0].row_class)
        if row_class is None:
            _pop(state, tier, len(queue[0].rows))
            continue
        ns = state.namespaces[row_class.namespace]
        if tier not in epochs.usable(state, ns):
            queue.rotate(-1)  # others need not wait until the tier can tell its epoch
            waiting += 1
            continue
        room = max(1, min(STORE_BYTES, most - flushes.bytes_out[tier]) // row_class.spec.row_bytes)
        rows = _live(state, row_class, _pop(state, tier, room))
        if len(rows):
            _store(state, tier, ns, row_class, rows)


def _pop(state: State, tier: int, count: int) -> Queued:
    """The first ``count`` rows of what is first in the queue."""
    queue = state.flushes.queues[tier]
    head = queue.popleft()
    if len(head.rows) > count:
        queue.appendleft(Queued(head.row_class, head.rows[count:], head.keys[count:]))
        head = Queued(head.row_class, head.rows[:count], head.keys[:count])
    state.flushes.rows[tier] -= len(head.rows)
    return head


def _live(state: State, row_class: RowClass, queued: Queued) -> I64Array:
    """Which of the rows still are what they were when they were queued."""
    same = row_class.index.find(queued.keys) == queued.rows
    rows: I64Array = queued.rows[same]
    rows = rows[state.store.table.state[rows] >= READY]
    state.counters["flushes_lost"] += len(queued.rows) - len(rows)
    return rows


def _drop_stale(state: State, tier: int, most: int) -> None:
    """Of the ``most`` rows that are first in a tier's queue, drop those that left L1: they come and
    go faster than the tier stores. The others are last now, so the next call looks at other rows.
    """
    while most > 0 and state.flushes.queues[tier]:
        queued = _pop(state, tier, most)
        most -= len(queued.rows)
        row_class = state.store.classes.get(queued.row_class)
        if row_class is not None and len(rows := _live(state, row_class, queued)):
            keys = state.store.table.keys_of(rows).copy()
            state.flushes.queues[tier].append(Queued(row_class.id, rows, keys))
            state.flushes.rows[tier] += len(rows)


def _store(state: State, tier: int, ns: Namespace, row_class: RowClass, rows: I64Array) -> None:
    size = len(rows) * row_class.spec.row_bytes
    state.store.pin(rows)
    state.flushes.bytes_out[tier] += size
    op = state.tiers.begin(Flushing(tier, ClassRows(row_class.id, rows), size))
    keys = state.store.table.keys_of(rows).copy()
    records = epochs.records(ns, tier, row_class, keys)
    slots, shard_bytes = state.store.slots(rows), row_class.spec.shard_bytes
    state.out.append(TierStore(tier, op, records, slots, shard_bytes))


def retry_due(state: State) -> None:
    """Ask tiers again that were down a while ago."""
    for tier, until in enumerate(state.flushes.rests_until):
        if until <= state.now and state.flushes.failures[tier]:
            store_next(state, tier)
            if not state.flushes.bytes_out[tier]:  # it has not told its epochs either
                state.flushes.rests_until[tier] = state.now + REST_S


def rows_left(state: State, tier: int) -> int:
    """Rows that are queued for a tier, or that it has not finished storing, and still there."""
    _drop_stale(state, tier, state.flushes.rows[tier])
    ops = state.tiers.ops.values()
    storing = sum(len(o.part.rows) for o in ops if isinstance(o, Flushing) and o.tier == tier)
    return state.flushes.rows[tier] + storing + state.tiers.counters[tier]["stores_abandoned"]


def stored(state: State, event: Stored) -> None:
    """A tier has read its rows."""
    op, flushes = state.tiers.end(event.op, Flushing), state.flushes
    flushes.bytes_out[op.tier] -= op.size_bytes
    keys = state.store.table.keys_of(op.part.rows).copy()
    state.store.unpin(op.part.rows)
    counters = state.tiers.counters[op.tier]
    if event.down and not state.stopping:
        counters["stores_put_off"] += len(keys)
        flushes.queues[op.tier].appendleft(Queued(op.part.row_class, op.part.rows, keys))
        flushes.rows[op.tier] += len(keys)
        flushes.failed(op.tier, state.now)
        return
    if event.down:
        counters["stores_abandoned"] += len(keys)
    else:
        flushes.failures[op.tier] = 0
    counters["stored_rows"] += int(event.which.sum())
    counters["store_failures"] += int((~event.which).sum())
    store_next(state, op.tier)
