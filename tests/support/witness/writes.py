"""Observes reservations: what is granted, committed and given up.

A row is published when every rank that owed a commit has sent it in time, and by nothing else. A
page that may still be written to belongs to nobody else.
"""

from __future__ import annotations

from kvass import messages as m
from kvass.core.effects import Watch
from kvass.types import SCHEDULER
from tests.support.witness.records import (
    BrokenLawError,
    Instance,
    Namespace,
    Reservation,
    RowKey,
    pages,
    rows_of,
)
from tests.support.witness.state import ObservedState


class WriteWitness:
    """Checks every reservation."""

    def __init__(self, state: ObservedState) -> None:
        self.state = state

    def reserve(self, connection: int, msg: m.Reserve, reply: m.Granted) -> None:
        """A ``Reserve`` was answered."""
        state = self.state
        instance, _ = state.roles[connection]
        if len(reply.grants) != len(msg.items):
            raise BrokenLawError("a grant list that is not parallel to its items")
        easy = state.roomy or not (state.busy(state.now) or state.config.quotas)
        for item, grant in zip(msg.items, reply.grants, strict=True):
            if grant.later != item.first or not item.digests:  # it was decided
                self._check_error(instance, item, grant, msg.width)
            if grant.chunks:
                self._grant(instance, msg.width, item, grant, reply.deadline_s)
        held = sum(w.bytes for w in state.open_reservations(instance))
        if held > state.quota:
            raise BrokenLawError(f"law 12: {instance.name} holds {held} of {state.quota} bytes")
        if easy and instance.namespace is not None:
            self._check_refusals(instance, instance.namespace, msg, reply)

    def _grant(
        self, instance: Instance, width: int, item: m.ReserveItem, grant: m.Grant, deadline: float
    ) -> None:
        state, namespace = self.state, instance.namespace
        if namespace is None or grant.reservation <= 0 or grant.reservation in state.reservations:
            raise BrokenLawError(f"law 2: {grant}")
        keys, blocks = namespace.keys_and_blocks(item, width)
        keys = keys[: state.most_keys(namespace)]
        groups = [g for g in range(namespace.groups) if item.groups >> g & 1]
        if any(c < item.first or c >= len(keys) for c in grant.chunks):
            raise BrokenLawError(f"granted chunks nobody asked for: {grant}")
        which = grant.rows()
        if {c for each in which for c in each} != set(grant.chunks):
            raise BrokenLawError(f"chunks and rows that do not agree: {grant}")
        rows = rows_of(namespace, groups, [[keys[c] for c in each] for each in which], grant.slots)
        writers = {r for r, w in instance.workers.items() if w.writer}
        if sorted(instance.workers[r].shard for r in writers) != [
            *range(instance.first.world_size)
        ]:
            raise BrokenLawError(f"law 4: {writers} write, of {instance.first.world_size} shards")
        granted = Reservation(
            boot=state.config.boot,
            id=grant.reservation,
            instance=instance,
            namespace=namespace,
            epoch=namespace.epoch,
            clears=state.archive.clears[namespace.key],
            deadline=deadline,
            owing=writers & instance.connections.keys(),
            rows=rows,
            bytes=sum(sum(namespace.shard_bytes[key[1]]) for key, _ in rows),
            blocks=blocks,
        )
        state.archive.reservations[granted.boot, granted.id] = granted
        granted.failed = writers != granted.owing
        if len(granted.keys) != len(rows):
            raise BrokenLawError(f"one key twice in one grant: {grant}")
        taken = state.being_written() | state.being_loaded()
        for key, place in rows:
            state.replace(key)
            state.spoil(key)
            if key in taken:
                raise BrokenLawError(f"{key[1:]} is being written or loaded already")
            for page in pages(place):
                if state.writer.get(page) is granted:
                    raise BrokenLawError(f"law 3: page {page} was granted twice")
                state.claim(page)
                state.writer[page] = granted
        state.reservations[granted.id] = granted

    def _check_error(
        self, instance: Instance, item: m.ReserveItem, grant: m.Grant, width: int
    ) -> None:
        """Law 11: an item that makes no sense is refused, no other is, and nothing is granted."""
        namespace, limits = instance.namespace, self.state.config.limits
        if namespace is None:
            return
        keys, rest = divmod(len(item.digests), width)
        blocks, more = divmod(len(item.blocks), width)
        sense = 0 < len(item.request) <= limits.request_id_bytes and not rest
        sense = sense and 0 <= item.first <= keys and 0 < item.groups < 1 << namespace.groups
        count, most = namespace.chunk_blocks, self.state.most_keys(namespace)
        if sense and item.blocks and count and item.first <= most:
            sense = not more and blocks <= limits.keys_per_message
            sense = sense and blocks // count == keys - item.first
        if sense != (not grant.error) or (grant.error and grant.reservation):
            raise BrokenLawError(f"law 11: {item} was answered with {grant}")

    def _check_refusals(
        self, instance: Instance, namespace: Namespace, msg: m.Reserve, reply: m.Granted
    ) -> None:
        """Law 6: with nothing in the way, only the quota may refuse a key that nobody has."""
        state, mine = self.state, self.state.open_reservations(instance)
        if state.behind or len(mine) >= state.config.limits.reservations_per_instance:
            return  # behind: what has ended and was not carried out yet is in the way
        chunk_bytes = sum(map(sum, namespace.shard_bytes))
        named = sum(len(item.digests) // msg.width for item in msg.items)
        if named * chunk_bytes > state.config.arena_bytes // 2:
            return  # of a prompt as large as the arena the beginning stays
        left = state.quota - sum(w.bytes for w in mine)
        later = {k for g in reply.grants if g.reservation for k in self._keys_of(g)}
        taken = state.being_written() | state.being_loaded() | later
        for item, grant in zip(msg.items, reply.grants, strict=True):
            if grant.error:
                continue
            if grant.reservation:
                later -= self._keys_of(grant)
            held = taken - later  # items are answered in order
            sure = held | {row for row in state.ready if state.roomy and state.surely_ready(row)}
            keys, blocks = namespace.keys_and_blocks(item, msg.width)
            keys = keys[: state.most_keys(namespace)]

            def needless(group: int, key: bytes, blocks: dict[bytes, list[bytes]] = blocks) -> bool:
                mine = blocks.get(key, [])
                rows = [r for r in state.ready if r[:2] == (namespace, group)]
                return 0 < len(mine) < namespace.chunk_blocks and any(
                    state.blocks_of(row)[: len(mine)] == mine for row in rows
                )

            refused = namespace.unexplained(
                item, keys, state.ready.keys() | held, sure, left, needless
            )
            if refused is not None:
                raise BrokenLawError(f"law 6: {refused!r} of {item} was refused: why?")

    def _keys_of(self, grant: m.Grant) -> set[RowKey]:
        return set(self.state.reservations[grant.reservation].keys)

    # ------------------------------------------------------------ the end of a reservation

    def commit(self, connection: int, msg: m.Commit) -> None:
        """A rank says that it has written its part."""
        instance, rank = self.state.roles[connection]
        w = self.state.reservations.get(msg.reservation)
        if w is None or w.instance is not instance or rank != msg.rank or rank not in w.owing:
            return
        w.owing.discard(rank)
        w.failed = w.failed or self.state.now >= w.deadline or w.epoch != w.namespace.epoch
        if w.owing or w.failed:
            return
        w.published = True
        for key, place in w.rows:
            self.state.publish(key, w, place)

    def abort(self, connection: int, msg: m.Abort) -> None:
        """A rank or the scheduler gives a reservation back."""
        instance, rank = self.state.roles[connection]
        w = self.state.reservations.get(msg.reservation)
        if w is None or w.instance is not instance or rank != msg.rank:
            return
        if rank == SCHEDULER and not w.handed:
            w.cancel()
        elif rank in w.owing:
            w.owing.discard(rank)
            w.failed = True

    def lost(self, connection: int, instance: Instance, rank: int, until: float) -> None:
        """A connection ended. Bytes of a lost writer may arrive until ``until``."""
        for w in self.state.reservations.values():
            if w.instance is instance and rank == SCHEDULER and not w.handed:
                w.cancel()
            elif w.instance is instance and rank in w.owing:
                w.owing.discard(rank)
                w.failed = True
                w.dirty[connection] = until

    def process_ended(self, connection: int, until: float) -> None:
        """The process of a lost connection has ended."""
        for w in self.state.reservations.values():
            if connection in w.dirty:
                w.dirty[connection] = min(w.dirty[connection], until)

    def watched(self, watch: Watch) -> None:
        """The core watches a lost process for as long as its bytes may still arrive."""
        reservations = self.state.reservations.values()
        waits = {w.dirty[watch.connection] for w in reservations if watch.connection in w.dirty}
        if waits != {watch.until} and not self.state.behind:
            raise BrokenLawError(f"law 3: {watch}, but slots wait until {waits}")
