"""The row classes and namespaces, and the memory of the indexes in which their rows are found.

Law of this file: a class that was removed has no set and no row any more, and no lookup finds it.

An index allocates its memory at its first use. One step never touches or frees all memory of a
large index: ``warm`` and ``free_memory`` do a part of it per call.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from typing import Final

import msgspec
import numpy as np

from kvass.core.clients.layouts import RankOf
from kvass.core.clients.registry import RowClassSpec
from kvass.core.clients.tenants import Tenant
from kvass.core.clients.traffic import Traffic
from kvass.core.rows.blocks import BlockIndex, BlockPrints
from kvass.core.rows.causes import ClearCause
from kvass.core.rows.index import FILL, Keyed, KeyIndex, odd_numbers
from kvass.core.rows.listeners import ClassesGone, Listeners
from kvass.core.rows.policy import Policy
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_table import NEVER, READY, STATE_NAMES
from kvass.core.rows.saving import Saving
from kvass.core.rows.sets import CLEARED, FreeSlots
from kvass.core.rows.tables import ROOM, CoreTables
from kvass.core.saved.directory import SavedNamespace
from kvass.messages import Register
from kvass.types import U64Array

INDEX_ROOM: Final = 4 * ROOM
"""The most rows for which all indexes together reserve room (160 MiB), because there may be
thousands of classes. A class that would exceed it gets a small index, which grows."""
BLOCKS_FILL: Final = 0.6
"""The fill of the index of blocks. It may be higher than ``FILL``: a lookup finds few keys
there."""
GONE_A_STEP: Final = 64
"""The removed classes whose memory one step frees; 1,000 of them take 6 ms. A step frees only one
index of ``ROOM`` rows, which takes 2 ms."""


class Namespace(msgspec.Struct):
    """A namespace: its row classes by layer group, its epochs and its traffic.

    ``epoch``: the number of clears. A clear replaces ``classes`` by new, empty ones.
    ``tier_epochs``: the epoch of its records in each tier. ``None``: the epoch is not known yet,
    and the tier is not used for this namespace. ``asked_s``: when each tier was last asked for the
    epoch; infinity while the answer is awaited.
    ``private``: only one engine uses it, in one generation (``messages.Register``). Its rows are in
    L1 only, no tier is asked for an epoch, and ``tier_epochs`` and ``asked_s`` are empty.
    ``like``: the digest of the most similar older namespace of the same model. ``differs_in``: the
    fields in which this one differs from it, for display.
    """

    id: int
    digest: bytes
    classes: list[RowClass]
    chunk_tokens: int
    terms: Register
    """The ``Register`` of the first engine of the namespace."""
    ranks: tuple[RankOf, ...] = ()
    """Those of each of its engines; empty: none has registered in this life of the daemon."""
    model: str = ""
    like: bytes = b""
    differs_in: tuple[str, ...] = ()
    private: bool = False
    epoch: int = 0
    tier_epochs: list[int | None] = []
    asked_s: list[float] = []
    traffic: Traffic = msgspec.field(default_factory=Traffic)

    @property
    def saved(self) -> SavedNamespace:
        """What the next life of the daemon must know of it."""
        return SavedNamespace(
            self.id, self.digest, self.chunk_tokens, self.terms, self.model, self.private
        )

    @property
    def chunk_blocks(self) -> int:
        """The blocks of a chunk, as in ``RowClassSpec.chunk_blocks``."""
        return self.classes[0].spec.chunk_blocks

    def tokens(self, chunks: int, blocks: int = 0) -> int:
        """The number of tokens of ``chunks`` chunks and ``blocks`` blocks of the next chunk."""
        return chunks * self.chunk_tokens + blocks * self.chunk_tokens // max(1, self.chunk_blocks)


class RowClasses:
    """All row classes, over ``tables``. It tells ``listeners`` what is removed.

    It neither changes states of rows (``RowStates`` does) nor allocates slots (``RowAllocator``).
    """

    def __init__(
        self,
        tables: CoreTables,
        extent_bytes: int,
        seed: bytes,
        policy: Policy,
        saving: Saving,
        listeners: Listeners,
    ) -> None:
        self.tenants, self.table, self.uses = tables.tenants, tables.table, tables.uses
        self.extents, self.sets = tables.extents, tables.sets
        self.policy, self.saving, self.listeners = policy, saving, listeners
        self.by_id: dict[int, RowClass] = {}
        self.of_namespace: dict[int, list[RowClass]] = {}
        self._extent_bytes = extent_bytes
        self._odd = odd_numbers(seed)
        self._odd_of_blocks = odd_numbers(seed + b"blocks")
        self._prints: dict[int, BlockPrints] = {}
        """By the number of blocks of a chunk."""
        self._ids = count()
        self._index_room = INDEX_ROOM
        self._cold: list[KeyIndex] = []
        """Indexes with memory that was not touched yet."""
        self._gone: list[RowClass] = []
        """Removed classes whose memory is not freed yet."""

    def add(self, spec: RowClassSpec, namespace: int) -> RowClass:
        """Create the default tenant's class of a layer group of a namespace."""
        index = self._new_index(spec, self.table, self._odd)
        self._cold += [index] if index.cold else []
        made = RowClass(
            id=next(self._ids),
            namespace=namespace,
            spec=spec,
            order=self.policy.order(),
            slots_per_set=self._slots_per_set(spec),
            index=index,
            blocks=self._new_blocks(spec),
            tenant=self.tenants.default,
            of_tenants={},
        )
        self.of_namespace.setdefault(namespace, []).append(made)
        return self._enter(made)

    def paid_by(self, row_class: RowClass, tenant: Tenant) -> RowClass:
        """The class that ``tenant`` has in the namespace and group of ``row_class``. It is created
        if the tenant has none."""
        if (found := row_class.of_tenants.get(tenant.id)) is not None:
            return found
        made = msgspec.structs.replace(
            row_class,
            id=next(self._ids),
            order=self.policy.order(),
            tenant=tenant,
            free=FreeSlots(),
            rows=[0] * len(STATE_NAMES),
            slots=0,
        )
        return self._enter(made)

    def _enter(self, made: RowClass) -> RowClass:
        self.by_id[made.id] = made.of_tenants[made.tenant.id] = made
        self.saving.put(made.saved)
        return made

    def forget_empty(self, row_class: RowClass) -> None:
        """Forget a class that has no extent set, unless it is the default tenant's."""
        if not row_class.slots and row_class.tenant is not self.tenants.default:
            del self.by_id[row_class.id], row_class.of_tenants[row_class.tenant.id]
            self.saving.remove("class", [row_class.id])

    def _new_blocks(self, spec: RowClassSpec) -> BlockIndex | None:
        """The index of blocks of a new class; ``None`` if its hits end at chunks. It is never
        warmed, because not every engine uses it."""
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
        """An index with room for as many rows of the class as the arena holds, or with the least
        room if all indexes would exceed ``INDEX_ROOM``."""
        most = min(self.extents.size // spec.row_bytes, ROOM)
        index = KeyIndex(table, odd, most if most <= self._index_room else 0, fill)
        self._index_room -= index.room
        return index

    def _slots_per_set(self, spec: RowClassSpec) -> int:
        """The slots of an extent set: as many as make its largest extent ``extent_bytes`` long.

        A set has an extent for each shard. All extents of a set take at most a sixteenth of the
        arena, because a few larger sets would leave no room for other classes (law 6).
        """
        most = max(self._extent_bytes, self.extents.size // 16)
        return min(-(-self._extent_bytes // max(spec.shard_bytes)), -(-most // spec.row_bytes))

    def prints(self, keys: U64Array) -> U64Array:
        """The prints of block hashes (``core/rows/blocks.py``)."""
        found: U64Array = keys.dot(self._odd_of_blocks) | np.uint64(1)
        return found

    def remove(
        self, namespaces: Collection[int], gone: Collection[RowClass], cause: ClearCause
    ) -> None:
        """Remove the classes ``gone``, with those of all tenants. ``namespaces`` have no rows in
        other classes. No lookup finds their rows from now on.

        Their extent sets become ``CLEARED``. Leases and reservations on their rows stay valid. A
        set whose rows nobody reads or writes is given back by ``RowAllocator.reclaim``, or earlier
        if a new row needs the room.
        """
        every = [each for row_class in gone for each in row_class.of_tenants.values()]
        sets = np.flatnonzero(np.isin(self.sets.owner, [c.id for c in every]))
        told = ClassesGone([*namespaces], every, sets, cause)
        for hook in self.listeners.gone:
            hook(told)
        self.sets.owner[sets], self.sets.newest[sets] = CLEARED, NEVER
        self.sets.cleared += len(sets)
        for row_class in every:
            row_class.tenant.taken_bytes -= row_class.slots * row_class.spec.row_bytes
            del self.by_id[row_class.id]
        for row_class in gone:
            self._index_room += row_class.index.room
            if row_class.blocks is not None:
                self._index_room += row_class.blocks.index.room
            self.of_namespace[row_class.namespace].remove(row_class)
            row_class.of_tenants.clear()  # a cycle: it would keep their memory until a collection
        indexes = {id(row_class.index) for row_class in gone}
        self._cold = [index for index in self._cold if id(index) not in indexes]
        self._gone += every

    def void(self, namespaces: Collection[Namespace]) -> None:
        """Void the seals of all rows of ``namespaces``, which are going to be cleared. If the
        daemon dies before the last is, the next one has none of these rows."""
        every = [t.id for ns in namespaces for c in ns.classes for t in c.of_tenants.values()]
        self.table.void(np.flatnonzero(np.isin(self.sets.owner, every)))

    def clear(self, namespaces: Collection[Namespace], cause: ClearCause = "cleared") -> int:
        """Replace the classes of ``namespaces`` by empty ones. Returns how many rows lookups could
        find before."""
        used = {c.id: c for ns in namespaces for c in ns.classes if c.slots or not c.undivided}
        every = [each for c in used.values() for each in c.of_tenants.values()]
        matched = sum(sum(each.rows[READY:]) for each in every)
        self.remove([ns.id for ns in namespaces], used.values(), cause)
        for ns in namespaces:
            ns.classes = [self.add(c.spec, ns.id) if c.id in used else c for c in ns.classes]
        return matched

    @property
    def unfinished(self) -> bool:
        """Whether ``warm`` or ``free_memory`` has work left."""
        return bool(self._cold or self._gone)

    def free_memory(self) -> None:
        """Free the memory of a few removed classes."""
        done = 0
        while self._gone and done < GONE_A_STEP:
            done += 1 + self._gone.pop().index.room * GONE_A_STEP // ROOM

    def warm(self) -> None:
        """Touch a part of a new index, so that the first stores do not wait for page faults."""
        if self._cold:
            self._cold[0].warm()
            if not self._cold[0].cold:
                del self._cold[0]
