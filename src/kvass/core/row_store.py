"""The rows of L1: their index, their slots, and room for new ones.

An index entry names a row that is WRITING, LOADING, READY or TRANSIENT. Room is made here, at
allocation time, and nowhere else (law 6). Where there is no free slot, a new extent set is taken
from the arena's free space. If there is none, rows are evicted: the class's own, or the extent sets
of other classes, whichever were used less recently. So no layout can starve another. With quotas
(``tenants``) those go first whose tenants have more than their share, and no extent set goes to
another tenant whose owner has no more than is reserved for it.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvass.core.blocks import BlockIndex, BlockPrints
from kvass.core.eviction import Lru
from kvass.core.extents import STAYS, ExtentMap
from kvass.core.histogram import Histogram
from kvass.core.index import ABSENT, FILL, Keyed, KeyIndex, odd_numbers
from kvass.core.registry import RowClassSpec
from kvass.core.removed import RemovedRows
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
from kvass.core.segment_index import SegmentIndex
from kvass.core.sets import CLEARED, FreeSlots, SetTable
from kvass.core.tenants import Tenant, Tenants
from kvass.core.traffic import Traffic
from kvass.core.use_times import UseTimes
from kvass.messages import Register
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
BLOCKS_FILL: Final = 0.6
"""Of the index of blocks, in which a lookup finds a few keys, and no hundreds."""

GONE_A_STEP: Final = 64
"""Removed classes whose memory one ``reclaim`` gives back: that of 1,000 takes 6 ms. But only one
with an index of ``ROOM`` rows, which takes 2 ms."""


class RowClass(msgspec.Struct, eq=False):
    """The rows of one (namespace, group) that one tenant pays for: all of one size, with a record
    of their use. The classes of all tenants have one index.

    ``blocks``: of the rows whose blocks are known, of all tenants too; None: hits end with a chunk.
    ``slots``: how many its sets have. ``rows``: how many rows are in each state, except FREE.
    ``of_tenants``: all classes of its namespace and group by their tenant's id. That of the default
    tenant is always there, stands for all of them, and is what a namespace names; the others exist
    while they have sets.
    """

    id: int
    namespace: int
    spec: RowClassSpec
    lru: Lru
    slots_per_set: int
    index: KeyIndex
    free: FreeSlots
    rows: list[int]
    tenant: Tenant
    of_tenants: dict[int, RowClass]
    blocks: BlockIndex | None
    slots: int = 0

    @property
    def undivided(self) -> bool:
        """Whether all rows of its namespace and group are its own."""
        return len(self.of_tenants) < 2


class Namespace(msgspec.Struct):
    """``epoch`` counts clears. A clear gives it new, empty ``classes``.

    ``tier_epochs``: the epoch of its records in each tier; None: not known yet, so that tier is not
    used for it. ``asked_s``: when each was last asked for; infinity: the answer is awaited.
    ``private``: of one engine's generation (``messages.Register``). Its rows are in L1 only: no
    tier is asked for an epoch, and both lists are empty. ``differs_in``: from ``like``, the most
    similar namespace before it of the same model, in words.
    """

    id: int
    digest: bytes
    classes: list[RowClass]
    chunk_tokens: int
    terms: Register
    """As its first engine has registered."""
    model: str = ""
    like: bytes = b""
    differs_in: tuple[str, ...] = ()
    private: bool = False
    epoch: int = 0
    tier_epochs: list[int | None] = []
    asked_s: list[float] = []
    traffic: Traffic = msgspec.field(default_factory=Traffic)

    @property
    def chunk_blocks(self) -> int:
        """As ``RowClassSpec.chunk_blocks``."""
        return self.classes[0].spec.chunk_blocks

    def tokens(self, chunks: int, blocks: int = 0) -> int:
        """The tokens of so many chunks, and blocks of one."""
        return chunks * self.chunk_tokens + blocks * self.chunk_tokens // max(1, self.chunk_blocks)


class RowStore:
    """Rows of all classes in an arena of ``arena_bytes``. ``slice_slots``: of one ``reclaim``."""

    def __init__(
        self,
        arena_bytes: int,
        extent_bytes: int,
        counters: dict[str, int],
        seed: bytes = b"",
        slice_slots: int = 2048,
        age_at_eviction: Histogram | None = None,
        segment_index_bytes: int = 0,
    ) -> None:
        self.tenants = Tenants(arena_bytes)
        self.uses = UseTimes()
        self._age_at_eviction = age_at_eviction or Histogram()
        self.table = RowTable()
        self.table.grow(min(arena_bytes // TYPICAL_ROW, ROOM))
        self.extents = ExtentMap(arena_bytes)
        self.sets = SetTable()
        self.classes: dict[int, RowClass] = {}
        self.pinned = 0
        """Pins on all rows; one of a lease that names a row twice counts twice."""
        self.removed = RemovedRows()
        self._of_namespace: dict[int, list[RowClass]] = {}
        self._counters = counters
        self._extent_bytes = extent_bytes
        self._slice_slots = slice_slots
        self._odd = odd_numbers(seed)
        self.segments = SegmentIndex(segment_index_bytes, seed)
        self._odd_of_blocks = odd_numbers(seed + b"blocks")
        self._prints: dict[int, BlockPrints] = {}
        """By the blocks of a chunk."""
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
        index, payer = self._new_index(spec), self.tenants.default
        made = self._new_class(spec, namespace, index, self._new_blocks(spec), payer, {})
        self._of_namespace.setdefault(namespace, []).append(made)
        return made

    def _new_class(
        self,
        spec: RowClassSpec,
        namespace: int,
        index: KeyIndex,
        blocks: BlockIndex | None,
        tenant: Tenant,
        of_tenants: dict[int, RowClass],
    ) -> RowClass:
        made = RowClass(
            id=self._next_class,
            namespace=namespace,
            spec=spec,
            lru=Lru(self.table),
            slots_per_set=self._slots_per_set(spec),
            index=index,
            blocks=blocks,
            free=FreeSlots(),
            rows=[0] * len(STATE_NAMES),
            tenant=tenant,
            of_tenants=of_tenants,
        )
        self._next_class += 1
        self.classes[made.id] = of_tenants[tenant.id] = made
        return made

    def _paid_by(self, row_class: RowClass, tenant: Tenant) -> RowClass:
        """The class of the same namespace and group that ``tenant`` pays for."""
        found = row_class.of_tenants.get(tenant.id)
        return found or self._new_class(
            row_class.spec,
            row_class.namespace,
            row_class.index,
            row_class.blocks,
            tenant,
            row_class.of_tenants,
        )

    def _new_blocks(self, spec: RowClassSpec) -> BlockIndex | None:
        """Its memory is taken at its first use and not touched before: not every engine uses it."""
        if not spec.chunk_blocks:
            return None
        prints = self._prints.setdefault(
            spec.chunk_blocks, BlockPrints(self.table, spec.chunk_blocks - 1)
        )
        odd = self._odd_of_blocks[:1]
        return BlockIndex(prints, self._sized_index(spec, prints, odd, BLOCKS_FILL))

    def _new_index(self, spec: RowClassSpec) -> KeyIndex:
        index = self._sized_index(spec, self.table, self._odd)
        self._cold += [index] if index.cold else []
        return index

    def _sized_index(
        self, spec: RowClassSpec, table: Keyed, odd: U64Array, fill: float = FILL
    ) -> KeyIndex:
        """With room for all rows of the class that the arena holds, if that much is left."""
        most = min(self.extents.size // spec.row_bytes, ROOM)
        index = KeyIndex(table, odd, most if most <= self._index_room else 0, fill)
        self._index_room -= index.room
        return index

    def _slots_per_set(self, spec: RowClassSpec) -> int:
        """So many that an extent is as large as configured. But a set, which has an extent for each
        shard, is at most a sixteenth of the arena, or a few would leave no room for others (law 6).
        """
        most = max(self._extent_bytes, self.extents.size // 16)
        return min(-(-self._extent_bytes // max(spec.shard_bytes)), -(-most // spec.row_bytes))

    def remove(self, gone: Collection[RowClass]) -> None:
        """Forget the classes of all tenants: nothing of them matches any more, from now on.

        Their sets are ``CLEARED``. Who reads or writes there goes on. Sets in which nobody does are
        given back by ``reclaim``, or when somebody needs room.
        """
        every = [each for row_class in gone for each in row_class.of_tenants.values()]
        sets = np.flatnonzero(np.isin(self.sets.owner, [c.id for c in every]))
        self.sets.owner[sets], self.sets.newest[sets] = CLEARED, NEVER
        self.sets.cleared += len(sets)
        for row_class in every:
            row_class.tenant.taken_bytes -= row_class.slots * row_class.spec.row_bytes
            held = sum(row_class.rows[READY:]) * row_class.spec.row_bytes
            self._counters["bytes_evicted_cleared"] += held
            del self.classes[row_class.id]
        for row_class in gone:
            self.removed.note_all(row_class.namespace)
            self._index_room += row_class.index.room
            if row_class.blocks is not None:
                self._index_room += row_class.blocks.index.room
            self._of_namespace[row_class.namespace].remove(row_class)
            row_class.of_tenants.clear()  # a cycle: it would keep their memory until a collection
        indexes = {id(row_class.index) for row_class in gone}
        self._cold = [index for index in self._cold if id(index) not in indexes]
        self._gone += every

    def clear(self, namespaces: Collection[Namespace]) -> int:
        """Give ``namespaces`` empty classes; returns how many rows matched until now."""
        used = {c.id: c for ns in namespaces for c in ns.classes if c.slots or not c.undivided}
        every = [each for c in used.values() for each in c.of_tenants.values()]
        matched = sum(sum(each.rows[READY:]) for each in every)
        self.remove(used.values())
        for ns in namespaces:
            self.segments.clear(ns.id)
            ns.classes = [self.add_class(c.spec, ns.id) if c.id in used else c for c in ns.classes]
        return matched

    @property
    def unfinished(self) -> bool:
        """Whether ``reclaim`` or ``warm`` has something to do now."""
        idle = self.sets.cleared and len(self._idle_cleared())
        return bool(self._cold or self._gone or idle or self.segments.cleared)

    def reclaim(self) -> None:
        """Give back cleared sets in which nobody reads or writes: ``slice_slots`` slots of them, or
        one set, so that it does not take long. And the memory of a few removed classes."""
        gone = 0
        while self._gone and gone < GONE_A_STEP:
            gone += 1 + self._gone.pop().index.room * GONE_A_STEP // ROOM
        self.segments.reclaim()
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
            stamps = self.table.stamp_rows(oldest_first)
            if row_class.undivided:
                row_class.lru.touched(oldest_first, stamps)
            else:
                self._touch_each(oldest_first, stamps)
            self.sets.newest[self.table.set_of[rows]] = self.table.clock - 1

    def _touch_each(self, rows: I64Array, stamps: I64Array) -> None:
        """Tell the classes of several tenants of the use of ``rows``."""
        owners = self.sets.owner[self.table.set_of[rows]]
        order = np.argsort(owners, kind="stable")
        owners, rows, stamps = owners[order], rows[order], stamps[order]
        cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(rows)]
        for begin, end in pairwise(cuts):
            lru = self.classes[int(owners[begin])].lru
            lru.touched(rows[begin:end], stamps[begin:end])

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
        leavers = np.unique(rows[leaving])
        if (owner := self.class_of(leavers)) is not None:
            left = int((table.state[leavers] == TRANSIENT).sum()) * owner.spec.row_bytes
            self._counters["bytes_evicted_not_retained"] += left
        self.free(leavers)

    # ------------------------------------------------------------ states

    def allocate(
        self,
        classes: list[RowClass],
        keys: U64Array,
        wanted: list[I64Array],
        protect: int,
        tenant: Tenant,
        state: int = WRITING,
    ) -> tuple[list[I64Array], int]:
        """WRITING (or LOADING) rows for the first chunks of ``wanted`` in each class, as many as
        room can be made for; and the first chunk that got none in some class, or ``len(keys)``.
        ``tenant`` pays for them.

        Nothing stamped at or after ``protect`` is evicted: the asker's own prefix. The keys that
        are wanted are distinct, and none is in its class's index.
        """
        rows, end = list[I64Array](), len(keys)
        if tenant.taken_bytes > tenant.cap_bytes:
            self._shrink(tenant, protect)
        for any_tenants, chunks in zip(classes, wanted, strict=True):
            row_class = self._paid_by(any_tenants, tenant)
            self._make_room(row_class, len(chunks), protect)
            taken = row_class.free.take(len(chunks))
            self._forget_empty(row_class)
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
        assert row_class.blocks is not None, "blocks of a class whose hits end with a chunk"
        row_class.blocks.prints.note(rows, prints, tail)
        if tail:
            self.table.offered[rows[-1]] = True

    def publish(self, rows: I64Array) -> I64Array:
        """Every shard of ``rows`` is written: they are readable from here on. Returns those that
        tiers may have: a tail is worth no record of a row's size."""
        self._move(rows, WRITING, READY)
        owner = self.class_of(rows)
        if owner is None or owner.blocks is None:
            return rows
        whole = rows[~owner.blocks.prints.tails(rows)]
        for row in owner.blocks.add(rows).tolist():
            self._counters["tails_replaced"] += 1
            if self.table.pins[row] > 0:
                self._move(np.array([row]), READY, TRANSIENT)
            else:
                self._counters["bytes_evicted_replaced"] += owner.spec.row_bytes
                self.free(np.array([row]))
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
        """Nobody reads or writes ``rows`` (all of one namespace and group) any more."""
        if not len(rows):
            return
        if self.tenants.divided:
            owners = self.sets.owner[self.table.set_of[rows]]
            if (owners != owners[0]).any():
                for owner in np.unique(owners):
                    self.free(rows[owners == owner])
                return
        if self.removed.noted:
            self._note_removed(rows)
        self._unindex(rows)
        states = self.table.state[rows]
        for before in np.flatnonzero(np.bincount(states)).tolist():
            self._move(rows[states == before], before, FREE)
        owner = self.class_of(rows)
        if owner is not None:
            owner.free.give_back(rows)

    def _note_removed(self, rows: I64Array) -> None:
        owner = self.class_of(rows)
        if owner is not None:
            left = rows[self.table.state[rows] >= READY]
            self.removed.note(owner.namespace, owner.spec.group, self.table.keys_of(left))

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
            if after >= READY > before:
                self._counters["l1_in_bytes"] += len(rows) * owner.spec.row_bytes

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
            keys = self.table.keys_of(rows)
            known = owner.index.find(keys) == rows
            self.segments.left(owner.namespace, keys[known])
            owner.index.remove(rows[known])
            if owner.blocks is not None:
                owner.blocks.remove(rows)

    # ------------------------------------------------------------ room

    def _make_room(self, row_class: RowClass, count: int, protect: int) -> None:
        while (lacking := count - len(row_class.free)) > 0:
            if self._add_set(row_class):
                continue
            victims = row_class.lru.victims(lacking, protect)
            oldest = int(self.table.stamp[victims[0]]) if len(victims) else protect
            if self._take_over(row_class, lacking, oldest, protect):
                continue
            if not len(victims):
                return
            self._evict(row_class, victims, "capacity")

    def _evict(self, row_class: RowClass, rows: I64Array, reason: str) -> None:
        """Free ``rows`` of a class, the oldest first. No hit gets past a missing ``full`` row, so
        its chunk's windows and states go with it."""
        self._count_evicted(row_class, rows, reason)
        keys = self.table.keys_of(rows)
        row_class.tenant.evicted_bytes += len(rows) * row_class.spec.row_bytes
        self.free(rows)
        if row_class.spec.layout.kind != "full":
            return
        for other in self._of_namespace[row_class.namespace]:
            if other.spec.layout.kind != "full":
                found = other.index.find(keys)
                found = found[found != ABSENT]
                orphans = found[self.table.evictable(found)]
                self._count_evicted(other, orphans, "orphaned")
                self.free(orphans)

    def _count_evicted(self, row_class: RowClass, rows: I64Array, reason: str) -> None:
        """They are about as old as the first of them."""
        if not len(rows):
            return
        size = row_class.spec.row_bytes
        self._counters[f"evicted_{reason}"] += len(rows)
        self._counters[f"bytes_evicted_{reason}"] += len(rows) * size
        self._counters["unread_bytes_evicted"] += int((~self.table.read[rows]).sum()) * size
        self._age_at_eviction.observe(self.uses.age(int(self.table.stamp[rows[0]])), len(rows))

    def _add_set(self, row_class: RowClass) -> bool:
        most = min(row_class.slots_per_set, self._within_cap(row_class))
        made = self.extents.add(row_class.spec.shard_bytes, most) if most else None
        if made is None:
            return False
        self.table.grow(made.end_row)
        self.sets.add(made, row_class.id, row_class.tenant.id)
        row_class.tenant.taken_bytes += sum(made.extent_bytes)
        self.table.set_of[made.first_row : made.end_row] = made.id
        self.table.slot[made.first_row : made.end_row] = np.arange(made.slots)
        row_class.free.give_new(np.arange(made.first_row, made.end_row))
        row_class.slots += made.slots
        return True

    @staticmethod
    def _within_cap(row_class: RowClass) -> int:
        """How many slots more its tenant may have of it."""
        left = row_class.tenant.cap_bytes - row_class.tenant.taken_bytes
        return max(0, left // row_class.spec.row_bytes)

    def _take_over(self, asker: RowClass, lacking: int, oldest: int, protect: int) -> bool:
        """Give back cleared sets, and other classes' that were last used before stamp ``oldest``,
        so that sets of ``lacking`` slots fit, or as many as can be.

        ``oldest``: of the asker's own rows that may go, or ``protect`` if none may.
        """
        sets = self.sets
        idle = sets.held == 0
        cleared, others = idle & (sets.owner == CLEARED), idle & (sets.owner >= 0)
        others &= sets.owner != asker.id
        if not self.tenants.divided:
            return self._give_way(asker, lacking, cleared | (others & (sets.newest < oldest)))
        tenant = asker.tenant
        own = others & (sets.tenant == tenant.id) & (sets.newest < oldest)
        if not self._within_cap(asker):
            return self._give_up(own, lacking * asker.spec.row_bytes)
        foreign = self._may_lose(others & (sets.tenant != tenant.id) & (sets.newest < protect))
        shares, taken = self.tenants.shares(tenant), self.tenants.taken()
        over = foreign & (taken > shares)[sets.tenant]
        wants = tenant.taken_bytes + asker.slots_per_set * asker.spec.row_bytes
        entitled = wants <= shares[tenant.id] or tenant.taken_bytes < tenant.reserved_bytes
        if not entitled:
            over = own | (over & (sets.newest < oldest))
        if self._give_way(asker, lacking, cleared | over):
            return True
        anybodys = own | (foreign & (sets.newest < oldest))
        return (entitled or oldest == protect) and self._give_way(asker, lacking, anybodys)

    def _may_lose(self, sets: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Those of ``sets`` without which their tenants still have what is reserved for them."""
        for tenant in self.tenants.all.values():
            if tenant.reserved_bytes:
                theirs = np.flatnonzero(sets & (self.sets.tenant == tenant.id))
                theirs = theirs[np.argsort(self.sets.newest[theirs], kind="stable")]
                spare = tenant.taken_bytes - tenant.reserved_bytes
                sets[theirs[np.cumsum(self.sets.bytes[theirs]) > spare]] = False
        return sets

    def _give_way(self, asker: RowClass, lacking: int, may_go: npt.NDArray[np.bool_]) -> bool:
        """Give back sets that may go, those used longest ago, so that sets of ``lacking`` slots
        fit, or as many as can be."""
        if not may_go.any():
            return False
        value = np.where(may_go, self.sets.newest, STAYS)
        shard_bytes, slots = asker.spec.shard_bytes, asker.slots_per_set
        chosen = self.extents.cheapest(shard_bytes, slots, -(-lacking // slots), value)
        if not len(chosen):
            chosen = self.extents.cheapest(shard_bytes, 1, lacking, value)
        if len(chosen):
            self._evict_sets(chosen)
        return bool(len(chosen))

    def _give_up(self, may_go: npt.NDArray[np.bool_], size: int) -> bool:
        """Give back sets that may go, those used longest ago, of ``size`` bytes in all."""
        sets = np.flatnonzero(may_go)
        sets = sets[np.argsort(self.sets.newest[sets], kind="stable")]
        before = np.cumsum(self.sets.bytes[sets]) - self.sets.bytes[sets]
        chosen = sets[before < size]
        if len(chosen):
            self._evict_sets(chosen)
        return bool(len(chosen))

    def _shrink(self, tenant: Tenant, protect: int) -> None:
        """A tenant with more than its cap, which was lowered, gives back one set."""
        may_go = (self.sets.owner >= 0) & (self.sets.held == 0) & (self.sets.newest < protect)
        self._give_up(may_go & (self.sets.tenant == tenant.id), 1)

    def _evict_sets(self, sets: I64Array) -> None:
        """Free the rows of ``sets``, which nobody reads or writes, and give the sets back."""
        rows, owners = self.sets.rows_of(sets), self.sets.owner[sets]
        for owner in sorted(set(owners.tolist())):
            of_owner = self.sets.rows_of(sets[owners == owner])
            held = of_owner[self.table.state[of_owner] >= READY]
            if owner == CLEARED:
                self.free(held)
            else:
                self._evict(self.classes[owner], held, "handed_over")
        assert (self.table.state[rows] == FREE).all(), "an extent set in use was given away"
        gone = np.zeros(len(self.table), np.bool_)
        gone[rows] = True
        for owner in sorted({*owners.tolist()} - {CLEARED}):
            row_class = self.classes[owner]
            row_class.slots -= int(self.sets.slots[sets[owners == owner]].sum())
            row_class.tenant.taken_bytes -= int(self.sets.bytes[sets[owners == owner]].sum())
            row_class.free.drop(gone)
            self._forget_empty(row_class)
        self.sets.cleared -= int((owners == CLEARED).sum())
        self.table.set_of[rows] = NOBODY
        self.sets.owner[sets] = NOBODY
        self.extents.remove(sets)

    def _forget_empty(self, row_class: RowClass) -> None:
        """Only the default tenant's class stays without a set."""
        if not row_class.slots and row_class.tenant is not self.tenants.default:
            del self.classes[row_class.id], row_class.of_tenants[row_class.tenant.id]

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
        """Whether any slot is not FREE, of any tenant's."""
        return any(c.slots != len(c.free) for c in row_class.of_tenants.values())

    @property
    def cleared_bytes(self) -> int:
        """What cleared sets still take of the arena."""
        if not self.sets.cleared:
            return 0
        sets = np.flatnonzero(self.sets.owner == CLEARED).tolist()
        return sum(sum(self.extents.sets[i].extent_bytes) for i in sets)
