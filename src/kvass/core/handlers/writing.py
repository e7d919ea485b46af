"""Reserve, commit, abort, and handing over.

A function per message. It returns the reply (``None``: there is none) or raises ``Refused`` before
it changed anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.core.clients.registry import ClientSession, Instance
from kvass.core.handlers.checks import (
    check_request,
    most_keys,
    open_lease,
    open_reservation,
    own_rank,
    scheduler_of,
    split_keys,
)
from kvass.core.matching.coverage import first_chunk
from kvass.core.rows.index import ABSENT, repeated
from kvass.core.rows.row_classes import Namespace, RowClass
from kvass.core.rows.row_table import ClassRows
from kvass.core.state import State
from kvass.core.tiers import flush
from kvass.errors import Refused
from kvass.messages import Abort, Commit, Grant, Granted, HandedOver, Reserve, ReserveItem
from kvass.types import SCHEDULER, I64Array, U64Array

ROWS_A_STEP: Final = 512
"""So many rows of an item one step decides at most, or a chunk: others wait for it."""
COST_OF_AN_ITEM: Final = 256
COST_A_STEP: Final = 6 * COST_OF_AN_ITEM
"""What one step does for a ``Reserve``, in chunks that it grants: an item takes as long as 256 of
them, and to find eight that are there as long as c."""


class Item(NamedTuple):
    """A ``ReserveItem`` that was checked. ``classes``: of the groups whose rows it asks for.

    ``prints[i]``: of chunk ``first + i``, if its blocks are known. ``tail``: of the last chunk only
    so many blocks are written, unless it is 0; then its key is the hash of the last of them.
    """

    request: str
    first: int
    keys: U64Array
    classes: list[RowClass]
    tenant: str
    prints: U64Array | None = None
    tail: int = 0


Used = tuple[int, I64Array]
"""Of one class: a chunk, and the rows from there on (or ``ABSENT``) that a prompt has."""


def reserve(state: State, session: ClientSession, msg: Reserve) -> Granted:
    """Slots for the chunks of one scheduler step that nobody has yet."""
    instance = scheduler_of(state, session)
    ns = state.namespace_of(instance)
    if ns is None:  # no decision about any key: it is asked again
        raise Refused("not_registered", f"ranks {instance.missing} are missing: reserve later")
    sizes = [len(item.digests) // max(msg.width, 1) for item in msg.items]
    if sum(sizes) > state.config.limits.keys_per_message:
        raise Refused("limit", f"at most {state.config.limits.keys_per_message} keys a message")
    now = min(_items_now(msg.items, sizes, len(ns.classes)), _items_of_one_payer(state, msg.items))
    items = [_checked(state, ns, item, msg.width) for item in msg.items[:now]]
    protect = state.rows.table.clock
    used = [_touch(state, ns, item) for item in items]  # before any makes room for itself
    grants = list[Grant]()
    for item, found in zip(items, used, strict=True):
        if grants:  # an item before may have been granted its rows
            found = _find(ns, item)
        grants.append(_grant(state, instance, ns, item, protect, found))
    grants += [Grant(later=item.first) for item in msg.items[now:]]
    flush.queue_next_victims(state)
    return Granted(
        boot=state.config.boot,
        given_s=state.now,
        deadline_s=state.now + state.config.timing.reserve_s,
        grants=grants,
    )


def _checked(state: State, ns: Namespace, item: ReserveItem, width: int) -> Item:
    check_request(item.request, state.config.limits)
    keys = split_keys(item.digests, width, item.first, state.config.limits)
    groups = len(ns.classes)
    if not 0 < item.groups < 1 << groups:
        raise Refused("bad_value", f"groups: mask {item.groups} does not fit {groups} groups")
    classes = [c for g, c in enumerate(ns.classes) if item.groups >> g & 1]
    most = most_keys(state, ns)
    if item.first > most:
        return Item(item.request, 0, keys[:0], classes, item.tenant)
    if not item.blocks or not ns.chunk_blocks:
        return Item(item.request, item.first, keys[:most], classes, item.tenant)
    blocks = split_keys(item.blocks, width, 0, state.config.limits)
    chunks, tail = divmod(len(blocks), ns.chunk_blocks)
    if chunks != len(keys) - item.first:
        text = f"{len(blocks)} hashes for {len(keys) - item.first} chunks and the part of one"
        raise Refused("bad_value", f"blocks: {text}; a chunk has {ns.chunk_blocks}")
    prints = np.zeros((chunks + (tail > 0)) * ns.chunk_blocks, np.uint64)
    prints[: len(blocks)] = state.classes.prints(blocks)
    prints = prints.reshape(-1, ns.chunk_blocks)[:, :-1]
    if tail:
        keys = np.concatenate([keys, blocks[-1:]])
    if len(keys) > most:
        keys, tail = keys[:most], 0
    return Item(item.request, item.first, keys, classes, item.tenant, prints, tail)


def _items_now(items: Sequence[ReserveItem], sizes: list[int], groups: int) -> int:
    """How many of the items, of so many keys each, one step checks and carries out."""
    cost = 0
    for number, (item, size) in enumerate(zip(items, sizes, strict=True)):
        cost += COST_OF_AN_ITEM + (max(0, size - item.first) + size // 8) * groups
        if cost > COST_A_STEP:
            return max(1, number)
    return len(items)


def _items_of_one_payer(state: State, items: Sequence[ReserveItem]) -> int:
    """How many of the items have the payer of the first: a step makes room for one only."""
    if not state.tenants.divided or not items:
        return len(items)
    payers = [state.tenants.payer(item.tenant) for item in items]
    return next((n for n, payer in enumerate(payers) if payer is not payers[0]), len(items))


def _grant(
    state: State, instance: Instance, ns: Namespace, item: Item, protect: int, used: list[Used]
) -> Grant:
    """WRITING rows for the chunks of ``item`` that nobody has, as far as they fit."""
    chunks_a_step = max(1, ROWS_A_STEP // len(ns.classes))
    until = min(item.first + chunks_a_step, len(item.keys))
    later = until if until < len(item.keys) else -1
    lacking = _lacking(ns, item, until, used)
    within = int(lacking.any(axis=0).sum())
    if _cut(lacking, item.classes, _allowance(state, instance)):
        absent, within = within, int(lacking.any(axis=0).sum())
        state.counters["not_granted_quota"] += absent - within
    wanted = [each.nonzero()[0] + item.first for each in lacking]
    if not any(map(len, wanted)):
        return Grant(later=later)
    state.counters["chunks_wanted"] += within
    rows, end = state.allocator.allocate(
        item.classes, item.keys[:until], wanted, protect, state.tenants.payer(item.tenant)
    )
    for i, w in enumerate(wanted if end < until else ()):  # what lies behind a chunk that got no
        n = int(w.searchsorted(end))  # row is of no use
        state.rows.discard(rows[i][n:])
        state.rows.free(rows[i][n:])
        wanted[i], rows[i] = w[:n], rows[i][:n]
    if item.prints is not None:
        for c, w, r in zip(item.classes, wanted, rows, strict=True):
            ends = len(w) > 0 and w[-1] == len(item.keys) - 1
            state.rows.note_blocks(c, r, item.prints[w - item.first], item.tail * ends)
            state.counters["tails_granted"] += bool(item.tail and ends and c is item.classes[0])
    new = {c.id: (w, r) for c, w, r in zip(item.classes, wanted, rows, strict=True)}
    _touch_new(state, ns, used, new)
    parts = tuple(ClassRows(c.id, r) for c, r in zip(item.classes, rows, strict=True) if len(r))
    if not parts:
        state.counters["not_granted_no_room"] += within
        return Grant()
    writers = set(instance.writers)
    reservation = state.settlement.reserve(instance.id, item.request, parts, writers)
    which = tuple(tuple(w.tolist()) for w in wanted)
    chunks = tuple(sorted({c for each in which for c in each}))
    state.counters["chunks_granted"] += len(chunks)
    state.counters["not_granted_no_room"] += within - len(chunks)
    return Grant(
        reservation=reservation.id,
        chunks=chunks,
        slots=tuple(map(state.rows.slots, rows)),
        which=() if all(each == chunks for each in which) else which,
        later=later,
    )


def _touch(state: State, ns: Namespace, item: Item) -> list[Used]:
    """The prompt that ``item`` names is in use, also by who asks to write the rest of it.

    Of windows and states that means what it asks to write, and what a hit of all of it needs.
    """
    used = _find(ns, item)
    for c, (_, found) in zip(ns.classes, used, strict=True):
        state.rows.touch(c, found[found != ABSENT])
    return used


def _find(ns: Namespace, item: Item) -> list[Used]:
    used = []
    for c in ns.classes:
        begin = min(item.first, first_chunk(c.spec.layout, len(item.keys), ns.chunk_tokens))
        used.append((begin, c.index.find(item.keys[begin:])))
    return used


def _touch_new(
    state: State, ns: Namespace, used: list[Used], new: dict[int, tuple[I64Array, I64Array]]
) -> None:
    """Touch the same rows once more, with the new ones (by class the chunks and the rows): these
    are deeper, so they must be older.

    Nothing of ``used`` has been evicted since it was touched: that is protected.
    """
    for c, (begin, found) in zip(ns.classes, used, strict=True):
        if c.id in new:
            chunks, rows = new[c.id]
            found[chunks - begin] = rows
        state.rows.touch(c, found[found != ABSENT])


def _lacking(ns: Namespace, item: Item, until: int, used: list[Used]) -> npt.NDArray[np.bool_]:
    """Which rows nobody has of those that ``item`` asks for: bool, per class of it, for the chunks
    ``[item.first, until)``.

    A window or a state is worth writing only where the chunk's full rows are, or will be.
    """
    keys = item.keys[item.first : until]
    absent = np.array([rows[item.first - at : until - at] == ABSENT for at, rows in used])
    if item.tail and item.prints is not None and until == len(item.keys):
        last = item.prints[-1, : item.tail]
        absent[:, -1] &= [
            c.blocks is None or c.blocks.longest(last)[0] < item.tail for c in ns.classes
        ]
    groups = [c.spec.group for c in item.classes]
    lacking = np.zeros(absent.shape, np.bool_)
    lacking[groups] = absent[groups]
    columns = np.logical_or.reduce(lacking).nonzero()[0]
    if len(columns) > 1:  # a key said twice is written once
        lacking[:, columns[repeated(keys[columns])]] = False
    full = np.array([c.spec.layout.kind == "full" for c in ns.classes])
    if not full.all():
        lacking[~full] &= (~absent | lacking)[full].all(axis=0)
    return lacking[groups]


def _cut(lacking: npt.NDArray[np.bool_], classes: list[RowClass], allowance: int) -> bool:
    """Take out of ``lacking`` the chunks past ``allowance`` bytes; whether there may be any."""
    sizes = [c.spec.row_bytes for c in classes]
    if sum(sizes) * lacking.shape[1] <= allowance:
        return False
    bytes_upto = np.cumsum(np.array(sizes, np.int64) @ lacking)
    lacking[:, int(np.searchsorted(bytes_upto, allowance, side="right")) :] = False
    return True


def _allowance(state: State, instance: Instance) -> int:
    """How many more bytes the instance may reserve (law 12)."""
    limits = state.config.limits
    if len(state.reservations.of(instance.id)) >= limits.reservations_per_instance:
        return 0
    return max(0, state.quota - state.reservations.bytes_of.get(instance.id, 0))


def commit(state: State, session: ClientSession, msg: Commit) -> None:
    """A rank wrote its shard of every row of a reservation."""
    reservation = open_reservation(state, session, msg.boot, msg.reservation)
    rank = own_rank(session, msg.rank)
    if reservation is not None and rank in reservation.owing:  # else it was said twice, or settled
        state.settlement.commit(reservation, rank)


def abort(state: State, session: ClientSession, msg: Abort) -> None:
    """A rank will not write, or the scheduler never told anybody to."""
    reservation = open_reservation(state, session, msg.boot, msg.reservation)
    rank = own_rank(session, msg.rank)
    if reservation is None:
        return
    if rank != SCHEDULER:
        state.settlement.abort(reservation, rank)
    elif reservation.handed_over:
        what = f"reservation {msg.reservation}"
        raise Refused("bad_rank", f"{what} was handed over: only its ranks abort")
    else:
        state.settlement.cancel(reservation)


def handed_over(state: State, session: ClientSession, msg: HandedOver) -> None:
    """From here on only the ranks settle these."""
    own_rank(session, SCHEDULER)
    leases = [open_lease(state, session, msg.boot, i) for i in msg.leases]
    reservations = [open_reservation(state, session, msg.boot, i) for i in msg.reservations]
    for held in (*leases, *reservations):
        if held is not None:  # else it ended meanwhile
            held.handed_over = True
