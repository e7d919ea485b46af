"""Adoption: how a core begins with the rows that a former life of the daemon has left.

Law of this file: law 13. Only rows whose seals check out are adopted, in place. Nothing that the
former life had lent is reused before the last of its leases has run out. A row that was lent was
pinned, and its pins are in its record: such rows, adopted or not, keep one pin each, of leases of
``FORMER``. Slots that were being written rest, QUARANTINED under reservations of ``FORMER``, until
no former worker can write any more (law 3).

What is read is taken from the directory and from the records. The directory is replaced at the end,
so a daemon that dies meanwhile leaves an index that can be adopted again: until its deadline a row
that was lent is never without a pin. Tails, rows that were not to stay, and the indexes of
blocks and segments are not adopted.
"""

from __future__ import annotations

import math
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.core.clients.traffic import Traffic
from kvass.core.pending.settlement import former_connection
from kvass.core.rows.extents import ExtentSet
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import (
    FAILED,
    FREE,
    LOADING,
    NEVER,
    NOBODY,
    QUARANTINED,
    READY,
    STATE_NAMES,
    UNKNOWN,
    WRITING,
    ClassRows,
    RowTable,
)
from kvass.core.rows.saving import saved_set
from kvass.core.rows.sets import CLEARED, SetTable
from kvass.core.saved.directory import MOST_COUNT, Entry, SavedClass, SavedNamespace, SavedSet
from kvass.core.saved.index_file import FormerProcess, SavedIndex
from kvass.core.saved.seals import VOID
from kvass.core.state import State
from kvass.types import DEVICE_S, MOST_S, I64Array

A_LEASE: Final = 2048
"""The most rows of one lease or reservation of ``FORMER``, so that no step has to end many."""
AT_ONCE: Final = 1 << 15
"""How many rows one call of numpy looks at: with more, its arrays leave the caches."""


class Adoption(msgspec.Struct, frozen=True):
    """What was adopted. ``lent``: those of the rows that may still be read because of a former
    life. ``dropped``: rows that may still be read, but were not adopted. ``resting``: slots that
    rest because they may still be written. ``former``: the workers that may do so; the daemon
    reports the end of each (``FormerEnded``)."""

    rows: int
    bytes: int
    lent: int
    dropped: int
    resting: int
    former: tuple[FormerProcess, ...]


def adopt(state: State, index: SavedIndex) -> Adoption:
    """Begin with what ``index`` has. The state is new: it has no namespace yet."""
    entries = index.entries
    owner_of = _classes(state, _of(entries, SavedNamespace), _of(entries, SavedClass))
    every = _of(entries, SavedSet)
    inside = [s for s in every if _inside(s, state.config.arena_bytes)]
    _sets(state, index, inside, owner_of)
    rows, former = state.classes.sets.rows_of(_numbers(inside)), index.processes.former()
    found = _judge(state, rows)
    good, lent = found.good, found.good[state.rows.table.pins[found.good] > 0]
    _enter(state, good)
    until = min(index.lease_until, state.config.started_s + MOST_S)  # a later one is damage
    state.settlement.hold(_parts(state, lent), until)
    state.settlement.hold(_parts(state, found.dropped), until)
    state.settlement.promise_with(index.promise, until)
    state.unseen = tuple(p.number for p in former if not p.pid)
    written = {former_connection(p.number): _writes_until(state, p) for p in former}
    loaded = {former_connection(-1): state.config.started_s + DEVICE_S}
    state.settlement.rest(_parts(state, found.written), written | loaded)
    state.settlement.rest(_parts(state, found.loading), loaded)
    begun = index.begin(state.config.arena_bytes, _entries(state))
    assert begun, "less needs no more memory"
    state.followers.saving.begin(index)
    size = sum(sum(c.rows[READY:]) * c.spec.row_bytes for c in state.classes.by_id.values())
    state.counters["l1_in_bytes"] += size
    resting = len(found.written) + len(found.loading)
    return Adoption(len(good), size, len(lent), len(found.dropped), resting, former)


