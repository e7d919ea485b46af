"""L1: the index, the slots, and room for new ones.

Law of this file: an index entry names a row that is WRITING, LOADING or READY and not doomed; room
is made here, at allocation time, and nowhere else (law 6). It knows no sessions and no time.

No free slot: take free arena; else evict, from the class's own rows or by taking over the extent
sets of least value of other classes, whichever was used longer ago. So no layout can starve
another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.core.eviction import EvictionPolicy, Lru
from kvass.core.extents import ExtentMap, ExtentSet
from kvass.core.index import ABSENT, KeyIndex
from kvass.core.registry import RowClassSpec
from kvass.core.rows import (
    FREE,
    LOADING,
    NEVER,
    NOBODY,
    QUARANTINED,
    READY,
    STATE_NAMES,
    WRITING,
    RowTable,
)
from kvass.types import I64Array, Slots, U64Array


class RowClass(msgspec.Struct):
    """The rows of one (namespace, group): equally large, one index, one eviction policy."""

    id: int
    namespace: int
    spec: RowClassSpec
    policy: EvictionPolicy
    slots_per_set: int
    index: KeyIndex
    free: I64Array


class Namespace(msgspec.Struct):
    """``epoch`` counts clears: what was reserved under an older one is discarded at commit.

    ``tier_epochs``: what its records in each tier go by; None: not known (yet), so that the tier is
    of no use to it. ``asked_s``: when each was last asked for (inf: the answer is awaited).

    ``private``: of one engine's generation (``messages.Register``). No engine has it once that one
    has left it. So its rows are in L1 only: no tier is asked for an epoch, both lists are empty.
    """

    id: int
    digest: bytes
    classes: list[RowClass]
    chunk_tokens: int
    model: str = ""
    private: bool = False
    epoch: int = 0
    tier_epochs: list[int | None] = []
    asked_s: list[float] = []


class L1:
    """Rows of all classes in an arena of ``arena_bytes``."""

    def __init__(
        self,
        arena_bytes: int,
        extent_bytes: int,
        seed: bytes = b"",
        policy: Callable[[RowTable], EvictionPolicy] = Lru,
    ) -> None:
        self.table = RowTable()
        self.extents = ExtentMap(arena_bytes)
        self.classes: dict[int, RowClass] = {}
        self._of_namespace: dict[int, list[RowClass]] = {}
        self.evicted: Counter[str] = Counter()
        """Rows evicted, by reason."""
        self._extent_bytes = extent_bytes
        self._policy = policy
        self._next_class = 0
        self._leaving = 0
        """READY rows that are doomed or passing, so that most unpins need not look for any."""
        self._seed = seed
        self._newest: I64Array = np.empty(0, np.int64)
        """Per extent set: no row of it was used later."""
        self._owner: I64Array = np.empty(0, np.int64)
        """Per extent set: its class, or ``NOBODY``."""

    # ------------------------------------------------------------ classes

    def add_class(self, spec: RowClassSpec, namespace: int) -> RowClass:
        """A new, empty class of a namespace."""
        made = RowClass(
            id=self._next_class,
            namespace=namespace,
            spec=spec,
            policy=self._policy(self.table),
            slots_per_set=self._slots_per_set(spec),
            index=KeyIndex(self.table, self._seed),
            free=np.empty(0, np.int64),
        )
        self._next_class += 1
        self.classes[made.id] = made
        self._of_namespace.setdefault(namespace, []).append(made)
        return made

    def _slots_per_set(self, spec: RowClassSpec) -> int:
        """So many that an extent is as large as wished; but a set of many shards, each with an
        extent, is no more than a sixteenth of the arena: a few in use must leave room for others
        (law 6)."""
        most = max(self._extent_bytes, self.extents.size // 16)
        return min(-(-self._extent_bytes // max(spec.shard_bytes)), -(-most // spec.row_bytes))

    def remove_class(self, gone: RowClass) -> None:
        """Give back the extents of a class none of whose slots is in use."""
        for one in [s for s in self.extents.sets.values() if s.owner == gone.id]:
            self._remove_set(one)
        del self.classes[gone.id]
        self._of_namespace[gone.namespace].remove(gone)

    # ------------------------------------------------------------ finding

    def readable(self, found: I64Array) -> npt.NDArray[np.bool_]:
        """Which of ``found`` (row ids, or ``ABSENT``) are READY."""
        there: npt.NDArray[np.bool_] = found != ABSENT
        if there.all():
            ready: npt.NDArray[np.bool_] = self.table.state[found] == READY
            return ready
        there[there] = self.table.state[found[there]] == READY
        return there

    def touch(self, one: RowClass, rows: I64Array) -> None:
        """``rows``, in chunk order, were used.

        The deepest becomes the oldest of them, since it is worth nothing without the others; but a
        window's or a state's becomes the newest, since a hit needs only those at its end.
        """
        if len(rows):
            oldest_first = rows[::-1] if one.spec.layout.kind == "full" else rows
            one.policy.touched(oldest_first, self.table.stamp_rows(oldest_first))
            self._newest[self.table.set_of[rows]] = self.table.clock - 1

    def slots(self, rows: I64Array) -> Slots:
        """Where ``rows`` lie."""
        if not len(rows):
            return Slots()
        sets = self.table.set_of[rows]
        counts = np.bincount(sets)
        used = counts.nonzero()[0]
        number = np.zeros(len(counts), "<u2")
        number[used] = np.arange(len(used))
        return Slots(
            extents=tuple([self.extents.sets[i].bases for i in used.tolist()]),
            set_=number.take(sets).tobytes(),
            slot=self.table.slot[rows].tobytes(),
        )

    # ------------------------------------------------------------ reading

    def pin(self, rows: I64Array) -> None:
        """One more lease holds ``rows``; a row named twice in it counts once."""
        self.table.pins[rows] += 1

    def unpin(self, rows: I64Array, ahead: bool = False) -> None:
        """Undo one ``pin`` of the same ``rows``; those that only stayed for it are freed.

        ``ahead``: whoever they are for is still to come, so passing ones stay.
        """
        table = self.table
        table.pins[rows] -= 1
        if not self._leaving:
            return
        over = table.doomed[rows] if ahead else table.doomed[rows] | table.passing[rows]
        leaving = over & table.evictable(rows)
        if leaving.any():
            gone = np.unique(rows[leaving])
            self._leaving -= len(gone)
            self.free(gone)

    # ------------------------------------------------------------ writing

    def allocate(
        self, one: RowClass, keys: U64Array, protect: int, state: int = WRITING
    ) -> I64Array:
        """WRITING (or LOADING) rows for the first of ``keys``, as many as room can be made for.

        Nothing stamped at or after ``protect`` is evicted: the asker's own prefix. ``keys`` are
        distinct, and none is in the index.
        """
        self._make_room(one, len(keys), protect)
        rows, one.free = np.split(one.free, [min(len(keys), len(one.free))])
        self.table.move(rows, FREE, state)
        self.table.key[rows] = keys[: len(rows)]
        one.index.add(rows)
        return rows

    def publish(self, rows: I64Array) -> None:
        """Every shard of ``rows`` is written: they are readable from here on."""
        self.table.move(rows, WRITING, READY)

    def promoted(self, rows: I64Array, retain: bool) -> None:
        """A tier has filled LOADING ``rows``: they are readable from here on."""
        self.table.move(rows, LOADING, READY)
        self.table.kept[rows] = True
        if not retain:
            self.table.passing[rows] = True
            self._leaving += len(rows)

    def fail(self, rows: I64Array) -> None:
        """LOADING ``rows`` will not be filled: nobody finds them any more."""
        self._unindex(rows)

    def discard(self, rows: I64Array) -> None:
        """``rows`` will never be readable, and may still be written."""
        self._unindex(rows)
        self.table.move(rows, WRITING, QUARANTINED)

    def free(self, rows: I64Array) -> None:
        """Nobody reads or writes ``rows`` (all of one class and in one state) any more."""
        if not len(rows):
            return
        self._unindex(rows)
        self.table.move(rows, int(self.table.state[rows[0]]), FREE)
        owner = self.class_of(int(rows[0]))
        owner.free = np.concatenate([rows, owner.free])  # the last freed is the next given

    def forget(self, rows: I64Array) -> None:
        """READY ``rows`` stop matching now, and are freed once nobody reads them."""
        self._unindex(rows)
        table = self.table
        pinned = table.pins[rows] > 0
        self._leaving -= int(table.passing[rows].sum())
        table.passing[rows] = False
        table.doomed[rows[pinned]] = True
        self._leaving += int(pinned.sum())
        self.free(rows[~pinned])

    def clear(self, one: RowClass) -> int:
        """Forget all READY rows of a class; WRITING ones stay for their reservation to discard,
        LOADING ones for their tier to be done with."""
        rows = one.index.rows()
        state = self.table.state[rows]
        self.table.doomed[rows[state == LOADING]] = True
        ready = rows[state == READY]
        self.forget(ready)
        one.index.clear()
        for gone in [s for s in self.extents.sets.values() if s.owner == one.id]:
            if (self.table.state[gone.first_row : gone.end_row] == FREE).all():
                self._remove_set(gone)
        return len(ready)

    def class_of(self, row: int) -> RowClass:
        """The class whose slot ``row`` is."""
        return self.classes[self.extents.sets[int(self.table.set_of[row])].owner]

    def _unindex(self, rows: I64Array) -> None:
        if not len(rows):
            return
        index = self.class_of(int(rows[0])).index
        index.remove(rows[index.find(self.table.key[rows]) == rows])

    # ------------------------------------------------------------ room

    def _make_room(self, one: RowClass, count: int, protect: int) -> None:
        while len(one.free) < count:
            if self._add_set(one):
                continue
            victims = one.policy.victims(count - len(one.free), protect)
            oldest = int(self.table.stamp[victims[0]]) if len(victims) else protect
            if self._take_over(one, below=oldest):
                continue
            if not len(victims):
                return
            self.evicted["capacity"] += len(victims)
            self._evict(one, victims)

    def _evict(self, one: RowClass, rows: I64Array) -> None:
        """Free ``rows`` of a class, and what is worth nothing without them.

        No hit gets past a missing ``full`` row, so its chunk's windows and states go with it.
        """
        keys = self.table.keys_of(rows)
        self._drop(rows)
        if one.spec.layout.kind != "full":
            return
        for other in self._of_namespace[one.namespace]:
            if other.spec.layout.kind != "full":
                found = other.index.find(keys)
                found = found[found != ABSENT]
                orphans = found[self.table.evictable(found)]
                self.evicted["orphaned"] += len(orphans)
                self._drop(orphans)

    def _drop(self, rows: I64Array) -> None:
        """Free READY rows that nobody reads."""
        if self._leaving:
            self._leaving -= int(self.table.passing[rows].sum())
        self.free(rows)

    def _add_set(self, one: RowClass) -> bool:
        made = self.extents.add(one.id, one.spec.shard_bytes, one.slots_per_set)
        if made is None:
            return False
        self.table.grow(made.end_row)
        if made.id >= len(self._owner):
            more = made.id + 1 - len(self._owner)
            self._owner = np.concatenate([self._owner, np.full(more, NOBODY, np.int64)])
            self._newest = np.concatenate([self._newest, np.full(more, NEVER, np.int64)])
        self._owner[made.id], self._newest[made.id] = one.id, NEVER
        self.table.set_of[made.first_row : made.end_row] = made.id
        self.table.slot[made.first_row : made.end_row] = np.arange(made.slots)
        one.free = np.concatenate([one.free, np.arange(made.first_row, made.end_row)])
        return True

    def _take_over(self, asker: RowClass, below: int) -> bool:
        """Evict other classes' sets, all last used before stamp ``below``, so that a set fits."""
        others = (self._owner != NOBODY) & (self._owner != asker.id) & (self._newest < below)
        value = {
            i: last_used
            for i in np.flatnonzero(others).tolist()
            if (last_used := self._last_use_if_idle(self.extents.sets[i])) < below
        }
        if not value:
            return False
        wanted = asker.spec.shard_bytes, asker.slots_per_set, value
        chosen = self.extents.cheapest(*wanted) or self.extents.cheapest(wanted[0], 1, value)
        for one in chosen:
            self._evict_set(one)
        return bool(chosen)

    def _last_use_if_idle(self, one: ExtentSet) -> int:
        """The newest stamp in a set, or a huge one while any of its slots is in use."""
        span = slice(one.first_row, one.end_row)
        state, pins = self.table.state[span], self.table.pins[span]
        if pins.any() or not ((state == FREE) | (state == READY)).all():
            return 1 << 62
        return int(self.table.stamp[span].max())

    def _evict_set(self, one: ExtentSet) -> None:
        rows = np.arange(one.first_row, one.end_row, dtype=np.int64)
        held = rows[self.table.state[rows] == READY]
        self.evicted["handed_over"] += len(held)
        self._evict(self.classes[one.owner], held)
        self._remove_set(one)

    def _remove_set(self, one: ExtentSet) -> None:
        span = slice(one.first_row, one.end_row)
        assert (self.table.state[span] == FREE).all(), "an extent set in use was given away"
        owner = self.classes[one.owner]
        owner.free = owner.free[(owner.free < one.first_row) | (owner.free >= one.end_row)]
        self.table.set_of[span] = NOBODY
        self._owner[one.id] = NOBODY
        self.extents.remove(one)

    # ------------------------------------------------------------ looking

    def last_use(self, one: RowClass) -> int:
        """The newest stamp in a class, or a huge one while any of its slots is in use."""
        sets = (s for s in self.extents.sets.values() if s.owner == one.id)
        return max(map(self._last_use_if_idle, sets), default=NEVER)

    def in_use(self, one: RowClass) -> bool:
        """Whether any slot of the class is not FREE."""
        total = sum(s.slots for s in self.extents.sets.values() if s.owner == one.id)
        return total != len(one.free)

    def census(self, one: RowClass) -> dict[str, int]:
        """Rows of a class by state name."""
        counts = np.zeros(len(STATE_NAMES), np.int64)
        for s in self.extents.sets.values():
            if s.owner == one.id:
                states = self.table.state[s.first_row : s.end_row]
                counts += np.bincount(states, minlength=len(STATE_NAMES))
        return dict(zip(STATE_NAMES, counts.tolist(), strict=True))
