"""What is granted of one item of a ``Reserve``: rows for the chunks that nobody has yet.

Laws of this file:

- A chunk's row is granted once: not while it is there or being written, and not twice in a message.
- The prompt that an item names is in use, so nothing of it makes room for the rest of it (law 6).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.core.clients.registry import Instance
from kvass.core.matching.coverage import first_chunk
from kvass.core.rows.index import ABSENT, repeated
from kvass.core.rows.row_classes import Namespace, RowClass
from kvass.core.rows.row_table import ClassRows
from kvass.core.state import State
from kvass.messages import Grant
from kvass.types import I64Array, U64Array

ROWS_A_STEP: Final = 512
"""So many rows of an item one step decides at most, or a chunk: others wait for it."""
Used = tuple[int, I64Array]
"""Of one class: a chunk, and the rows from there on (or ``ABSENT``) that a prompt has."""


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


def grant(
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
    rows, end = state.room.allocate(
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


def touch(state: State, ns: Namespace, item: Item) -> list[Used]:
    """The prompt that ``item`` names is in use, also by who asks to write the rest of it.

    Of windows and states that means what it asks to write, and what a hit of all of it needs.
    """
    used = find(ns, item)
    for c, (_, found) in zip(ns.classes, used, strict=True):
        state.rows.touch(c, found[found != ABSENT])
    return used


def find(ns: Namespace, item: Item) -> list[Used]:
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
