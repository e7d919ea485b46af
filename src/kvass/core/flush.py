"""Flushing: what L1 has and a tier has not goes there, behind everybody's back.

Law of this file: a row that a tier reads is pinned by its operation, so nothing writes there
meanwhile. Each tier is given at most ``FLUSH_BYTES`` at a time, and never so much that flushing
keeps the arena full. What left L1 before its turn came is not flushed, and counted.

``write_through``: rows are queued when they become READY. ``on_evict``: when they are about to
leave, because room is short and nobody has used them for longest. A tier that refuses a row is not
asked again for it; one that is down is, after a while, for those that are still there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvass.core import epochs
from kvass.core.effects import Records, Stored, TierStore
from kvass.core.l1 import Namespace, RowClass
from kvass.core.leases import Part
from kvass.core.rows import READY
from kvass.core.state import State
from kvass.core.tiers import REST_S, Flushing, Queued
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


def take_published(state: State) -> None:
    """Queue what became READY in this step."""
    parts, state.custody.published = state.custody.published, []
    if state.config.flush == "write_through" and not state.stopping:
        for part in parts:
            _queue(state, part, range(len(state.config.tiers)))


def promoted(state: State, part: Part, tier: int) -> None:
    """``tier`` gave these rows: those before it, asked sooner and faster, shall have them too."""
    if len(part.rows) and state.config.flush == "write_through" and not state.stopping:
        _queue(state, part, range(tier))


def ahead(state: State) -> None:
    """``on_evict``: have the rows that leave next flushed, if room is short."""
    l1, size = state.l1, state.config.arena_bytes
    if state.config.flush != "on_evict" or l1.extents.free_bytes > size // _ROOM_SHARE:
        return
    for one in l1.classes.values():
        if len(one.free) * one.spec.row_bytes > size // _ROOM_SHARE:
            continue
        rows = one.policy.victims(_AHEAD, l1.table.clock)
        rows = rows[~l1.table.kept[rows]]
        if len(rows):
            _queue(state, Part(one.id, rows), range(len(state.config.tiers)))


def all_left(state: State) -> None:
    """The daemon stops: with ``on_evict`` that is when the rest leaves."""
    if state.config.flush != "on_evict":
        return
    for one in state.l1.classes.values():
        rows = one.index.rows()
        rows = rows[(state.l1.table.state[rows] == READY) & ~state.l1.table.kept[rows]]
        rows = rows[np.argsort(state.l1.table.stamp[rows])]
        if len(rows):
            _queue(state, Part(one.id, rows), range(len(state.config.tiers)))


def hurry(state: State) -> None:
    """The daemon stops: tiers that were left alone are asked once more."""
    epochs.rest_no_more(state)
    for tier in range(len(state.flushes.queues)):
        state.flushes.rests_until[tier] = -math.inf
        pump(state, tier)


def _queue(state: State, part: Part, tiers: Iterable[int]) -> None:
    state.l1.table.kept[part.rows] = True
    one = state.l1.classes.get(part.row_class)  # gone: cleared, and then unused
    if one is None or state.namespaces[one.namespace].private:
        return
    keys = state.l1.table.keys_of(part.rows).copy()
    for tier in tiers:
        state.flushes.queues[tier].append(Queued(part.row_class, part.rows, keys))
        state.flushes.rows[tier] += len(part.rows)
        if state.flushes.rows[tier] > len(state.l1.table) + _AHEAD:
            _drop_stale(state, tier, 2 * len(part.rows))
        pump(state, tier)


def pump(state: State, tier: int, look: int = _LOOK) -> None:
    """Give a tier the next rows of its queue, as many as may be on their way at a time."""
    flushes = state.flushes
    if state.now < flushes.rests_until[tier]:
        return
    most = min(FLUSH_BYTES, state.config.arena_bytes // 8 // len(flushes.queues))
    queue = flushes.queues[tier]
    waiting = 0
    look = len(queue) if state.stopping else look
    while len(queue) > waiting and waiting < look and flushes.bytes_out[tier] < most:
        one = state.l1.classes.get(queue[0].row_class)
        if one is None:
            _pop(state, tier, len(queue[0].rows))
            continue
        ns = state.namespaces[one.namespace]
        if tier not in epochs.usable(state, ns):
            queue.rotate(-1)  # others need not wait until the tier can tell its epoch
            waiting += 1
            continue
        room = max(1, min(STORE_BYTES, most - flushes.bytes_out[tier]) // one.spec.row_bytes)
        rows = _live(state, one, _pop(state, tier, room))
        if len(rows):
            _store(state, tier, ns, one, rows)


def _pop(state: State, tier: int, count: int) -> Queued:
    """The first ``count`` rows of what is first in the queue."""
    queue = state.flushes.queues[tier]
    head = queue.popleft()
    if len(head.rows) > count:
        queue.appendleft(Queued(head.row_class, head.rows[count:], head.keys[count:]))
        head = Queued(head.row_class, head.rows[:count], head.keys[:count])
    state.flushes.rows[tier] -= len(head.rows)
    return head


def _live(state: State, one: RowClass, queued: Queued) -> I64Array:
    """Which of the rows still are what they were when they were queued."""
    same = one.index.find(queued.keys) == queued.rows
    rows: I64Array = queued.rows[same]
    rows = rows[state.l1.table.state[rows] == READY]
    state.counters["flushes_lost"] += len(queued.rows) - len(rows)
    return rows


def _drop_stale(state: State, tier: int, most: int) -> None:
    """Rows come and go faster than the tier takes them: of the ``most`` that are first in the queue
    forget those that went. The others are last now, so that the next call looks at other rows."""
    while most > 0 and state.flushes.queues[tier]:
        queued = _pop(state, tier, most)
        most -= len(queued.rows)
        one = state.l1.classes.get(queued.row_class)
        if one is not None and len(rows := _live(state, one, queued)):
            keys = state.l1.table.keys_of(rows).copy()
            state.flushes.queues[tier].append(Queued(one.id, rows, keys))
            state.flushes.rows[tier] += len(rows)


def _store(state: State, tier: int, ns: Namespace, one: RowClass, rows: I64Array) -> None:
    epoch = ns.tier_epochs[tier]
    assert epoch is not None, "a tier was asked under no epoch"
    size = len(rows) * one.spec.row_bytes
    state.l1.pin(rows)
    state.flushes.bytes_out[tier] += size
    op = state.tiers.begin(Flushing(tier, Part(one.id, rows), size))
    records = Records(ns.digest, epoch, one.spec.group, state.l1.table.keys_of(rows).copy())
    state.out.append(TierStore(tier, op, records, state.l1.slots(rows), one.spec.shard_bytes))


def wake(state: State) -> None:
    """Ask tiers again that were down a while ago."""
    for tier, until in enumerate(state.flushes.rests_until):
        if until <= state.now and state.flushes.failures[tier]:
            pump(state, tier)
            if not state.flushes.bytes_out[tier]:  # it has not told its epochs either
                state.flushes.rests_until[tier] = state.now + REST_S


def left(state: State, tier: int) -> int:
    """Rows that a tier was promised and has not taken, of those that are still there."""
    _drop_stale(state, tier, state.flushes.rows[tier])
    ops = state.tiers.ops.values()
    storing = sum(len(o.part.rows) for o in ops if isinstance(o, Flushing) and o.tier == tier)
    return state.flushes.rows[tier] + storing + state.tiers.counters[tier]["stores_abandoned"]


def stored(state: State, event: Stored) -> None:
    """A tier has read its rows."""
    op, flushes = state.tiers.end(event.op, Flushing), state.flushes
    flushes.bytes_out[op.tier] -= op.size_bytes
    keys = state.l1.table.keys_of(op.part.rows).copy()
    state.l1.unpin(op.part.rows)
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
    pump(state, op.tier)
