"""Observes lookups and leases: what is matched, read and given back."""

from __future__ import annotations

from kvass import messages as m
from kvass.types import SCHEDULER, Slots
from tests.support.witness.records import (
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
    list_places,
    pages,
    rows_of,
    split,
)
from tests.support.witness.state import ObservedState
from tests.support.witness.waiting import WaitingWitness


def without_last(slots: Slots) -> Slots:
    """All rows but the last."""
    return Slots(slots.extents, slots.set_[:-2], slots.slot[:-4])


class ReadWitness:
    """Checks every hit and every lease."""

    def __init__(self, state: ObservedState, waiting: WaitingWitness) -> None:
        self.state = state
        self.waiting = waiting

    def lookup(
        self, connection: int, msg: m.Lookup, reply: m.Matched, late: Pending | None = None
    ) -> None:
        """A ``Lookup`` was answered; ``late``: it was asked in an earlier step."""
        state = self.state
        instance, _ = state.roles[connection]
        readers = {0} if msg.readers is None else set(msg.readers)
        if not readers or not readers <= set(range(instance.first.ranks)):
            raise BrokenLawError(f"law 2: {readers} are not ranks of {instance.name}")
        namespace = instance.namespace
        hit = reply.chunks != msg.first or reply.blocks > 0
        if bool(reply.lease) != hit or (hit and namespace is None):
            raise BrokenLawError(f"a miss with a lease, or a hit without or too early: {reply}")
        if namespace is None:
            return
        keys = state.asked_keys(namespace, msg)
        asked = [
            keys[namespace.begin(g, reply.chunks, msg.first) : reply.chunks] if hit else []
            for g in range(namespace.groups)
        ]
        groups = range(namespace.groups)
        rows: list[tuple[RowKey, Source, Place]] = []
        whole = reply.slots if not reply.blocks else tuple(map(without_last, reply.slots))
        for key, place in rows_of(namespace, groups, asked, whole) if hit else ():
            source, at = state.ready.get(key, (None, None))
            if source is None or at != place:
                raise BrokenLawError(f"law 4: matched {key[1:]} at {place}, published was {at}")
            self._check_origin(key, source)
            rows.append((key, source, place))
        self._check_length(namespace, keys, msg.first, msg.spare, reply.chunks, late)
        if late is None and state.roomy:
            self.waiting.check_answered_at_once(namespace, msg, reply.chunks)
        rows += self._blocks(namespace, msg, reply, late)
        if hit:
            self._lease(instance, readers, reply, rows)

    def prefetch(
        self, connection: int, msg: m.Prefetch, reply: m.Prefetched, late: Pending | None = None
    ) -> None:
        """A ``Prefetch`` was answered; ``late``: it was asked in an earlier step."""
        namespace = self.state.namespace_of(connection, msg) if late is None else late.namespace
        if not msg.digests:
            self.waiting.prefetches_ended(connection, msg.request)
        elif namespace is not None:
            keys = self.state.asked_keys(namespace, msg)
            self._check_length(namespace, keys, msg.first, 0, reply.chunks, late)
        elif reply.chunks:
            raise BrokenLawError(f"a rank is missing, yet: {reply}")

    def _blocks(
        self, namespace: Namespace, msg: m.Lookup, reply: m.Matched, late: Pending | None
    ) -> list[tuple[RowKey, Source, Place]]:
        """The rows of which a hit uses the first blocks: each is READY and has them. If nothing is
        evicted, no row has more of what was asked for."""
        state, end = self.state, reply.chunks
        whole, looked_for = len(msg.digests) // msg.width, len(state.asked_keys(namespace, msg))
        blocks = split(msg.blocks if end == looked_for else msg.first_blocks, msg.width)
        there = end == whole == looked_for or end == msg.first < looked_for
        there = there and namespace.chunk_blocks > 0
        if reply.blocks > len(blocks) or (reply.blocks and (not there or msg.spare)):
            raise BrokenLawError(f"blocks that nobody asked for: {reply}")
        rows = []
        for group, slots in enumerate(reply.slots if reply.blocks else ()):
            place = list_places(slots, namespace.shard_bytes[group])[-1]
            key, source = state.row_on.get(place[0][0], (None, None))
            if key is None or source is None or state.ready.get(key) != (source, place):
                raise BrokenLawError(f"law 4: blocks matched at {place}, where nothing is READY")
            has = state.blocks_of(key)[: reply.blocks]
            if key[:2] != (namespace, group) or has != blocks[: reply.blocks]:
                raise BrokenLawError(f"law 4: matched blocks of {key[1:]}, which has {has}")
            rows.append((key, source, place))
        if state.roomy and late is None and there and not msg.spare:
            groups = range(namespace.groups)
            least = min(state.agreeing(namespace, group, blocks) for group in groups)
            if reply.blocks < least:
                raise BrokenLawError(f"nothing was evicted, {least} blocks match, yet: {reply}")
        return rows

    def _check_origin(self, row: RowKey, source: Source) -> None:
        """What a tier brought was written for this very row, whole, and not before a clear."""
        namespace, group, key = row
        if isinstance(source, Reservation) or source.tags is None:
            return
        for shard, tag in enumerate(source.tags):
            if tag is None:
                continue  # a shard without pages
            written = self.state.archive.reservations.get(tag[:2])
            if written is None or not written.published or tag[3] != shard:
                raise BrokenLawError(f"law 4: matched {row[1:]}, but shard {shard} holds {tag}")
            whose, of, what = written.rows[tag[2]][0]
            if (whose.key, of, what) != (namespace.key, group, key):
                raise BrokenLawError(f"law 4: matched {row[1:]}, but it holds {(of, what)}")
            if written.clears < namespace.floor:
                raise BrokenLawError(f"law 8: matched {row[1:]}, which was cleared: {tag}")

    def _check_length(
        self,
        namespace: Namespace,
        keys: list[bytes],
        first: int,
        spare: int,
        chunks: int,
        late: Pending | None,
    ) -> None:
        """A hit is no longer than what is READY. If nothing is evicted, it is no shorter than that,
        and than what healthy tiers have."""
        state = self.state
        most = namespace.longest(lambda g, k: (namespace, g, k) in state.ready, keys, first, spare)
        if chunks > most:
            raise BrokenLawError(f"{chunks} chunks are told, but {most} are READY")
        if not state.roomy:
            return
        if late is None:
            least = namespace.longest(
                lambda g, k: state.surely_ready((namespace, g, k)), keys, first, spare
            )
        elif late.namespace is namespace and late.epoch == namespace.epoch:
            least = namespace.longest(self.waiting.sure(late), keys, first, spare)
        else:
            return
        if chunks < least:
            raise BrokenLawError(f"nothing was evicted, {least} chunks match, yet: {chunks}")

    # ------------------------------------------------------------ leases

    def _lease(
        self,
        instance: Instance,
        readers: set[int],
        reply: m.Matched,
        rows: list[tuple[RowKey, Source, Place]],
    ) -> None:
        state = self.state
        if reply.lease <= 0 or reply.lease in state.leases or reply.boot != state.config.boot:
            raise BrokenLawError(f"law 2: lease id or boot of {reply}")
        now, lease_s = state.now, state.config.timing.lease_s
        if not now < reply.deadline_s <= now + lease_s + 1e-6:
            raise BrokenLawError(f"law 5: a lease until {reply.deadline_s} at {now}")
        owing = readers & instance.connections.keys()
        lease = Lease(reply.lease, instance, reply.deadline_s, owing, rows)
        state.leases[lease.id] = lease
        for _, source, place in rows:
            if isinstance(source, LoadedRow):
                source.lent = True
            for page in pages(place):
                state.readers.setdefault(page, []).append(lease)

    def release(self, connection: int, msg: m.Release) -> None:
        """A rank or the scheduler gives a lease back."""
        state = self.state
        instance, rank = state.roles[connection]
        lease = state.leases.get(msg.lease)
        if lease is None or not lease.live(state.now):
            return
        if lease.instance is not instance:
            whose = lease.instance.name
            raise BrokenLawError(f"law 2: {instance.name} released a lease of {whose}")
        if rank != msg.rank:
            return
        if rank == SCHEDULER and not lease.handed:
            lease.owing.clear()
        else:
            lease.owing.discard(rank)

    def lost(self, instance: Instance, rank: int) -> None:
        """A connection ended."""
        for lease in self.state.leases.values():
            if lease.instance is instance and rank == SCHEDULER and not lease.handed:
                lease.owing.clear()
            elif lease.instance is instance:
                lease.owing.discard(rank)
