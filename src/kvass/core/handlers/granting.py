"""Granting an item of a ``Reserve``: rows for the chunks that L1 lacks.

An instance has at most its share of L1 reserved (law 12). A row of a prompt is never evicted to
make room for another row of that prompt (law 6).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.clients.registry import Instance
from kvass.core.handlers import former
from kvass.core.handlers.reserve_items import Item
from kvass.core.matching.coverage import first_chunk
from kvass.core.matching.keeping import Found
from kvass.core.rows.index import ABSENT, repeated
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import ClassRows
from kvass.core.state import State
from kvass.messages import Grant
from kvass.types import I64Array

ROWS_A_STEP: Final = 512
"""The most rows of an item that one step grants or refuses, but at least those of one chunk. Later
steps decide the others."""


def grant(
    state: State, instance: Instance, ns: Namespace, item: Item, protect: int, used: list[Found]
) -> Grant:
    """Allocate WRITING rows for the chunks of ``item`` that have none, as many as fit.

    ``used``: what ``touch`` or ``find`` returned for the item. Rows with a stamp of ``protect`` or
    later are not evicted.
    """
    chunks_a_step = max(1, ROWS_A_STEP // len(ns.classes))
    until = min(item.first + chunks_a_step, len(item.keys))
    later = until if until < len(item.keys) else -1
    lacking = _lacking(ns, item, until, used)
    asked = np.flatnonzero(lacking.any(axis=0)) + item.first
    within = len(asked)
    if _cut(lacking, item.classes, _allowance(state, instance)):
        absent, within = within, int(lacking.any(axis=0).sum())
        state.counters["not_granted_quota"] += absent - within
        _note_refused(state, ns, item, asked[within:])
    wanted = [each.nonzero()[0] + item.first for each in lacking]
    if not any(map(len, wanted)):
        return Grant(later=later, refused=tuple(asked.tolist()))
    state.counters["chunks_wanted"] += within
    wanted, rows = _allocate(state, item, wanted, until, protect)
    new = {c.id: (w, r) for c, w, r in zip(item.classes, wanted, rows, strict=True)}
    _touch_new(state, ns, used, new, item.context.session)
    parts = tuple(ClassRows(c.id, r) for c, r in zip(item.classes, rows, strict=True) if len(r))
    if not parts:
        state.counters["not_granted_no_room"] += within
        _note_refused(state, ns, item, asked)
        return Grant(refused=tuple(asked.tolist()))
    writers = set(instance.writers)
    reservation = state.settlement.reserve(instance.id, item.request, parts, writers)
    which = tuple(tuple(w.tolist()) for w in wanted)
    chunks = tuple(sorted({c for each in which for c in each}))
    state.counters["chunks_granted"] += len(chunks)
    state.counters["not_granted_no_room"] += within - len(chunks)
    if len(chunks) < within:
        _note_refused(state, ns, item, asked[len(chunks) :])
    return Grant(
        reservation=reservation.id,
        chunks=chunks,
        slots=tuple(map(state.rows.slots, rows)),
        which=() if all(each == chunks for each in which) else which,
        later=later,
        refused=tuple(asked[len(chunks) :].tolist()),
    )


def _note_refused(state: State, ns: Namespace, item: Item, chunks: I64Array) -> None:
    """Record that these chunks were offered and not stored."""
    group = item.classes[0].spec.group
    state.followers.left.note(ns.id, group, item.keys[chunks], "refused", state.now)


def _allocate(
    state: State, item: Item, wanted: list[I64Array], until: int, protect: int
) -> tuple[list[I64Array], list[I64Array]]:
    """Allocate WRITING rows for the chunks ``wanted`` of each class, for as many as there is room.

    Returns per class the chunks that got rows, and the rows. Records the blocks of the rows.
    """
    rows, end = state.allocator.allocate(
        item.classes,
        item.keys[:until],
        wanted,
        protect,
        state.tenants.payer(item.context.tenant),
        session=item.context.session,
    )
    for i, w in enumerate(wanted if end < until else ()):
        n = int(w.searchsorted(end))  # a chunk after one without a row is of no use
        state.rows.discard(rows[i][n:])
        state.rows.free(rows[i][n:])
        wanted[i], rows[i] = w[:n], rows[i][:n]
    if item.prints is not None:
        for c, w, r in zip(item.classes, wanted, rows, strict=True):
            ends = len(w) > 0 and w[-1] == len(item.keys) - 1
            assert c.blocks is not None, "blocks of a class whose hits end with a chunk"
            c.blocks.prints.note(r, item.prints[w - item.first], item.tail * ends)
            state.counters["tails_granted"] += bool(item.tail and ends and c is item.classes[0])
    return wanted, rows


def touch(state: State, ns: Namespace, item: Item) -> list[Found]:
    """Find the rows of the item's prompt, and mark them as used now.

    In a group that is not ``full``, these are the rows of the chunks from ``item.first`` on and
    those that a hit of the whole prompt needs.
    """
    used = find(ns, item)
    for c, (_, found) in zip(ns.classes, used, strict=True):
        state.rows.touch(c, found[found != ABSENT], item.context.session)
    return used


def find(ns: Namespace, item: Item) -> list[Found]:
    """The rows of the item's prompt, per class."""
    used = []
    for c in ns.classes:
        begin = min(item.first, first_chunk(c.spec.layout, len(item.keys), ns.chunk_tokens))
        used.append((begin, c.index.find(item.keys[begin:])))
    return used


def _touch_new(
    state: State,
    ns: Namespace,
    used: list[Found],
    new: dict[int, tuple[I64Array, I64Array]],
    session: int,
) -> None:
    """Mark the rows of the prompt as used once more, together with the ``new`` ones.

    The new rows are deeper in the prompt, so they must be older than the others. ``new``: the
    chunks and the rows by class id. No row of ``used`` was evicted meanwhile, because all of them
    are protected.
    """
    for c, (begin, found) in zip(ns.classes, used, strict=True):
        if c.id in new:
            chunks, rows = new[c.id]
            found[chunks - begin] = rows
        state.rows.touch(c, found[found != ABSENT], session)


def _lacking(ns: Namespace, item: Item, until: int, used: list[Found]) -> npt.NDArray[np.bool_]:
    """Which of the rows that ``item`` asks for do not exist yet.

    bool, one array row per class of the item, one column per chunk in ``[item.first, until)``. A
    row of a window or a state is of use only where the ``full`` rows of its chunk exist or are
    written with it.
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
    if len(columns) > 1:  # a key that is named twice is written once
        lacking[:, columns[repeated(keys[columns])]] = False
    whole = np.array([c.spec.layout.rules.whole for c in ns.classes])
    if not whole.all():
        lacking[~whole] &= (~absent | lacking)[whole].all(axis=0)
    return lacking[groups]


def _cut(lacking: npt.NDArray[np.bool_], classes: list[RowClass], allowance: int) -> bool:
    """Remove the last chunks from ``lacking`` so that its rows take at most ``allowance`` bytes.
    Returns False if there was room for all chunks."""
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
    taken = state.reservations.bytes_of.get(instance.id, 0) + former.resting_for(state, instance)
    return max(0, state.quota - taken)
