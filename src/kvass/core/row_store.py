"""The rows of L1: their index, their slots, and room for new ones.

An index entry names a row that is WRITING, LOADING, READY or TRANSIENT. Room is made here, at
allocation time, and nowhere else (law 6). Where there is no free slot, a new extent set is taken
from the arena's free space. If there is none, rows are evicted: the class's own, or the extent sets
of other classes, whichever were used less recently. So no layout can starve another.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.core.blocks import BlockIndex, BlockPrints
from kvass.core.eviction import Lru
from kvass.core.extents import STAYS, ExtentMap
from kvass.core.index import ABSENT, Keyed, KeyIndex, odd_numbers
from kvass.core.registry import RowClassSpec
from kvass.core.rows import (
    FAILED,
    FREE,
    LOADING,
    NEVER,
    NOBODY,
    QUARANTINED,
    READY,
    STATE_NAMES,
    TRANSIENT,
    WRITING,
    RowTable,
)
from kvass.core.sets import CLEARED, FreeSlots, SetTable
from kvass.core.traffic import Traffic
from kvass.types import I64Array, Slots, U64Array

_IN_TRANSIT: Final = (WRITING, LOADING, QUARANTINED)
_LEAVING: Final = (FAILED, TRANSIENT)
"""Rows in these states are freed at their last unpin."""

TYPICAL_ROW: Final = 1 << 20
ROOM: Final = 9 << 17
"""The tables have room from the beginning for as many rows of ``TYPICAL_ROW`` bytes as the arena
holds, and for so many at most: 1 TiB and an eighth. For more they grow, in steps of up to 0.3 s."""
INDEX_ROOM: Final = 4 * ROOM
"""All indexes together have room from the beginning for so many rows (160 MiB). A class that comes
when that is spent begins with a small index, which grows: there may be thousands of classes."""


GONE_A_STEP: Final = 64
"""Removed classes whose memory one ``reclaim`` gives back: that of 1,000 takes 6 ms."""


class RowClass(msgspec.Struct):
    """The rows of one (namespace, group): all of one size, with an index and a record of their use.

    ``blocks``: of the rows whose blocks are known, if there ever were any. ``slots``: how many its
    sets have. ``rows``: how many rows are in each state, except FREE.
    """

    id: int
    namespace: int
    spec: RowClassSpec
    lru: Lru
    slots_per_set: int
    index: KeyIndex
    free: FreeSlots
    rows: list[int]
    slots: int = 0
    blocks: BlockIndex | None = None


class Namespace(msgspec.Struct):
    """``epoch`` counts clears. A clear gives it new, empty ``classes``.

    ``tier_epochs``: the epoch of its records in each tier; None: not known yet, so that tier is not
    used for it. ``asked_s``: when each was last asked for; infinity: the answer is awaited.
    ``chunk_blocks``: blocks of a chunk, if hits may end at each of them; 0: they end with a chunk.
    ``private``: of one engine's generation (``messages.Register``). Its rows are in L1 only: no
    tier is asked for an epoch, and both lists are empty.
    """

    id: int
    digest: bytes
    classes: list[RowClass]
    chunk_tokens: int
    chunk_blocks: int = 0
    model: str = ""
    private: bool = False
    epoch: int = 0
    tier_epochs: list[int | None] = []
    asked_s: list[float] = []
    traffic: Traffic = msgspec.field(default_factory=Traffic)

    def block_tokens(self, blocks: int) -> int:
        """The tokens of so many blocks of a chunk."""
        return blocks * self.chunk_tokens // max(1, self.chunk_blocks)


class RowStore:
    """Rows of all classes in an arena of ``arena_bytes``. ``slice_slots``: of one ``reclaim``."""

    def __init__(
        self,
        arena_bytes: int,
        extent_bytes: int,
        counters: dict[str, int],
        seed: bytes = b"",
        slice_slots: int = 2048,
    ) -> None:
        self.table = RowTable()
        self.table.grow(min(arena_bytes // TYPICAL_ROW, ROOM))
        self.extents = ExtentMap(arena_bytes)
        self.sets = SetTable()
        self.classes: dict[int, RowClass] = {}
        self.pinned = 0
        """Pins on all rows; one of a lease that names a row twice counts twice."""
        self._of_namespace: dict[int, list[RowClass]] = {}
        self._counters = counters
        self._extent_bytes = extent_bytes
        self._slice_slots = slice_slots
        self._odd = odd_numbers(seed)
        self._odd_of_blocks = odd_numbers(seed + b"blocks")
        self._prints: dict[int, BlockPrints] = {}
        """By ``BlockPrints.width``."""
        self._next_class = 0
        self._index_room = INDEX_ROOM
        self._cold: list[KeyIndex] = []
        """Indexes whose memory nobody has touched yet."""
        self._gone: list[RowClass] = []
        """Removed classes, whose memory ``reclaim`` gives back to the system."""
        self._leaving = 0
        """Rows that are freed at their last unpin: most unpins need not look for any."""

    # ------------------------------------------------------------ classes

    def add_class(self, spec: RowClassSpec, namespace: int) -> RowClass:
        made = RowClass(
            id=self._next_class,
            namespace=namespace,
            spec=spec,
            lru=Lru(self.table),
            slots_per_set=self._slots_per_set(spec),
            index=self._new_index(spec, self.table, self._odd),
            free=FreeSlots(),
            rows=[0] * len(STATE_NAMES),
        )
        self._next_class += 1
        self.classes[made.id] = made
        self._of_namespace.setdefault(namespace, []).append(made)
        return made

    def _new_index(self, spec: RowClassSpec, table: Keyed, odd: U64Array) -> KeyIndex:
        """With room for all rows of the class that the arena holds, if that much is left."""
        most = min(self.extents.size // spec.row_bytes, ROOM)
        index = KeyIndex(table, odd, most if most <= self._index_room else 0)
        self._index_room -= index.room
        self._cold += [index] if index.cold else []
        return index

    def _slots_per_set(self, spec: RowClassSpec) -> int:
        """So many that an extent is as large as configured. But a set, which has an extent for each
        shard, is at most a sixteenth of the arena, or a few would leave no room for others (law 6).
        """
        most = max(self._extent_bytes, self.extents.size // 16)
        return min(-(-self._extent_bytes // max(spec.shard_bytes)), -(-most // spec.row_bytes))

    def remove(self, gone: Collection[RowClass]) -> None:
        """Forget classes: nothing of them matches any more, from now on.

        Their sets are ``CLEARED``. Who reads or writes there goes on. Sets in which nobody does are
        given back by ``reclaim``, or when somebody needs room.
        """
        sets = np.flatnonzero(np.isin(self.sets.owner, [c.id for c in gone]))
        self.sets.owner[sets], self.sets.newest[sets] = CLEARED, NEVER
        self.sets.cleared += len(sets)
        indexes = [c.index for c in gone] + [c.blocks.index for c in gone if c.blocks is not None]
        self._index_room += sum(index.room for index in indexes)
        for row_class in gone:
            del self.classes[row_class.id]
            self._of_namespace[row_class.namespace].remove(row_class)
        ids = {*map(id, indexes)}
        self._cold = [index for index in self._cold if id(index) not in ids]
        self._gone += gone

    def clear(self, namespaces: Collection[Namespace]) -> int:
        """Give ``namespaces`` empty classes; returns how many rows matched until now."""
        matched = sum(sum(c.rows[READY:]) for ns in namespaces for c in ns.classes)
        self.remove([c for ns in namespaces for c in ns.classes if c.slots])
        for ns in namespaces:
            ns.classes = [self.add_class(c.spec, ns.id) if c.slots else c for c in ns.classes]
        return matched

    @property
    def unfinished(self) -> bool:
        """Whether ``reclaim`` or ``warm`` has something to do now."""
        idle = self.sets.cleared and len(self._idle_cleared())
        return bool(self._cold or self._gone or idle)

    def reclaim(self) -> None:
        """Give back cleared sets in which nobody reads or writes: ``slice_slots`` slots of them, or
        one set, so that it does not take long. And the memory of a few removed classes."""
        del self._gone[-GONE_A_STEP:]
        if self.sets.cleared and len(sets := self._idle_cleared()):
            upto = np.cumsum(self.sets.slots[sets])
            count = int(np.searchsorted(upto, self._slice_slots, side="right"))
            self._evict_sets(sets[: max(1, count)])

    def _idle_cleared(self) -> I64Array:
        return np.flatnonzero((self.sets.owner == CLEARED) & (self.sets.held == 0))

    def warm(self) -> None:
        """Touch some memory of a new index, so that the first stores do not wait for the kernel."""
        if self._cold:
            self._cold[0].warm()
            if not self._cold[0].cold:
                del self._cold[0]

    # ------------------------------------------------------------ finding

    def there(self, found: I64Array, least: int = READY) -> npt.NDArray[np.bool_]:
        """Which of ``found`` (row ids, or ``ABSENT``) are in state ``least`` or above."""
        there: npt.NDArray[np.bool_] = found != ABSENT
        if there.all():
            there = self.table.state[found] >= least
        else:
            there[there] = self.table.state[found[there]] >= least
        return there

    def touch(self, row_class: RowClass, rows: I64Array) -> None:
        """``rows``, in chunk order, were used.

        The deepest becomes the oldest of them: it is of no use without the others. For windows and
        states the deepest becomes the newest: a hit needs only those at its end.
        """
        if len(rows):
            oldest_first = rows[::-1] if row_class.spec.layout.kind == "full" else rows
            row_class.lru.touched(oldest_first, self.table.stamp_rows(oldest_first))
            self.sets.newest[self.table.set_of[rows]] = self.table.clock - 1

    def slots(self, rows: I64Array) -> Slots:
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

    def pin(self, rows: I64Array) -> None:
        """One lease more holds ``rows``; a row that they name twice is pinned once."""
        self.table.pins[rows] += 1
        np.add.at(self.sets.held, self._sets_of(rows), 1)
        self.pinned += len(rows)

    def unpin(self, rows: I64Array, ahead: bool = False) -> None:
        """Undo one ``pin`` of the same ``rows``; at their last one, some are freed (``_LEAVING``).

        ``ahead``: they were prefetched and their reader is still to come: TRANSIENT ones stay.
        """
        table = self.table
        table.pins[rows] -= 1
        np.subtract.at(self.sets.held, self._sets_of(rows), 1)
        self.pinned -= len(rows)
        if not self._leaving:
            return
        states = table.state[rows]
        leaving = states == FAILED if ahead else np.isin(states, _LEAVING)
        leaving &= table.pins[rows] == 0
        self.free(np.unique(rows[leaving]))

    # ------------------------------------------------------------ states

    def allocate(
        self,
        classes: list[RowClass],
        keys: U64Array,
        wanted: list[I64Array],
        protect: int,
        state: int = WRITING,
    ) -> tuple[list[I64Array], int]:
        """WRITING (or LOADING) rows for the first chunks of ``wanted`` in each class, as many as
        room can be made for; and the first chunk that got none in some class, or ``len(keys)``.

        Nothing stamped at or after ``protect`` is evicted: the asker's own prefix. The keys that
        are wanted are distinct, and none is in its class's index.
        """
        rows, end = list[I64Array](), len(keys)
        for row_class, chunks in zip(classes, wanted, strict=True):
            self._make_room(row_class, len(chunks), protect)
            taken = row_class.free.take(len(chunks))
            self._move(taken, FREE, state)
            self.table.key[taken] = keys[chunks[: len(taken)]]
            row_class.index.add(taken)
            rows.append(taken)
            end = min([end, *chunks[len(taken) : len(taken) + 1].tolist()])
        return rows, end

    def prints(self, keys: U64Array) -> U64Array:
        """The prints of blocks (``core/blocks.py``)."""
        found: U64Array = keys.dot(self._odd_of_blocks) | np.uint64(1)
        return found

    def note_blocks(self, row_class: RowClass, rows: I64Array, prints: U64Array, tail: int) -> None:
        """``prints`` are those of the blocks of WRITING ``rows``, all but a chunk's last: uint64,
        ``(len(rows), chunk_blocks - 1)``. Of the last row only ``tail`` blocks are written, unless
        that is 0."""
        if row_class.blocks is None:
            width = prints.shape[1]
            if width not in self._prints:
                self._prints[width] = BlockPrints(self.table, width)
            of = self._prints[width]
            index = self._new_index(row_class.spec, of, self._odd_of_blocks[:1])
            row_class.blocks = BlockIndex(of, index)
        row_class.blocks.prints.note(rows, prints)
        if tail:
            self.table.tail[rows[-1]], self.table.offered[rows[-1]] = tail, True

    def publish(self, rows: I64Array) -> I64Array:
        """Every shard of ``rows`` is written: they are readable from here on. Returns those that
        tiers may have: a tail is worth no record of a row's size."""
        self._move(rows, WRITING, READY)
        whole: I64Array = rows[self.table.tail[rows] == 0]
        owner = self.class_of(rows)
        if owner is not None and owner.blocks is not None:
            needless = owner.blocks.add(rows)
            self._counters["tails_replaced"] += len(needless)
            held = self.table.pins[needless] > 0
            self._move(needless[held], READY, TRANSIENT)
            self.free(needless[~held])
        return whole

    def promoted(self, rows: I64Array, retain: bool) -> None:
        """A tier has filled LOADING ``rows``: they are readable from here on."""
        self._move(rows, LOADING, READY if retain else TRANSIENT)
        self.table.offered[rows] = True

    def fail(self, rows: I64Array) -> None:
        """LOADING ``rows`` will not be filled: nobody finds them any more, and they are freed once
        nobody waits for them."""
        self._unindex(rows)
        awaited = self.table.pins[rows] > 0
        self._move(rows[awaited], LOADING, FAILED)
        self.free(rows[~awaited])

    def discard(self, rows: I64Array) -> None:
        """``rows`` will never be readable, and may still be written."""
        self._unindex(rows)
        self._move(rows, WRITING, QUARANTINED)

    def free(self, rows: I64Array) -> None:
        """Nobody reads or writes ``rows`` (all of one class) any more."""
        if not len(rows):
            return
        self._unindex(rows)
        states = self.table.state[rows]
        for before in np.flatnonzero(np.bincount(states)).tolist():
            self._move(rows[states == before], before, FREE)
        owner = self.class_of(rows)
        if owner is not None:
            owner.free.give_back(rows)

    def _move(self, rows: I64Array, before: int, after: int) -> None:
        """Move ``rows``, all of one class and in state ``before``, and count them."""
        if not len(rows):
            return
        self.table.move(rows, before, after)
        sets = self._sets_of(rows)
        if held := (after in _IN_TRANSIT) - (before in _IN_TRANSIT):
            np.add.at(self.sets.held, sets, held)
        if used := (before == FREE) - (after == FREE):
            np.add.at(self.sets.used, sets, used)
        if after == FREE:
            self.sets.newest[sets[self.sets.used[sets] == 0]] = NEVER
        self._leaving += len(rows) * ((after in _LEAVING) - (before in _LEAVING))
        owner = self.class_of(rows)
        if owner is not None:
            owner.rows[before] -= len(rows)
            owner.rows[after] += len(rows)

    def class_of(self, rows: I64Array) -> RowClass | None:
        """The class whose slots ``rows`` are; ``None`` if they are none's, or it was cleared."""
        if not len(rows):
            return None
        return self.classes.get(int(self.sets.owner[self.table.set_of[rows[0]]]))

    def _sets_of(self, rows: I64Array) -> I64Array:
        """The sets of ``rows``, in the type in which numpy counts by them twice as fast."""
        return self.table.set_of[rows].astype(np.int64)

    def _unindex(self, rows: I64Array) -> None:
        owner = self.class_of(rows)
        if owner is not None:
            owner.index.remove(rows[owner.index.find(self.table.key[rows]) == rows])
            if owner.blocks is not None:
                owner.blocks.remove(rows)

    # ------------------------------------------------------------ room

    def _make_room(self, row_class: RowClass, count: int, protect: int) -> None:
        while (lacking := count - len(row_class.free)) > 0:
            if self._add_set(row_class):
                continue
            victims = row_class.lru.victims(lacking, protect)
            oldest = int(self.table.stamp[victims[0]]) if len(victims) else protect
            if self._take_over(row_class, lacking, below=oldest):
                continue
            if not len(victims):
                return
            self._counters["evicted_capacity"] += len(victims)
            self._evict(row_class, victims)

    def _evict(self, row_class: RowClass, rows: I64Array) -> None:
        """Free ``rows`` of a class. No hit gets past a missing ``full`` row, so its chunk's windows
        and states go with it."""
        keys = self.table.keys_of(rows)
        self.free(rows)
        if row_class.spec.layout.kind != "full":
            return
        for other in self._of_namespace[row_class.namespace]:
            if other.spec.layout.kind != "full":
                found = other.index.find(keys)
                found = found[found != ABSENT]
                orphans = found[self.table.evictable(found)]
                self._counters["evicted_orphaned"] += len(orphans)
                self.free(orphans)

    def _add_set(self, row_class: RowClass) -> bool:
        made = self.extents.add(row_class.spec.shard_bytes, row_class.slots_per_set)
        if made is None:
            return False
        self.table.grow(made.end_row)
        self.sets.add(made, row_class.id)
        self.table.set_of[made.first_row : made.end_row] = made.id
        self.table.slot[made.first_row : made.end_row] = np.arange(made.slots)
        row_class.free.give_new(np.arange(made.first_row, made.end_row))
        row_class.slots += made.slots
        return True

    def _take_over(self, asker: RowClass, lacking: int, below: int) -> bool:
        """Give back cleared sets, and other classes' that were last used before stamp ``below``, so
        that sets of ``lacking`` slots fit, or as many as can be."""
        owner, newest = self.sets.owner, self.sets.newest
        may_go = (owner == CLEARED) | ((owner >= 0) & (owner != asker.id) & (newest < below))
        may_go &= self.sets.held == 0
        if not may_go.any():
            return False
        value = np.where(may_go, newest, STAYS)
        shard_bytes, slots = asker.spec.shard_bytes, asker.slots_per_set
        chosen = self.extents.cheapest(shard_bytes, slots, -(-lacking // slots), value)
        if not len(chosen):
            chosen = self.extents.cheapest(shard_bytes, 1, lacking, value)
        if len(chosen):
            self._evict_sets(chosen)
        return bool(len(chosen))

    def _evict_sets(self, sets: I64Array) -> None:
        """Free the rows of ``sets``, which nobody reads or writes, and give the sets back."""
        rows, owners = self.sets.rows_of(sets), self.sets.owner[sets]
        for owner in sorted(set(owners.tolist())):
            of_owner = self.sets.rows_of(sets[owners == owner])
            held = of_owner[self.table.state[of_owner] >= READY]
            if owner == CLEARED:
                self.free(held)
            else:
                self._counters["evicted_handed_over"] += len(held)
                self._evict(self.classes[owner], held)
        assert (self.table.state[rows] == FREE).all(), "an extent set in use was given away"
        gone = np.zeros(len(self.table), np.bool_)
        gone[rows] = True
        for owner in sorted({*owners.tolist()} - {CLEARED}):
            row_class = self.classes[owner]
            row_class.slots -= int(self.sets.slots[sets[owners == owner]].sum())
            row_class.free.drop(gone)
        self.sets.cleared -= int((owners == CLEARED).sum())
        self.table.set_of[rows] = NOBODY
        self.sets.owner[sets] = NOBODY
        self.extents.remove(sets)

    # ------------------------------------------------------------ looking

    def last_uses(self) -> dict[int, int]:
        """When a row of each class that has sets was last used; ``STAYS`` while any is in use."""
        sets = np.flatnonzero(self.sets.owner >= 0)
        used = np.where(self.sets.held[sets] > 0, STAYS, self.sets.newest[sets])
        classes, which = np.unique(self.sets.owner[sets], return_inverse=True)
        last = np.full(len(classes), NEVER)
        np.maximum.at(last, which, used)
        return dict(zip(classes.tolist(), last.tolist(), strict=True))

    def in_use(self, row_class: RowClass) -> bool:
        """Whether any slot of the class is not FREE."""
        return row_class.slots != len(row_class.free)

    @property
    def cleared_bytes(self) -> int:
        """What cleared sets still take of the arena."""
        if not self.sets.cleared:
            return 0
        sets = np.flatnonzero(self.sets.owner == CLEARED).tolist()
        return sum(sum(self.extents.sets[i].extent_bytes) for i in sets)
