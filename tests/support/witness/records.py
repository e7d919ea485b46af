"""Records of a witness: namespaces, instances, reservations, leases and tier operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from math import inf

from kvass import messages as m
from kvass.types import PAGE, GroupLayout, Slots, chunk_blocks

Place = tuple[tuple[int, ...], ...]
"""The pages of one row, by shard."""

Blocks = dict[bytes, list[bytes]]
"""By a row's key the hashes of its blocks."""

Tag = tuple[bytes, int, int, int]
"""What a writer leaves on each page of a shard: (boot, reservation, row within it, shard)."""


class BrokenLawError(AssertionError):
    """The core broke a law: what it did contradicts what its clients know."""


@dataclass(eq=False, slots=True)
class Namespace:
    """A namespace: the sizes of its rows, and how often it was cleared."""

    key: object
    shard_bytes: tuple[tuple[int, ...], ...]  # [group][shard]
    layouts: tuple[GroupLayout, ...]
    chunk_tokens: int
    private: bool = False
    """Of one generation of one instance (weights that were replaced in place)."""
    epoch: int = 0
    floor: int = 0
    """Rows that were written before so many clears, counted over all boots, must not match."""

    @property
    def groups(self) -> int:
        return len(self.shard_bytes)

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a chunk, if hits may end at each of them."""
        return chunk_blocks(self.layouts, self.chunk_tokens)

    def keys_and_blocks(
        self, item: m.ReserveItem, width: int
    ) -> tuple[list[bytes], dict[bytes, list[bytes]]]:
        """The keys of an item, its tail's too, and the hashes of the blocks that each new row has,
        as far as they are told."""
        keys, count = split(item.digests, width), self.chunk_blocks
        hashes = split(item.blocks, width) if count else []
        if not hashes:
            return keys, {}
        each = [hashes[i : i + count] for i in range(0, len(hashes), count)]
        tail = [each[-1][-1]] if len(each[-1]) < count else []
        keys += tail
        return keys, dict(zip(keys[item.first :], each, strict=True))

    @property
    def full(self) -> list[int]:
        """The groups whose layers read the whole prompt."""
        return [g for g, one in enumerate(self.layouts) if one.kind == "full"]

    def begin(self, group: int, chunks: int, first: int) -> int:
        """The first chunk, from ``first`` on, that a hit of ``chunks`` needs of a group."""
        token = self.layouts[group].needs(chunks * self.chunk_tokens)
        return min(chunks, max(first, token // self.chunk_tokens))

    def longest(
        self,
        there: Callable[[int, bytes], bool],
        keys: list[bytes],
        first: int,
        spare: int = 0,
    ) -> int:
        """The longest hit, by brute force. ``there(group, key)``: whether that row can be read."""
        kinds = [one.kind for one in self.layouts]
        proof = {g for g in range(self.groups) if kinds[g] == "full"}
        proof = proof or {g for g in range(self.groups) if kinds[g] != "state"}
        for chunks in range(len(keys) - spare, first, -1):
            if all(
                there(g, key)
                for g in range(self.groups)
                for key in keys[self.begin(g, chunks, first) : chunks + spare * (g in proof)]
            ):
                return chunks
        return first

    def unexplained(
        self,
        item: m.ReserveItem,
        keys: list[bytes],
        held: Set[RowKey],
        sure: Set[RowKey],
        left: float,
        needless: Callable[[int, bytes], bool],
    ) -> bytes | None:
        """A key of ``item`` that was refused without a reason; None if there is none.

        There is none if ``held`` (which includes the item's own grant) has every row it asks for,
        up to a chunk that may need more than the ``left`` bytes; rows of windows may be missing
        where the chunk's full rows are not held. A row that is not ``sure`` may have been evicted.
        ``needless``: whether the key is a tail's whose blocks another row has.
        """
        for key in keys[item.first :]:
            asked = [g for g in range(self.groups) if item.groups >> g & 1]
            refused = [g for g in asked if (self, g, key) not in held and not needless(g, key)]
            if any(g not in refused and (self, g, key) not in sure for g in self.full):
                refused = [g for g in refused if g in self.full]
            if refused:
                unsure = [g for g in asked if (self, g, key) not in sure]
                fits = sum(sum(self.shard_bytes[g]) for g in unsure) <= left
                return key if fits else None
        return None


@dataclass(eq=False, slots=True)
class Instance:
    """An instance: its ranks' registrations and connections."""

    name: str
    first: m.Register
    generation: bytes = b""
    workers: dict[int, m.Register] = field(default_factory=dict)
    connections: dict[int, int] = field(default_factory=dict)
    namespace: Namespace | None = None


RowKey = tuple[Namespace, int, bytes]
"""(namespace, group, digest)."""


@dataclass(eq=False, slots=True)
class Reservation:
    """A reservation: which ranks may still write which pages."""

    boot: bytes
    id: int
    instance: Instance
    namespace: Namespace
    epoch: int
    clears: int
    deadline: float
    owing: set[int]
    rows: list[tuple[RowKey, Place]]
    bytes: int
    blocks: Blocks = field(default_factory=dict)
    """By key: the blocks of a row, as far as they were told. A tail has fewer than a chunk."""
    handed: bool = False
    failed: bool = False
    published: bool = False
    dirty: dict[int, float] = field(default_factory=dict)
    """By connection of a lost writer: until when its bytes may still arrive."""
    keys: dict[RowKey, int] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = {key: i for i, (key, _) in enumerate(self.rows)}

    def tag(self, key: RowKey, shard: int) -> Tag | None:
        """The tag that it left on the pages of a row's shard."""
        return self.boot, self.id, self.keys[key], shard

    def over(self, now: float) -> bool:
        """Whether nobody can write to its pages any more."""
        return not self.owing and all(now >= until for until in self.dirty.values())

    def holds(self, now: float) -> bool:
        """Whether it may still become READY, so that its keys are taken."""
        return bool(self.owing) and not self.failed and now < self.deadline

    def cancel(self) -> None:
        """Given back before any rank heard of it."""
        self.owing.clear()
        self.failed = True


@dataclass(eq=False, slots=True)
class LoadedRow:
    """A row that a tier was asked to load."""

    key: RowKey
    place: Place
    tags: list[Tag | None] | None = None
    """What the tier brought, by shard; None if the witness was not told."""
    passing: bool = False
    """The core may drop it as soon as nobody reads it."""
    lent: bool = False
    """Somebody has read it."""

    def tag(self, key: RowKey, shard: int) -> Tag | None:
        """The tag that the tier left on the pages of a shard."""
        return None if self.tags is None else self.tags[shard]


Source = Reservation | LoadedRow
"""Where the bytes of a READY row came from."""


@dataclass(eq=False, slots=True)
class TierLoading:
    """An open ``TierLoad``."""

    namespace: Namespace
    epoch: int
    bytes: int
    rows: list[LoadedRow]

    @property
    def current(self) -> bool:
        """Whether its namespace was not cleared since it began."""
        return self.epoch == self.namespace.epoch


@dataclass(eq=False, slots=True)
class Pending:
    """A request that is answered in a later step, and what was known when it was asked."""

    connection: int
    message: m.Request
    due: float = inf
    """The deadline of the answer."""
    sure_until: float = inf
    """Before this time the core does not give up waiting for tiers."""
    namespace: Namespace | None = None
    epoch: int = 0
    before: dict[RowKey, Source] = field(default_factory=dict)
    """The rows it asks for that were READY."""
    promised: set[RowKey] = field(default_factory=set)
    """The rows it asks for that a tier is sure to deliver."""
    spoiled: set[RowKey] = field(default_factory=set)
    """Rows that were written anew since: neither of the above counts."""
    awaits: set[int] = field(default_factory=set)
    """Of a clear: the tier operations it waits for."""
    failed: bool = False
    """Of a clear: whether one of them failed."""
    rows: int = 0
    """Of a clear: how many rows were READY ..."""
    sure_rows: int = 0
    """... and how many of those cannot have been evicted."""
    namespaces: list[tuple[Namespace, int]] = field(default_factory=list)
    """Of a clear: what it clears, with the number of clears so far."""


class Archive:
    """Outlives boots: all reservations, and how often each namespace was cleared."""

    def __init__(self) -> None:
        self.reservations: dict[tuple[bytes, int], Reservation] = {}
        self.clears = Counter[object]()
        self.floor: dict[object, int] = {}
        """By namespace: confirmed clears, which later boots must respect (``Namespace.floor``)."""


@dataclass(eq=False, slots=True)
class Lease:
    """A lease: which ranks may still read which pages."""

    id: int
    instance: Instance
    deadline: float
    owing: set[int]
    rows: list[tuple[RowKey, Source, Place]]
    handed: bool = False

    def live(self, now: float) -> bool:
        return bool(self.owing) and now < self.deadline


def split(digests: bytes, width: int) -> list[bytes]:
    """The chunk hashes of a blob."""
    return [digests[i : i + width] for i in range(0, len(digests), width)]


def pages(place: Place) -> Iterator[int]:
    """All pages of a row, over its shards."""
    for shard in place:
        yield from shard


def list_places(slots: Slots, shard_bytes: tuple[int, ...]) -> list[Place]:
    """The place of each row of ``slots``, decoded without numpy, as there are few rows."""
    sets = memoryview(slots.set_).cast("H")
    places: list[Place] = []
    for i, slot in enumerate(memoryview(slots.slot).cast("I")):
        extent = slots.extents[sets[i]]
        offsets = [extent[s] + slot * size for s, size in enumerate(shard_bytes)]
        if any(o % PAGE for o in offsets):
            raise BrokenLawError(f"a shard that is not page aligned: {offsets}")
        places.append(
            tuple(
                tuple(range(o // PAGE, (o + size) // PAGE))
                for o, size in zip(offsets, shard_bytes, strict=True)
            )
        )
    return places


def contradicts(msg: m.Register, instance: Instance) -> bool:
    """Whether a rank's registration contradicts those of its instance's other ranks."""
    ours = instance.first
    if (ours.identity, ours.chunk_tokens, ours.ranks, ours.world_size) != (
        msg.identity, msg.chunk_tokens, msg.ranks, msg.world_size,
    ):  # fmt: skip
        return True
    workers = {**instance.workers, msg.rank: msg}
    held = [(w.shard, w.layout) for w in workers.values() if w.layout is not None]
    layouts = dict(held)
    written = [w.shard for w in workers.values() if w.layout is not None and w.writer]
    shapes = {
        tuple((g.kind, g.window_tokens, g.block_tokens) for g in x.groups) for x in layouts.values()
    }
    whole = len(held) < msg.ranks or len(written) == msg.world_size
    return (
        len(shapes) > 1
        or any(layouts[shard] != layout for shard, layout in held)
        or len(set(written)) < len(written)
        or not whole
    )


def rows_of(
    namespace: Namespace,
    groups: Sequence[int],
    keys: Sequence[Sequence[bytes]],
    slots: tuple[Slots, ...],
) -> list[tuple[RowKey, Place]]:
    """The keys and places of the rows of a reply, group by group."""
    if len(slots) != len(groups):
        raise BrokenLawError(f"{len(groups)} groups, but slots {slots}")
    rows: list[tuple[RowKey, Place]] = []
    for g, wanted, s in zip(groups, keys, slots, strict=True):
        places = list_places(s, namespace.shard_bytes[g])
        if len(places) != len(wanted):
            raise BrokenLawError(f"{len(wanted)} rows of group {g}, but slots {s}")
        rows += [((namespace, g, key), place) for key, place in zip(wanted, places, strict=True)]
    return rows
