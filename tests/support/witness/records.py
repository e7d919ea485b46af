"""What a witness writes down: namespaces, instances, reservations and leases as clients see them.

Law of this file: records and arithmetic on them; who judges is ``witness``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from math import inf

from kvass import messages as m
from kvass.types import PAGE, GroupLayout, Limits, Slots, Timing

Place = tuple[tuple[int, ...], ...]
"""The pages of one row, per shard."""

Tag = tuple[bytes, int, int, int]
"""What a writer leaves on each page of a shard: (boot, reservation, row within it, shard)."""


class BrokenLawError(AssertionError):
    """The core did something that no client could have explained."""


@dataclass(eq=False, slots=True)
class Namespace:
    """One namespace: what its rows weigh, and how often it was cleared."""

    key: object
    shard_bytes: tuple[tuple[int, ...], ...]  # [group][shard]
    layouts: tuple[GroupLayout, ...]
    chunk_tokens: int
    private: bool = False
    """Of one engine's generation."""
    epoch: int = 0
    floor: int = 0
    """What was written before so many clears, of all boots, must not match."""

    @property
    def groups(self) -> int:
        return len(self.shard_bytes)

    @property
    def full(self) -> list[int]:
        """The groups that need the whole prompt."""
        return [g for g, one in enumerate(self.layouts) if one.kind == "full"]

    def begin(self, group: int, chunks: int, first: int) -> int:
        """The first chunk that a hit of ``chunks`` needs of a group, beyond ``first``."""
        token = self.layouts[group].needs(chunks * self.chunk_tokens)
        return min(chunks, max(first, token // self.chunk_tokens))

    def longest(
        self,
        there: Callable[[int, bytes], bool],
        keys: list[bytes],
        first: int,
        spare: int = 0,
    ) -> int:
        """By brute force: the longest hit, if ``there(group, key)`` says what can be read."""
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
    ) -> bytes | None:
        """A key of ``item`` that was refused for no reason.

        None: ``held`` has every row it asks for, its own grant included, up to a chunk that may
        take more than the ``left`` bytes, but for windows of chunks whose full rows nobody holds.
        What is not ``sure`` may have been evicted.
        """
        for key in keys[item.first :]:
            asked = [g for g in range(self.groups) if item.groups >> g & 1]
            refused = [g for g in asked if (self, g, key) not in held]
            if any(g not in refused and (self, g, key) not in sure for g in self.full):
                refused = [g for g in refused if g in self.full]
            if refused:
                unsure = [g for g in asked if (self, g, key) not in sure]
                fits = sum(sum(self.shard_bytes[g]) for g in unsure) <= left
                return key if fits else None
        return None


@dataclass(eq=False, slots=True)
class Instance:
    """An instance: what its ranks said, and which sessions they have."""

    name: str
    first: m.Register
    generation: bytes = b""
    workers: dict[int, m.Register] = field(default_factory=dict)
    sessions: dict[int, int] = field(default_factory=dict)
    namespace: Namespace | None = None


RowKey = tuple[Namespace, int, bytes]
"""(namespace, group, digest)."""


@dataclass(eq=False, slots=True)
class Reservation:
    """One reservation: which ranks may still write which pages."""

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
    handed: bool = False
    failed: bool = False
    published: bool = False
    dirty: dict[int, float] = field(default_factory=dict)
    """Of writers that were lost, by session: until when their bytes may still arrive."""
    keys: dict[RowKey, int] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = {key: i for i, (key, _) in enumerate(self.rows)}

    def tag(self, key: RowKey, shard: int) -> Tag | None:
        """What it left on the pages of a row's shard."""
        return self.boot, self.id, self.keys[key], shard

    def over(self, now: float) -> bool:
        """Nobody can write to its pages any more."""
        return not self.owing and all(now >= until for until in self.dirty.values())

    def holds(self, now: float) -> bool:
        """It may still become READY, so its keys are taken."""
        return bool(self.owing) and not self.failed and now < self.deadline

    def cancel(self) -> None:
        """Given back before any rank heard of it."""
        self.owing.clear()
        self.failed = True


@dataclass(eq=False, slots=True)
class Fill:
    """One row that a tier was asked for; ``tags``: what it then brought, shard by shard, if the
    books were told."""

    key: RowKey
    place: Place
    tags: list[Tag | None] | None = None
    passing: bool = False
    """It goes as soon as nobody reads it any more."""
    lent: bool = False

    def tag(self, key: RowKey, shard: int) -> Tag | None:
        """What the tier left on the pages of its shard."""
        return None if self.tags is None else self.tags[shard]


Source = Reservation | Fill
"""Where a READY row's bytes are from."""


class Archive:
    """What outlives boots: who wrote what, and how often each namespace was cleared."""

    def __init__(self) -> None:
        self.reservations: dict[tuple[bytes, int], Reservation] = {}
        self.clears = Counter[object]()
        self.floor: dict[object, int] = {}
        """Clears that were confirmed: the floor of boots to come."""


@dataclass(eq=False, slots=True)
class Lease:
    """One lease: which ranks may still read which pages."""

    id: int
    instance: Instance
    deadline: float
    owing: set[int]
    rows: list[tuple[RowKey, Source, Place]]
    keys: list[bytes]
    """Of its chunks, from the first one that was asked for."""
    handed: bool = False

    def live(self, now: float) -> bool:
        return bool(self.owing) and now < self.deadline


class ObservedState:
    """One boot's. In a ``roomy`` arena nothing is ever evicted: then misses are laws too."""

    def __init__(
        self,
        boot: bytes,
        arena_bytes: int,
        timing: Timing,
        limits: Limits,
        roomy: bool = False,
        archive: Archive | None = None,
    ) -> None:
        self.boot = boot
        self.archive = archive or Archive()
        self.arena_pages = arena_bytes // PAGE
        self.quota = arena_bytes * limits.instance_write_share
        self.timing = timing
        self.limits = limits
        self.roomy = roomy
        self.now = 0.0
        self.open: set[int] = set()
        self.deaf: set[int] = set()
        self.roles: dict[int, tuple[Instance, int]] = {}
        self.instances: dict[str, Instance] = {}
        self.namespaces: dict[object, Namespace] = {}
        self.by_digest: dict[bytes, Namespace] = {}
        self.reservations: dict[int, Reservation] = {}
        self.leases: dict[int, Lease] = {}
        self.written: dict[int, Reservation] = {}
        self.pinned: dict[int, list[Lease]] = {}
        self.ready: dict[RowKey, tuple[Source, Place]] = {}
        self.on_page: dict[int, tuple[RowKey, Source]] = {}

    def live(self, instance: Instance) -> list[Lease]:
        mine = (r for r in self.leases.values() if r.instance.name == instance.name)
        return [r for r in mine if r.live(self.now)]

    def open_reservations(self, instance: Instance) -> list[Reservation]:
        mine = (w for w in self.reservations.values() if w.instance.name == instance.name)
        return [w for w in mine if not w.over(self.now)]

    def compare(self, status: dict[str, object]) -> None:
        """The core's public gauges must be what its clients would count (laws 2, 5, 7)."""
        leases = sum(r.live(self.now) for r in self.leases.values())
        reservations = sum(not w.over(self.now) for w in self.reservations.values())
        if (status["leases"], status["reservations"]) != (leases, reservations):
            told = f"{status['leases']} leases and {status['reservations']} reservations"
            raise BrokenLawError(f"law 2: {told}, but {leases} and {reservations} are open")

    def quiet(self, due: float | None, status: dict[str, object]) -> None:
        """Law 7, clients gone: what is left ends within the grace or with a process that exits,
        then nothing is left."""
        held = status["leases"] or status["reservations"] or status["promotions"]
        exiting = any(inf in w.dirty.values() for w in self.reservations.values())
        if due is not None and held and not exiting and due > self.now + self.timing.dma_grace_s:
            raise BrokenLawError(f"law 7: clients gone by {self.now}, yet {due} is waited for")
        for name in (
            "leases", "reservations", "pins", "rows_loading", "quarantined_bytes", "promotions",
            "l1_cleared_bytes",
        ):  # fmt: skip
            if due is None and status[name]:
                raise BrokenLawError(f"law 7: {name} is {status[name]} after quiescence")

    def expected(self, lease: int) -> dict[int, Tag | None]:
        """What the pages of a lease must hold."""
        return {
            page: source.tag(key, shard)
            for key, source, place in self.leases[lease].rows
            for shard, run in enumerate(place)
            for page in run
        }

    def landing(self, reservation: int, page: int, now: float) -> None:
        """A worker's bytes arrive on ``page`` at this instant: nobody else may have it (law 3)."""
        writing, whose = self.written.get(page), f"bytes of reservation {reservation}"
        if writing is None or writing.id != reservation or writing.over(now):
            raise BrokenLawError(f"law 3: late {whose} hit page {page}")
        self.unread(page, whose, now)

    def unread(self, page: int, whose: str, now: float) -> None:
        """Nobody may be reading what ``whose`` is to overwrite."""
        if any(r.live(now) for r in self.pinned.get(page, ())):
            raise BrokenLawError(f"law 6: {whose} hit pinned page {page}")

    def busy(self, now: float) -> bool:
        """Whether anybody may still read or write any slot."""
        return any(not w.over(now) for w in self.reservations.values()) or any(
            r.live(now) for r in self.leases.values()
        )


def split(digests: bytes, width: int) -> list[bytes]:
    """The chunk hashes of a blob."""
    return [digests[i : i + width] for i in range(0, len(digests), width)]


def pages(place: Place) -> Iterator[int]:
    """All pages of a row, over its shards."""
    for shard in place:
        yield from shard


def list_places(slots: Slots, shard_bytes: tuple[int, ...]) -> list[Place]:
    """Where each row of ``slots`` lies, decoded as ``types.Slots`` says (few rows: no numpy)."""
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


def check_named(ranks: set[int], instance: Instance) -> None:
    if not ranks or not ranks <= set(range(instance.first.ranks)):
        raise BrokenLawError(f"law 2: {ranks} are not ranks of {instance.name}")


def check_writers(ranks: set[int], instance: Instance) -> None:
    """Each shard is written by exactly one of ``ranks``."""
    check_named(ranks, instance)
    if sorted(instance.workers[r].shard for r in ranks) != [*range(instance.first.world_size)]:
        raise BrokenLawError(f"law 4: {ranks} write, of {instance.first.world_size} shards")


def contradicts(msg: m.Register, instance: Instance) -> bool:
    """Whether a rank's words do not go with those of its instance's other ranks."""
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
    """Group by group, the keys of its rows and where the reply says they lie."""
    if len(slots) != len(groups):
        raise BrokenLawError(f"{len(groups)} groups, but slots {slots}")
    rows: list[tuple[RowKey, Place]] = []
    for g, of, s in zip(groups, keys, slots, strict=True):
        places = list_places(s, namespace.shard_bytes[g])
        if len(places) != len(of):
            raise BrokenLawError(f"{len(of)} rows of group {g}, but slots {s}")
        rows += [((namespace, g, key), place) for key, place in zip(of, places, strict=True)]
    return rows
