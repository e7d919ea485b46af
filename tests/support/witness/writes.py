"""What is granted, committed and given up, to a witness.

Law of this file: as ``witness``: events and effects only. A row is published when every rank that
owed a commit has given it in time, and by nothing else; what may still be written to is nobody's.
"""

from __future__ import annotations

from kvass import messages as m
from kvass.core.effects import Watch
from kvass.types import PAGE, SCHEDULER
from tests.support.witness.records import (
    BrokenLawError,
    Instance,
    Namespace,
    Place,
    Reservation,
    RowKey,
    check_writers,
    pages,
    rows_of,
    split,
)
from tests.support.witness.tiers import TierWitness


class WriteWitness(TierWitness):
    """The part of the witness that watches reservations."""

    def _on_reserve(self, session: int, msg: m.Reserve, reply: m.Granted, now: float) -> None:
        instance, _ = self.roles[session]
        if len(reply.grants) != len(msg.items):
            raise BrokenLawError("a grant list that is not parallel to its items")
        easy = self.roomy or not self.busy(now)
        for item, grant in zip(msg.items, reply.grants, strict=True):
            if not grant.chunks:
                continue
            if (
                instance.namespace is None
                or grant.reservation <= 0
                or grant.reservation in self.reservations
            ):
                raise BrokenLawError(f"law 2: {grant}")
            self._grant(instance, instance.namespace, msg.width, item, grant, reply.deadline_s, now)
        held = sum(w.bytes for w in self.open_reservations(instance))
        if held > self.quota:
            raise BrokenLawError(f"law 12: {instance.name} holds {held} of {self.quota} bytes")
        if easy and instance.namespace is not None:
            self._room(instance, instance.namespace, msg, reply)

    def watched(self, watch: Watch) -> None:
        """Its process is to be watched for as long as its bytes may still arrive."""
        waits = {
            w.dirty[watch.session] for w in self.reservations.values() if watch.session in w.dirty
        }
        if waits != {watch.until}:
            raise BrokenLawError(f"law 3: {watch}, but slots wait until {waits}")

    def stopped(self, session: int, until: float) -> None:
        """The process of a lost session has ended."""
        for w in self.reservations.values():
            if session in w.dirty:
                w.dirty[session] = min(w.dirty[session], until)

    def _grant(
        self,
        instance: Instance,
        namespace: Namespace,
        width: int,
        item: m.ReserveItem,
        grant: m.Grant,
        deadline: float,
        now: float,
    ) -> None:
        keys = split(item.digests, width)
        groups = [g for g in range(namespace.groups) if item.groups >> g & 1]
        if any(c < item.first or c >= len(keys) for c in grant.chunks):
            raise BrokenLawError(f"granted chunks nobody asked for: {grant}")
        which = grant.rows()
        if {c for each in which for c in each} != set(grant.chunks):
            raise BrokenLawError(f"chunks and rows that do not agree: {grant}")
        rows = rows_of(namespace, groups, [[keys[c] for c in each] for each in which], grant.slots)
        named = (
            set(item.writers)
            if item.writers is not None
            else {r for r, w in instance.workers.items() if w.writer}
        )
        check_writers(named, instance)
        weight = sum(sum(namespace.shard_bytes[key[1]]) for key, _ in rows)
        clears = self.archive.clears[namespace.key]
        writing = Reservation(
            self.boot, grant.reservation, instance, namespace, namespace.epoch, clears, deadline,
            named & instance.sessions.keys(), rows, weight,
        )  # fmt: skip
        self.archive.reservations[self.boot, writing.id] = writing
        writing.failed = named != writing.owing
        if len(writing.keys) != len(rows):
            raise BrokenLawError(f"one key twice in one grant: {grant}")
        for key, place in rows:
            self.replaced(key)
            self.spoil(key)
            self._hand_out(writing, key, place, now)
        self.reservations[writing.id] = writing

    def _hand_out(self, writing: Reservation, key: RowKey, place: Place, now: float) -> None:
        for other in self.reservations.values():
            if other.epoch == key[0].epoch and key in other.keys and other.holds(now):
                raise BrokenLawError(f"{key[1:]} is being written by {other.id} already")
        for filling in self.fillings.values():
            if filling.epoch == key[0].epoch and any(f.key == key for f in filling.fills):
                raise BrokenLawError(f"{key[1:]} is being loaded from a tier")
        for page in pages(place):
            if self.written.get(page) is writing:
                raise BrokenLawError(f"law 3: page {page} was granted twice")
            self.claim(page, now)
            self.written[page] = writing

    def _room(
        self, instance: Instance, namespace: Namespace, msg: m.Reserve, reply: m.Granted
    ) -> None:
        """Law 6: with nothing in the way, only the quota may refuse a key that nobody has."""
        now, mine = self.now, self.open_reservations(instance)
        held = sum(w.bytes for w in mine)
        taken = {
            key
            for w in self.reservations.values()
            if w.epoch == w.namespace.epoch and w.holds(now)
            for key in w.keys
        }
        taken |= {
            fill.key
            for one in self.fillings.values()
            if one.epoch == one.namespace.epoch
            for fill in one.fills
        }
        if len(mine) >= self.limits.reservations_per_instance:
            return
        chunk_bytes = sum(map(sum, namespace.shard_bytes))
        named = sum(len(item.digests) // msg.width for item in msg.items)
        if named * chunk_bytes > self.arena_pages * PAGE // 2:
            return  # of a prompt as large as L1 the beginning stays
        later = {k for g in reply.grants if g.reservation for k in self._keys_of(g)}
        taken |= later
        for item, grant in zip(msg.items, reply.grants, strict=True):
            if grant.reservation:
                later -= self._keys_of(grant)
            then = taken - later  # items are answered in order
            sure = then | {row for row in self.ready if self.roomy and self.surely_ready(row)}
            keys, left = split(item.digests, msg.width), self.quota - held
            refused = namespace.unexplained(item, keys, self.ready.keys() | then, sure, left)
            if refused is not None:
                raise BrokenLawError(f"law 6: {refused!r} of {item} was refused: why?")

    def _keys_of(self, grant: m.Grant) -> set[RowKey]:
        return set(self.reservations[grant.reservation].keys)

    def _on_commit(self, session: int, msg: m.Commit, _: None, now: float) -> None:
        instance, rank = self.roles[session]
        w = self.reservations.get(msg.reservation)
        if w is None or w.instance is not instance or rank != msg.rank or rank not in w.owing:
            return
        w.owing.discard(rank)
        w.failed = w.failed or now >= w.deadline or w.epoch != w.namespace.epoch
        if w.owing or w.failed:
            return
        w.published = True
        for key, place in w.rows:
            self.ready[key] = (w, place)
            for page in pages(place):
                self.on_page[page] = (key, w)

    def _on_abort(self, session: int, msg: m.Abort, _: None, now: float) -> None:
        instance, rank = self.roles[session]
        w = self.reservations.get(msg.reservation)
        if w is None or w.instance is not instance or rank != msg.rank:
            return
        if rank == SCHEDULER and not w.handed:
            w.cancel()
        elif rank in w.owing:
            w.owing.discard(rank)
            w.failed = True
