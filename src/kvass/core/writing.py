"""Reserve, commit, abort, and handing over.

Law of this file: one function per message. It returns the reply (``None``: there is none) or raises
``Refused`` before it changed anything.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core import flush
from kvass.core.checks import (
    check_request,
    known_ranks,
    open_lease,
    open_reservation,
    own_rank,
    scheduler_of,
    split_keys,
)
from kvass.core.coverage import first_chunk
from kvass.core.index import ABSENT, repeated
from kvass.core.ledger import ClassRows
from kvass.core.registry import ClientSession, Instance
from kvass.core.row_store import Namespace, RowClass
from kvass.core.state import State
from kvass.errors import Refused
from kvass.messages import Abort, Commit, Grant, Granted, HandedOver, Reserve, ReserveItem
from kvass.types import SCHEDULER, I64Array, U64Array

ROWS_A_STEP: Final = 4096
"""So many chunks of an item one step decides at most: others wait for it."""
COST_OF_AN_ITEM: Final = 256
COST_A_STEP: Final = 24 * COST_OF_AN_ITEM
"""What one step does for a ``Reserve``, in chunks that it grants: an item takes as long as 256 of
them, and to find eight that are there as long as c."""


def reserve(state: State, session: ClientSession, msg: Reserve) -> Granted:
    """Slots for the chunks of one scheduler step that nobody has yet."""
    instance = scheduler_of(state, session)
    asked = [_check_item(state, item, msg.width, instance) for item in msg.items]
    if state.namespace_of(instance) is None:  # no decision about any key: it is asked again
        raise Refused("not_registered", f"ranks {instance.missing} are missing: reserve later")
    total = sum(len(keys) for keys, _ in asked)
    if total > state.config.limits.keys_per_message:
        raise Refused("limit", f"at most {state.config.limits.keys_per_message} keys a message")
    protect = state.store.table.clock
    now = _items_now(msg.items, asked)
    used = [
        _touch(state, instance, item, keys)  # all of them, before any makes room for itself
        for item, (keys, _) in zip(msg.items[:now], asked, strict=False)
    ]
    grants = [
        _grant(state, instance, item, keys, writers, protect, found)
        for item, (keys, writers), found in zip(msg.items[:now], asked, used, strict=False)
    ]
    grants += [Grant(later=item.first) for item in msg.items[now:]]
    flush.queue_next_victims(state)
    return Granted(
        boot=state.config.boot,
        given_s=state.now,
        deadline_s=state.now + state.config.timing.reserve_s,
        grants=grants,
    )


def _items_now(items: list[ReserveItem], asked: list[tuple[U64Array, set[int]]]) -> int:
    """How many of the items one step carries out."""
    costs = [
        COST_OF_AN_ITEM + len(keys) - item.first + len(keys) // 8
        for item, (keys, _) in zip(items, asked, strict=True)
    ]
    return max(1, int(np.searchsorted(np.cumsum(costs), COST_A_STEP, side="right")))


def _check_item(
    state: State, item: ReserveItem, width: int, instance: Instance
) -> tuple[U64Array, set[int]]:
    check_request(item.request, state.config.limits)
    keys = split_keys(item.digests, width, item.first, state.config.limits)
    ns = state.namespace_of(instance)
    if ns is None:
        return keys, set()
    named = instance.writers if item.writers is None else item.writers
    writers = known_ranks("writers", named, instance)
    if not instance.covers_all_shards(writers):
        raise Refused("bad_value", "writers: every shard needs exactly one of them")
    groups = len(ns.classes)
    if not 0 < item.groups < 1 << groups:
        raise Refused("bad_value", f"groups: mask {item.groups} does not fit {groups} groups")
    return keys, writers


def _grant(
    state: State,
    instance: Instance,
    item: ReserveItem,
    keys: U64Array,
    writers: set[int],
    protect: int,
    used: list[Used],
) -> Grant:
    """WRITING rows for the chunks of ``item`` that nobody has, as far as they fit."""
    ns = state.namespace_of(instance)
    assert ns is not None, "reserve() asked already"
    classes = [c for g, c in enumerate(ns.classes) if item.groups >> g & 1]
    until = min(item.first + ROWS_A_STEP, len(keys))
    later = until if until < len(keys) else -1
    lacking = _lacking(ns, item, keys[:until])[[c.spec.group for c in classes]]
    _cut(lacking, classes, _allowance(state, instance))
    wanted = [np.flatnonzero(each) + item.first for each in lacking]
    if not any(map(len, wanted)):
        return Grant(later=later)
    state.counters["chunks_wanted"] += int(lacking.any(axis=0).sum())
    rows, end = state.store.allocate_each(classes, keys[:until], wanted, protect)
    for i, w in enumerate(wanted):  # what lies behind a chunk that got no row is of no use
        n = int(np.searchsorted(w, end))
        _take_back(state, rows[i][n:])
        wanted[i], rows[i] = w[:n], rows[i][:n]
    _touch_new(
        state, ns, used, {c.id: (w, r) for c, w, r in zip(classes, wanted, rows, strict=True)}
    )
    parts = tuple(ClassRows(c.id, r) for c, r in zip(classes, rows, strict=True) if len(r))
    if not parts:
        return Grant()
    reservation = state.settlement.reserve(
        instance.id, item.request, parts, writers, ns.epoch, state.now
    )
    which = tuple(tuple(w.tolist()) for w in wanted)
    chunks = tuple(sorted({c for each in which for c in each}))
    state.counters["chunks_granted"] += len(chunks)
    return Grant(
        reservation=reservation.id,
        chunks=chunks,
        slots=tuple(map(state.store.slots, rows)),
        which=() if all(each == chunks for each in which) else which,
        later=later,
    )


Used = tuple[int, I64Array]
"""Of one class: a chunk, and the rows from there on (or ``ABSENT``) that a prompt has."""


def _touch(state: State, instance: Instance, item: ReserveItem, keys: U64Array) -> list[Used]:
    """The prompt that ``item`` names is in use, also by who asks to write the rest of it.

    Of windows and states that means what it asks to write, and what a hit of all of it needs.
    """
    ns = state.namespace_of(instance)
    assert ns is not None, "reserve() asked already"
    used = []
    for c in ns.classes:
        begin = min(item.first, first_chunk(c.spec.layout, len(keys), ns.chunk_tokens))
        found = c.index.find(keys[begin:])
        state.store.touch(c, _present(found))
        used.append((begin, found))
    return used


def _touch_new(
    state: State, ns: Namespace, used: list[Used], new: dict[int, tuple[I64Array, I64Array]]
) -> None:
    """Once more, with the new rows, by class the chunks and the rows: they are deeper, so older.

    Nothing of ``used`` has been evicted since it was touched: that is protected.
    """
    for c, (begin, found) in zip(ns.classes, used, strict=True):
        if c.id in new:
            chunks, rows = new[c.id]
            found[chunks - begin] = rows
        state.store.touch(c, _present(found))


def _lacking(ns: Namespace, item: ReserveItem, keys: U64Array) -> npt.NDArray[np.bool_]:
    """Which rows nobody has of those that ``item`` asks for: bool, ``(groups, chunks)``, from chunk
    ``item.first`` on.

    A window or a state is worth writing only where the chunk's full rows are, or will be.
    """
    keys = keys[item.first :]
    absent = np.stack([c.index.find(keys) == ABSENT for c in ns.classes])
    asked = np.array([item.groups >> g & 1 for g in range(len(absent))], np.bool_)
    lacking: npt.NDArray[np.bool_] = absent & asked[:, None]
    columns = np.flatnonzero(lacking.any(axis=0))
    if len(columns) > 1:  # a key said twice is written once
        lacking[:, columns[repeated(keys[columns])]] = False
    full = np.array([c.spec.layout.kind == "full" for c in ns.classes])
    if not full.all():
        lacking[~full] &= (~absent | lacking)[full].all(axis=0)
    return lacking


def _cut(lacking: npt.NDArray[np.bool_], classes: list[RowClass], allowance: int) -> None:
    """Take out of ``lacking`` the chunks past ``allowance`` bytes."""
    sizes = np.array([c.spec.row_bytes for c in classes], np.int64)
    bytes_upto = np.cumsum(sizes @ lacking)
    lacking[:, int(np.searchsorted(bytes_upto, allowance, side="right")) :] = False


def _allowance(state: State, instance: Instance) -> int:
    """How many more bytes the instance may reserve (law 12)."""
    limits = state.config.limits
    if len(state.reservations.of(instance.id)) >= limits.reservations_per_instance:
        return 0
    return max(0, state.quota - state.reservations.bytes_of.get(instance.id, 0))


def _take_back(state: State, rows: I64Array) -> None:
    """Undo an allocation that nobody was told of."""
    if len(rows):
        state.store.discard(rows)
        state.store.free(rows)


def commit(state: State, session: ClientSession, msg: Commit) -> None:
    """A rank wrote its shard of every row of a reservation."""
    reservation = open_reservation(state, session, msg.boot, msg.reservation)
    rank = own_rank(session, msg.rank)
    if reservation is None or rank not in reservation.owing:
        return  # said twice, or settled meanwhile: nothing left to publish
    row_class = state.store.classes.get(reservation.parts[0].row_class)
    epoch = None  # its namespace was cleared, and then forgotten
    if row_class is not None:
        epoch = state.namespaces[row_class.namespace].epoch
    state.settlement.commit(reservation, rank, epoch, state.now)


def abort(state: State, session: ClientSession, msg: Abort) -> None:
    """A rank will not write, or the scheduler never told anybody to."""
    reservation = open_reservation(state, session, msg.boot, msg.reservation)
    rank = own_rank(session, msg.rank)
    if reservation is None:
        return
    if rank != SCHEDULER:
        state.settlement.abort(reservation, rank, state.now)
    elif reservation.handed_over:
        what = f"reservation {msg.reservation}"
        raise Refused("bad_rank", f"{what} was handed over: only its ranks abort")
    else:
        state.settlement.cancel(reservation, state.now)


def handed_over(state: State, session: ClientSession, msg: HandedOver) -> None:
    """From here on only the ranks settle these."""
    own_rank(session, SCHEDULER)
    leases = [open_lease(state, session, msg.boot, i) for i in msg.leases]
    reservations = [open_reservation(state, session, msg.boot, i) for i in msg.reservations]
    for held in (*leases, *reservations):
        if held is not None:  # else it ended meanwhile
            held.handed_over = True


def _present(found: I64Array) -> I64Array:
    present: I64Array = found[found != ABSENT]
    return present
