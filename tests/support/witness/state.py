"""What is known of one boot from the events and effects alone. The observers share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from kvass import messages as m
from kvass.core.effects import ToTier
from kvass.core.machine import CoreConfig
from kvass.types import PAGE
from tests.support.witness.records import (
    Archive,
    BrokenLawError,
    Instance,
    Lease,
    LoadedRow,
    Namespace,
    Pending,
    Place,
    Reservation,
    RowKey,
    Source,
    Tag,
    TierLoading,
    split,
)

WAITS = m.Lookup | m.Prefetch
"""What a promotion answers."""
Holds = Callable[[bytes, int, int, bytes, int], bool]
"""Whether tier ``[4]`` has the record (namespace, epoch, group, chunk hash)."""


def in_common(one: list[bytes], other: list[bytes]) -> int:
    """How many of their first blocks are the same."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


class ObservedState:
    """The state of one boot. In a ``roomy`` arena nothing is ever evicted: then misses are checked
    too. ``holds`` is given if the tiers never fail."""

    def __init__(
        self, config: CoreConfig, roomy: bool, archive: Archive | None, holds: Holds | None
    ) -> None:
        self.config = config
        self.roomy = roomy
        self.archive = archive or Archive()
        self.holds = holds
        self.tiers = [*range(len(config.tiers))]
        """The numbers of those that are used."""
        self.quota = config.arena_bytes * config.limits.instance_write_share
        self.now = 0.0
        """When the last event came."""
        self.behind = False
        """Whether the core has more to do now: it carries out what takes long in slices."""
        self.fetches = False
        """Whether anybody asked for a fetch of a session."""
        self.roles: dict[int, tuple[Instance, int]] = {}
        """Connection -> instance and rank."""
        self.instances: dict[str, Instance] = {}
        self.namespaces: dict[object, Namespace] = {}
        self.by_digest: dict[bytes, Namespace] = {}
        self.reservations: dict[int, Reservation] = {}
        self.leases: dict[int, Lease] = {}
        self.ready: dict[RowKey, tuple[Source, Place]] = {}
        self.needless: set[RowKey] = set()
        """Tails of ``ready`` that another row made needless: the core may have freed them."""
        self.pending: dict[tuple[int, int], Pending] = {}
        """(connection, seq) -> a request that is not answered yet."""
        self.ops: dict[int, ToTier] = {}
        """Open tier operations."""
        self.loads: dict[int, TierLoading] = {}
        self.stores: dict[int, list[tuple[RowKey, Source, Place]]] = {}
        self.epochs: dict[tuple[bytes, int], list[int]] = {}
        """(namespace, tier) -> the epochs that the tier told since the last clear."""
        # By page:
        self.writer: dict[int, Reservation] = {}
        self.readers: dict[int, list[Lease]] = {}
        self.loading: dict[int, int] = {}
        """The tier operation that may write to it."""
        self.storing: dict[int, set[int]] = {}
        """The tier operations that may read it."""
        self.row_on: dict[int, tuple[RowKey, Source]] = {}

    # ------------------------------------------------------------ questions

    def most_keys(self, namespace: Namespace) -> int:
        """So many chunks of a prompt are found and granted at most (law 12)."""
        return self.config.limits.keys_per_message // namespace.groups

    def asked_keys(self, namespace: Namespace, msg: m.Lookup | m.Prefetch) -> list[bytes]:
        """The chunks of a prompt that are looked for."""
        return split(msg.digests, msg.width)[: self.most_keys(namespace)]

    def open_reservations(self, instance: Instance) -> list[Reservation]:
        """The reservations of an instance that may still be written to."""
        mine = (w for w in self.reservations.values() if w.instance.name == instance.name)
        return [w for w in mine if not w.over(self.now)]

    def being_written(self) -> set[RowKey]:
        """Rows that a reservation may still make READY."""
        return {
            row
            for w in self.reservations.values()
            if w.epoch == w.namespace.epoch and w.holds(self.now)
            for row in w.keys
        }

    def being_loaded(self) -> set[RowKey]:
        """Rows that a tier may still make READY."""
        return {row.key for load in self.loads.values() if load.current for row in load.rows}

    def surely_ready(self, row: RowKey) -> bool:
        """Whether it is READY, unless it was evicted."""
        source = self.ready.get(row, (None,))[0]
        passing = isinstance(source, LoadedRow) and source.passing
        return source is not None and not passing and row not in self.needless

    def blocks_of(self, row: RowKey) -> list[bytes]:
        """The blocks that a READY row is known to have."""
        source = self.ready.get(row, (None,))[0]
        return source.blocks.get(row[2], []) if isinstance(source, Reservation) else []

    def is_tail(self, row: RowKey) -> bool:
        """Whether only the first blocks of a READY row were written."""
        return 0 < len(self.blocks_of(row)) < row[0].chunk_blocks

    def agreeing(self, namespace: Namespace, group: int, blocks: list[bytes]) -> int:
        """In how many of these first blocks of a chunk some row agrees that is surely READY."""
        rows = [r for r in self.ready if r[:2] == (namespace, group) and self.surely_ready(r)]
        return max((in_common(self.blocks_of(row), blocks) for row in rows), default=0)

    def namespace_of(self, connection: int, message: m.Lookup | m.Prefetch) -> Namespace | None:
        """The namespace that a request asks for."""
        if connection in self.roles:
            return self.roles[connection][0].namespace
        return self.by_digest.get(getattr(message, "namespace", b""))

    def holders(self, row: RowKey) -> Iterator[bool]:
        """For each tier whether it has the row, under its newest epoch. Needs ``holds``."""
        assert self.holds is not None
        digest = self.digest(row[0])
        for tier, told in enumerate(self.known_epochs(digest)):
            yield bool(told) and self.holds(digest, told[-1], *row[1:], tier)

    def digest(self, namespace: Namespace) -> bytes:
        """The daemon's name for a namespace."""
        return next(d for d, known in self.by_digest.items() if known is namespace)

    def known_epochs(self, digest: bytes) -> list[list[int]]:
        """The epochs that each tier told."""
        return [self.epochs.get((digest, tier), []) for tier in self.tiers]

    def expected(self, lease: int) -> dict[int, Tag | None]:
        """What the pages of a lease must hold."""
        return {
            page: source.tag(key, shard)
            for key, source, place in self.leases[lease].rows
            for shard, run in enumerate(place)
            for page in run
        }

    def busy(self, now: float) -> bool:
        """Whether anybody may still read or write any page."""
        return (
            bool(self.loads or self.stores)
            or any(not w.over(now) for w in self.reservations.values())
            or any(r.live(now) for r in self.leases.values())
        )

    # ------------------------------------------------------------ rows and pages change hands

    def replace(self, row: RowKey) -> None:
        """A row is written or loaded anew, so it must have been evicted."""
        sure, source = self.surely_ready(row), self.ready.pop(row, (None,))[0]
        self.needless.discard(row)
        if self.roomy and sure and source is not None:
            raise BrokenLawError(f"a READY row was given away: {row[1:]}")

    def claim(self, page: int) -> None:
        """A page is granted: nobody may be using it (laws 3 and 6)."""
        if not 0 <= page < self.config.arena_bytes // PAGE:
            raise BrokenLawError(f"page {page} lies outside the arena")
        before = self.writer.get(page)
        if before is not None and not before.over(self.now):
            raise BrokenLawError(f"law 3: page {page} may still be written by {before.id}")
        if page in self.loading:
            raise BrokenLawError(f"law 3: a tier may still write to page {page}")
        if any(r.live(self.now) for r in self.readers.pop(page, ())):
            raise BrokenLawError(f"law 6: page {page} is pinned, yet was granted")
        if self.storing.get(page):
            raise BrokenLawError(f"law 6: a tier may still read page {page}")
        row = self.row_on.pop(page, None)
        if row is not None and self.ready.get(row[0], (None,))[0] is row[1]:
            self.replace(row[0])

    def publish(self, row: RowKey, source: Source, place: Place) -> None:
        """A row becomes READY."""
        self.ready[row] = source, place
        self._make_needless(row)
        for page in (page for shard in place for page in shard):
            self.row_on[page] = row, source

    def _make_needless(self, row: RowKey) -> None:
        """Tails that have no block that another row has not."""
        mine, count = self.blocks_of(row), row[0].chunk_blocks
        self.needless.discard(row)
        for other in [o for o in self.ready if o[:2] == row[:2] and o != row and mine]:
            theirs = self.blocks_of(other)
            if theirs and len(theirs) < count and theirs == mine[: len(theirs)]:
                self.needless.add(other)
            elif len(mine) < count and theirs[: len(mine)] == mine and other not in self.needless:
                self.needless.add(row)

    def spoil(self, row: RowKey) -> None:
        """A row is written anew: pending requests no longer count on it."""
        for pending in self.pending.values():
            pending.spoiled.add(row)

    # ------------------------------------------------------------ bytes arrive

    def landing(self, reservation: int, page: int, now: float) -> None:
        """A worker's bytes arrive on ``page``: nobody else may have it (law 3)."""
        writer, whose = self.writer.get(page), f"bytes of reservation {reservation}"
        if writer is None or writer.id != reservation or writer.over(now):
            raise BrokenLawError(f"law 3: late {whose} hit page {page}")
        self.unread(page, whose, now)

    def unread(self, page: int, whose: str, now: float) -> None:
        """Nobody may be reading a page that is overwritten."""
        if any(r.live(now) for r in self.readers.get(page, ())):
            raise BrokenLawError(f"law 6: {whose} hit pinned page {page}")
        if self.storing.get(page):
            raise BrokenLawError(f"law 6: {whose} hit page {page}, which a tier reads")

    # ------------------------------------------------------------ the core's gauges

    def compare(self, status: dict[str, object]) -> None:
        """The core's gauges must be what its clients and tiers count (laws 2, 5, 7)."""
        if self.behind:
            return  # what has ended and was not carried out yet is still counted
        counted = {
            "leases": sum(r.live(self.now) for r in self.leases.values()),
            "reservations": sum(not w.over(self.now) for w in self.reservations.values()),
            "promotions": sum(isinstance(p.message, WAITS) for p in self.pending.values()),
            "rows_loading": sum(len(load.rows) for load in self.loads.values()),
        }
        ahead = any(isinstance(p.message, m.Prefetch) for p in self.pending.values())
        for name, count in counted.items():
            found = status[name]
            assert isinstance(found, int)
            if name == "rows_loading" and (ahead or self.fetches) and found > count:
                continue  # rows that are loaded ahead, which the tier is asked for in their turn
            if name == "promotions" and self.fetches and found > count:
                continue  # fetches of sessions, which nobody sees
            if found != count:
                raise BrokenLawError(f"law 2: {name} is {status[name]}, but {count} are open")

    def quiet(self, due: float | None, status: dict[str, object]) -> None:
        """Law 7, after all clients have gone: what is held ends within the grace, or with a process
        that exits; then nothing is left."""
        held = status["leases"] or status["reservations"]
        held = held or (status["promotions"] and not self.fetches)
        exiting = any(inf in w.dirty.values() for w in self.reservations.values())
        end = self.now + self.config.timing.lost_engine_grace_s
        if due is not None and held and not exiting and due > end:
            raise BrokenLawError(f"law 7: clients gone by {self.now}, yet {due} is waited for")
        for name in (
            "leases", "reservations", "pins", "rows_loading", "quarantined_bytes", "promotions",
            "l1_cleared_bytes",
        ):  # fmt: skip
            if due is None and status[name]:
                raise BrokenLawError(f"law 7: {name} is {status[name]} after quiescence")
