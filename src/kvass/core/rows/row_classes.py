"""Row classes and namespaces: what each has of its own, and the indexes by which rows are found.

An index entry names a row that is WRITING, LOADING, READY or TRANSIENT. All memory that an index
may need is taken at its first use, touched in slices (``warm``), and given back in slices.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Final

import msgspec
import numpy as np

from kvass.core.clients.registry import RowClassSpec
from kvass.core.clients.tenants import Tenant, Tenants
from kvass.core.clients.traffic import Traffic
from kvass.core.rows.blocks import BlockIndex, BlockPrints
from kvass.core.rows.eviction import UseLog
from kvass.core.rows.extents import ExtentMap
from kvass.core.rows.index import FILL, Keyed, KeyIndex, odd_numbers
from kvass.core.rows.removed import RemovedRows
from kvass.core.rows.row_table import NEVER, READY, STATE_NAMES, RowTable
from kvass.core.rows.segment_index import SegmentIndex
from kvass.core.rows.sets import CLEARED, FreeSlots, SetTable
from kvass.messages import Register
from kvass.types import U64Array

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
"""Removed classes whose memory one step gives back: that of 1,000 takes 6 ms. But only one with an
index of ``ROOM`` rows, which takes 2 ms."""


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
    log: UseLog
    slots_per_set: int
    index: KeyIndex
    blocks: BlockIndex | None
    tenant: Tenant
    of_tenants: dict[int, RowClass]
    free: FreeSlots = msgspec.field(default_factory=FreeSlots)
    rows: list[int] = msgspec.field(default_factory=lambda: [0] * len(STATE_NAMES))
    slots: int = 0

    @property
    def undivided(self) -> bool:
        """Whether all rows of its namespace and group are its own."""
        return len(self.of_tenants) < 2

    @property
    def in_use(self) -> bool:
        """Whether any slot is not FREE, of any tenant's."""
        return any(c.slots != len(c.free) for c in self.of_tenants.values())

    @property
    def within_cap(self) -> int:
        """How many slots more its tenant may have of it."""
        left = self.tenant.cap_bytes - self.tenant.taken_bytes
        return max(0, left // self.spec.row_bytes)


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


class RowClasses:
    """All of them, in an arena of ``arena_bytes``, and the tables that they share."""

    def __init__(
        self,
        arena_bytes: int,
        extent_bytes: int,
        counters: dict[str, int],
        seed: bytes,
        segment_index_bytes: int,
    ) -> None:
        self.tenants = Tenants(arena_bytes)
        self.table = RowTable()
        self.table.grow(min(arena_bytes // TYPICAL_ROW, ROOM))
        self.extents = ExtentMap(arena_bytes)
        self.sets = SetTable()
        self.by_id: dict[int, RowClass] = {}
        self.removed = RemovedRows()
        self.of_namespace: dict[int, list[RowClass]] = {}
        self._counters = counters
        self._extent_bytes = extent_bytes
        self._odd = odd_numbers(seed)
        self.segments = SegmentIndex(segment_index_bytes, seed)
        self._odd_of_blocks = odd_numbers(seed + b"blocks")
        self._prints: dict[int, BlockPrints] = {}
        """By the blocks of a chunk."""
        self._ids = count()
        self._index_room = INDEX_ROOM
        self._cold: list[KeyIndex] = []
        """Indexes whose memory nobody has touched yet."""
        self._gone: list[RowClass] = []
        """Removed classes, whose memory is still to be given back to the system."""

    def add(self, spec: RowClassSpec, namespace: int) -> RowClass:
        index = self._new_index(spec, self.table, self._odd)
        self._cold += [index] if index.cold else []
        made = RowClass(
            id=next(self._ids),
            namespace=namespace,
            spec=spec,
            log=UseLog(self.table),
            slots_per_set=self._slots_per_set(spec),
            index=index,
            blocks=self._new_blocks(spec),
            tenant=self.tenants.default,
            of_tenants={},
        )
        self.of_namespace.setdefault(namespace, []).append(made)
        return self._known(made)

    def paid_by(self, row_class: RowClass, tenant: Tenant) -> RowClass:
        """The class of the same namespace and group that ``tenant`` pays for."""
        if (found := row_class.of_tenants.get(tenant.id)) is not None:
            return found
        made = msgspec.structs.replace(
            row_class,
            id=next(self._ids),
            log=UseLog(self.table),
            tenant=tenant,
            free=FreeSlots(),
            rows=[0] * len(STATE_NAMES),
            slots=0,
        )
        return self._known(made)

    def _known(self, made: RowClass) -> RowClass:
        self.by_id[made.id] = made.of_tenants[made.tenant.id] = made
        return made

    def forget_empty(self, row_class: RowClass) -> None:
        """Only the default tenant's class stays without a set."""
        if not row_class.slots and row_class.tenant is not self.tenants.default:
            del self.by_id[row_class.id], row_class.of_tenants[row_class.tenant.id]

    def _new_blocks(self, spec: RowClassSpec) -> BlockIndex | None:
        """Its memory is taken at its first use and not touched before: not every engine uses it."""
        if not spec.chunk_blocks:
            return None
        prints = self._prints.setdefault(
            spec.chunk_blocks, BlockPrints(self.table, spec.chunk_blocks - 1)
        )
        odd = self._odd_of_blocks[:1]
        return BlockIndex(prints, self._new_index(spec, prints, odd, BLOCKS_FILL))

    def _new_index(
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

    def prints(self, keys: U64Array) -> U64Array:
        """The prints of blocks (``core/rows/blocks.py``)."""
        found: U64Array = keys.dot(self._odd_of_blocks) | np.uint64(1)
        return found

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
            del self.by_id[row_class.id]
        for row_class in gone:
            self.removed.note_all(row_class.namespace)
            self._index_room += row_class.index.room
            if row_class.blocks is not None:
                self._index_room += row_class.blocks.index.room
            self.of_namespace[row_class.namespace].remove(row_class)
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
            ns.classes = [self.add(c.spec, ns.id) if c.id in used else c for c in ns.classes]
        return matched

    @property
    def unfinished(self) -> bool:
        """Whether there is memory to be touched (``warm``) or given back (``free_memory``)."""
        return bool(self._cold or self._gone)

    def free_memory(self) -> None:
        """Give back that of a few removed classes."""
        done = 0
        while self._gone and done < GONE_A_STEP:
            done += 1 + self._gone.pop().index.room * GONE_A_STEP // ROOM

    def warm(self) -> None:
        """Touch some memory of a new index, so that the first stores do not wait for the kernel."""
        if self._cold:
            self._cold[0].warm()
            if not self._cold[0].cold:
                del self._cold[0]