E = TypeVar("E", SavedNamespace, SavedClass, SavedSet)


def _of(entries: list[Entry], kind: type[E]) -> list[E]:
    return [each for each in entries if isinstance(each, kind)]


def _inside(each: SavedSet, arena_bytes: int) -> bool:
    """Whether a set lies in an arena that may have become smaller."""
    ends = zip(each.bases, each.extent_bytes, strict=True)
    return all(base + size <= arena_bytes for base, size in ends)


def _numbers(sets: list[SavedSet]) -> I64Array:
    return np.array([s.id for s in sets], np.int64)


def _writes_until(state: State, process: FormerProcess) -> float:
    """How long a former worker may write: until it ends, or a while if nobody can see its end."""
    unseen_s = state.config.started_s + state.config.timing.lost_engine_grace_s
    return math.inf if process.pid else unseen_s


def _classes(
    state: State, namespaces: list[SavedNamespace], classes: list[SavedClass]
) -> dict[int, RowClass]:
    """Create the namespaces again, and their classes. By the id that it had, each class."""
    groups: dict[int, dict[int, SavedClass]] = {}
    for each in classes:
        groups.setdefault(each.namespace, {})[each.spec.group] = each
    made = dict[tuple[int, int], RowClass]()
    for saved in namespaces[-(state.config.limits.namespaces - 1) :]:
        specs = [one.spec for _, one in sorted(groups.get(saved.id, {}).items())]
        if not specs or [s.group for s in specs] != [*range(len(specs))]:
            continue
        number, _ = state.namespaces.new_id(saved.digest)
        ns = Namespace(
            id=number,
            digest=saved.digest,
            classes=[state.classes.add(spec, number) for spec in specs],
            chunk_tokens=saved.chunk_tokens,
            private=saved.private,
            terms=saved.terms,
            model=saved.model,
            traffic=Traffic(from_tiers=[0] * len(state.tiers.all)),
        )
        state.namespaces.add(ns)
        if not ns.private:
            ns.tier_epochs = [None] * len(state.tiers.all)
            ns.asked_s = [-math.inf] * len(state.tiers.all)
        made.update({(saved.id, c.spec.group): c for c in ns.classes})
    there = [each for each in classes if (each.namespace, each.spec.group) in made]
    paid_by, payer = state.classes.paid_by, state.tenants.payer  # of whoever pays for them now
    return {c.id: paid_by(made[c.namespace, c.spec.group], payer(c.tenant)) for c in there}


def _sets(
    state: State, index: SavedIndex, sets: list[SavedSet], owner_of: dict[int, RowClass]
) -> None:
    """Enter the extent sets, each with all its rows, whose states are not known yet."""
    classes, table, every = state.classes, state.rows.table, list[ExtentSet]()
    for s in sets:
        made = ExtentSet(s.id, s.slots, s.first_row, s.bases, s.extent_bytes)
        every.append(made)
        if (owner := owner_of.get(s.row_class)) is None:
            classes.sets.add(made, CLEARED, state.tenants.default.id)
            classes.sets.cleared += 1
            continue
        classes.sets.add(made, owner.id, owner.tenant.id)
        owner.slots += made.slots
        owner.tenant.taken_bytes += sum(made.extent_bytes)
    classes.extents.adopt(every)
    table.adopt(max((s.end_row for s in every), default=0), int(_numbers(sets).max(initial=-1)) + 1)
    for row_class in {c.id: c for c in owner_of.values()}.values():
        classes.forget_empty(row_class)


class _Found(msgspec.Struct, frozen=True):
    """Rows by what becomes of them. ``good``: adopted. ``dropped``: not adopted, and lent.
    ``written``: may have writers. ``loading``: a tier was filling them. The others are FREE."""

    good: I64Array
    dropped: I64Array
    written: I64Array
    loading: I64Array


def _judge(state: State, rows: I64Array) -> _Found:
    table, sets = state.rows.table, state.classes.sets
    known = np.zeros(len(table), np.bool_)
    known[rows] = True
    table.blank(np.flatnonzero(~known))
    there = np.flatnonzero(sets.owner != NOBODY)
    numbers, rows = np.repeat(there, sets.slots[there]), sets.rows_of(there)
    found = np.empty(len(rows), np.uint8)
    for begin in range(0, len(rows), AT_ONCE):
        some = slice(begin, begin + AT_ONCE)
        found[some] = _judge_some(table, sets, rows[some], numbers[some])
    size = len(sets.owner)
    sets.used += np.bincount(numbers[found != FREE], minlength=size)
    sets.held += np.bincount(numbers[(found == WRITING) | (found == LOADING)], minlength=size)
    return _Found(*(rows[found == one] for one in (READY, FAILED, WRITING, LOADING)))


def _judge_some(
    table: RowTable, sets: SetTable, rows: I64Array, numbers: I64Array
) -> npt.NDArray[np.uint8]:
    """Judge ``rows`` of the sets ``numbers``. For each: READY, adopted; FAILED, not adopted and
    lent; WRITING, it may have writers; LOADING, a tier was filling it; FREE. Both last but FREE are
    QUARANTINED now. A row that was lent has one pin."""
    table.set_of[rows] = numbers
    table.slot[rows] = rows - sets.first[numbers]
    before = table.state[rows]
    good = (before == READY) & (sets.owner[numbers] >= 0)
    good &= table.loader[rows] == table.seals_of(rows)
    good &= (table.stamp[rows] > NEVER) & (table.stamp[rows] < MOST_COUNT)
    written = (before == WRITING) | (before == QUARANTINED) | (before >= len(STATE_NAMES))
    loading = before == LOADING
    lent = (table.pins[rows] != 0) & (before != FREE) & ~written & ~loading
    gone = rows[~good]
    table.loader[gone] = VOID
    table.key[gone], table.stamp[gone] = 0, NEVER
    table.offered[gone], table.read[gone] = False, False
    table.pins[rows], table.entry[rows] = lent, UNKNOWN
    found = np.where(good, np.uint8(READY), np.where(lent, np.uint8(FAILED), np.uint8(FREE)))
    table.state[rows] = np.where(written | loading, np.uint8(QUARANTINED), found)
    found[written], found[loading] = WRITING, LOADING
    return found


def _enter(state: State, good: I64Array) -> None:
    """List the free rows, and let lookups find the ``good`` ones.

    These get new stamps in the order of the old ones, which no seal covers: after a damaged one all
    later ones would be as high, and the next life would believe none.
    """
    table, sets = state.rows.table, state.classes.sets
    good = good[np.argsort(table.stamp[good], kind="stable")]
    stamps = table.stamp_rows(good)
    numbers = table.set_of[good].astype(np.int64)
    sets.newest[numbers] = stamps  # the last of each set is the newest
    owners = sets.owner[numbers]
    for row_class in state.classes.by_id.values():
        mine = owners == row_class.id
        row_class.index.fill(good[mine])
        row_class.order.fill(good[mine], stamps[mine])
        every = sets.rows_of(np.flatnonzero(sets.owner == row_class.id))
        states = table.state[every]
        for one in (READY, FAILED, QUARANTINED):
            row_class.rows[one] = int((states == one).sum())
        row_class.free.give_new(every[states == FREE])


def _parts(state: State, rows: I64Array) -> list[ClassRows]:
    """``rows`` in parts of one class and ``A_LEASE`` rows at most."""
    owners, parts = state.classes.sets.owner[state.rows.table.set_of[rows]], list[ClassRows]()
    for owner in np.unique(owners).tolist():
        mine = rows[owners == owner]
        parts += [ClassRows(owner, mine[i : i + A_LEASE]) for i in range(0, len(mine), A_LEASE)]
    return parts


def _entries(state: State) -> list[Entry]:
    """All that the directory must have now."""
    classes, owner = state.classes, state.classes.sets.owner
    return [
        *(ns.saved for ns in state.namespaces.values()),
        *(row_class.saved for row_class in classes.by_id.values()),
        *(saved_set(each, int(owner[each.id])) for each in classes.extents.sets.values()),
    ]
