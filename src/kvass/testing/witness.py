"""Who holds what, told only from what passed between the clients and the core.

Law of this file: it never looks inside the machine. It reads the events that went in and the
effects that came out, keeps its own books, and raises ``BrokenLawError`` as soon as a reply
contradicts them. So a bug in the core's own books cannot hide behind its own ``validate()``.

The laws by number are those of docs/laws.md: 2 (ownership), 3 (writable slots), 4 (publishing),
5 (deadlines), 6 (pins), 11 (every request is answered), 12 (limits).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from kvass import messages as m
from kvass.core.effects import (
    Close,
    Effect,
    Event,
    Faulted,
    FromTier,
    HalfClose,
    Lost,
    Opened,
    ProcessEnded,
    Received,
    Send,
    Tick,
    ToSession,
    Watch,
)
from kvass.testing.books import (
    BrokenLawError,
    Fill,
    Member,
    Place,
    Reading,
    RowKey,
    Source,
    Space,
    check_named,
    contradicts,
    pages,
    rows_of,
    split,
)
from kvass.testing.doors import Doors
from kvass.testing.waiting_witness import Pending
from kvass.testing.write_witness import WriteWitness
from kvass.types import DEVICE_S, SCHEDULER, RankLayout


class Witness(WriteWitness):
    """Reads what passes between clients and core, and judges it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.doors = Doors(self.limits, self.timing.hello_s)

    # ------------------------------------------------------------ the one door

    def observe(self, event: Event, effects: list[Effect], now: float) -> None:
        """Check the answers to ``event`` and write down what follows from them."""
        self.now = now
        late = self.late_answers(effects)
        for i, one in late.items():
            if one.due <= now:  # before anything else happened
                self._answered(one, effects[i], now)
        prompt = [effect for i, effect in enumerate(effects) if i not in late]
        if isinstance(event, FromTier):
            self.tier_ended(event)
        if isinstance(event, Opened):
            self.open.add(event.session)
            self.doors.opened(event, effects, now)
        elif isinstance(event, Tick):
            self.doors.ticked(effects, now)
        if isinstance(event, Received) and event.session in self.open - self.deaf:
            self._received(event, prompt, now)
        elif (
            isinstance(event, Faulted)
            and event.session in self.open - self.deaf
            and not any(
                isinstance(e, Close | HalfClose) and e.session == event.session for e in effects
            )
        ):
            raise BrokenLawError("law 11: a malformed frame did not end its session")
        if isinstance(event, Lost):
            self._lost(event.session, now, event.exiting)
        if isinstance(event, ProcessEnded):
            self.stopped(event.session, now + min(DEVICE_S, self.timing.dma_grace_s))
        clear = self._clear_of(event)
        for i, effect in enumerate(effects):
            if isinstance(effect, Watch):
                self.watched(effect)
            elif not isinstance(effect, ToSession):
                self.tier_asked(effect, clear, now)
            elif i not in late:
                self._effect(event, effect, now)
            elif late[i].due > now:
                self._answered(late[i], effect, now)
        self.nobody_waits_too_long(now)

    def _clear_of(self, event: Event) -> Pending | None:
        """The clear that is ``event``, if it waits for tiers."""
        if isinstance(event, Received) and isinstance(event.message, m.Clear):
            return self.pending.get((event.session, event.message.seq))
        return None

    def _answered(self, one: Pending, effect: Effect, now: float) -> None:
        """A request of an earlier step is answered."""
        assert isinstance(effect, Send)
        asked, reply = one.message, effect.message
        if self.pending.pop((one.session, asked.seq), None) is not one:
            raise BrokenLawError(f"law 11: {asked} was answered again, or nobody waits: {reply}")
        if isinstance(asked, m.Clear):
            self.clear_answered(one, reply)
        elif isinstance(asked, m.Lookup) and isinstance(reply, m.Matched):
            self._on_lookup(one.session, asked, reply, now, one)
        elif isinstance(asked, m.Prefetch) and isinstance(reply, m.Prefetched):
            self._on_prefetch(one.session, asked, reply, now, one)
        else:
            raise BrokenLawError(f"law 11: {asked} was answered by {reply}")

    def _effect(self, event: Event, effect: ToSession, now: float) -> None:
        session = effect.session
        if session not in self.open:
            raise BrokenLawError(f"{effect} to a session that is gone")
        if isinstance(effect, Close | HalfClose):
            self._told_to_go(session)
        if isinstance(effect, Close):
            owed = [*self._owed(session, now)]
            if owed:
                raise BrokenLawError(f"law 3: closed session {session}, which still owes {owed}")
            self._lost(session, now)
        elif isinstance(effect, HalfClose):
            self.deaf.add(session)
        elif session in self.deaf:
            raise BrokenLawError("sent to a session after half-closing it")
        elif (
            session != getattr(event, "session", None)
            and not isinstance(effect.message, m.Populated)
            and not self.doors.may_end(session, event, effect.message)
        ):
            raise BrokenLawError(f"law 11: {effect.message} went to a session that did not ask")

    def _told_to_go(self, session: int) -> None:
        """Words of it may be lost: a scheduler may have handed over anything it was given."""
        self.forget(session)
        member, rank = self.roles.get(session, (None, 0))
        if member is not None and rank == SCHEDULER:
            for writing in self.writings.values():
                writing.handed = writing.handed or writing.member is member
            for reading in self.readings.values():
                reading.handed = reading.handed or reading.member is member
        elif member is not None and member.workers.pop(rank, None) is not None:
            member.space = None

    def _owed(self, session: int, now: float) -> Iterator[str]:
        member, rank = self.roles.get(session, (None, 0))
        for w in self.writings.values():
            if w.member is member and rank in w.owing:
                yield f"commit {w.id}"
        for r in self.readings.values():
            if r.member is member and rank in r.owing and r.live(now):
                yield f"release {r.id}"

    def _received(self, event: Received, effects: list[Effect], now: float) -> None:
        message = event.message
        mine = [e.message for e in effects if isinstance(e, Send) and e.session == event.session]
        replies = [r for r in mine if not isinstance(r, m.Populated)]
        errors = [r for r in replies if isinstance(r, m.Error)]
        if isinstance(message, m.OneWay):
            if len(replies) != len(errors) or len(errors) > 1:
                raise BrokenLawError(f"law 11: one-way {message} was answered by {replies}")
        elif not replies and isinstance(message, m.Lookup | m.Prefetch | m.Clear):
            self.wait(event.session, message, now)
            if isinstance(message, m.Clear):
                self._cleared(event.session, message)
            return
        elif len(replies) != 1 or (replies[0].seq != message.seq and not errors):
            raise BrokenLawError(f"law 11: {message} was answered by {replies}")
        boot = getattr(message, "boot", self.boot)
        if boot != self.boot and not errors:
            raise BrokenLawError(f"law 9: {message} of another boot was accepted")
        if errors:  # a refusal changes nothing: whatever it did change will contradict the books
            self._refused(message, errors[0])
            return
        handler = getattr(self, "_on_" + type(message).__name__.lower(), None)
        if handler is not None:
            handler(event.session, message, replies[0] if replies else None, now)

    def _refused(self, message: m.FromClient, error: m.Error) -> None:
        if isinstance(message, m.Register) and error.code == "contradiction":
            member = self.members.get(message.instance)
            if member is None or not contradicts(message, member):
                raise BrokenLawError(f"law 2: {message.rank} contradicts nothing, yet: {error}")

    # ------------------------------------------------------------ sessions

    def _on_hello(self, session: int, msg: m.Hello, reply: m.Welcome, now: float) -> None:
        self.doors.greeted(session)

    def _on_register(self, session: int, msg: m.Register, reply: m.Registered, now: float) -> None:
        if not (1 <= msg.ranks <= 128 and -1 <= msg.rank < msg.ranks):
            raise BrokenLawError(f"law 2: registered rank {msg.rank} of {msg.ranks}")
        member = self.members.setdefault(msg.instance, Member(msg.instance, msg))
        if member.sessions.get(msg.rank, session) != session:
            raise BrokenLawError(f"two live sessions of {msg.instance} rank {msg.rank}")
        member.sessions[msg.rank] = session
        self.roles[session] = (member, msg.rank)
        self.doors.registered(session)
        if msg.rank >= 0:
            member.workers[msg.rank] = msg
        elif msg.generation != member.generation:
            self._moves(member, msg.generation)
        missing = tuple(r for r in range(msg.ranks) if r not in member.workers)
        if bool(reply.namespace) == bool(missing):
            raise BrokenLawError(f"{msg.instance} lacks {missing}, yet was told {reply}")
        if missing:
            return
        member.space = self._space(member)
        if self.by_digest.setdefault(reply.namespace, member.space) is not member.space:
            raise BrokenLawError("law 10: two layouts or identities in one namespace")

    def _moves(self, member: Member, generation: bytes) -> None:
        """Its weights are others now. What it was writing may be of both, and what only it had is
        of no use to anybody."""
        for w in self.writings.values():
            w.failed = w.failed or (bool(w.owing) and w.member.name == member.name)
        left, member.space, member.generation = member.space, None, generation
        if (
            left is not None
            and left.private
            and all(x.space is not left for x in self.members.values())
        ):
            for row in [row for row in self.ready if row[0] is left]:
                del self.ready[row]

    def _space(self, member: Member) -> Space:
        first = member.first
        workers = [member.workers[r] for r in range(first.ranks)]
        shards: list[RankLayout] = [
            next(w.layout for w in workers if w.shard == s and w.layout is not None)
            for s in range(first.world_size)
        ]
        key: tuple[object, ...] = (
            tuple(sorted(first.identity.items())),
            first.chunk_tokens,
            tuple((w.shard, w.writer, w.layout) for w in workers),
        )
        if member.generation:
            key += (member.generation,)
        weights = tuple(
            tuple(layout.groups[g].shard_bytes(first.chunk_tokens) for layout in shards)
            for g in range(len(shards[0].groups))
        )
        private = bool(member.generation)
        made = Space(key, weights, shards[0].groups, first.chunk_tokens, private)
        made.floor = self.archive.floor.get(key, 0)
        return self.spaces.setdefault(key, made)

    def _lost(self, session: int, now: float, exiting: bool = False) -> None:
        self.open.discard(session)
        self.deaf.discard(session)
        self.doors.left(session)
        self.forget(session)
        member, rank = self.roles.pop(session, (None, 0))
        if member is None:
            return
        for w in self.writings.values():
            if w.member is member and rank == SCHEDULER and not w.handed:
                w.cancel()
            elif w.member is member and rank in w.owing:
                w.owing.discard(rank)
                w.failed = True
                w.dirty[session] = inf if exiting else now + self.timing.dma_grace_s
        for r in self.readings.values():
            if r.member is member and rank == SCHEDULER and not r.handed:
                r.owing.clear()
            elif r.member is member:
                r.owing.discard(rank)
        del member.sessions[rank]
        if member.workers.pop(rank, None) is not None:
            member.space = None  # incomplete: nothing may be asked until the rank is back
        if not member.sessions:
            del self.members[member.name]

    # ------------------------------------------------------------ reading

    def _on_lookup(
        self,
        session: int,
        msg: m.Lookup,
        reply: m.Matched,
        now: float,
        late: Pending | None = None,
    ) -> None:
        member, _ = self.roles[session]
        if msg.readers is not None:
            check_named(set(msg.readers), member)
        keys = split(msg.digests, msg.width)
        space = member.space
        hit = reply.chunks != msg.first
        if bool(reply.lease) != hit or (hit and space is None):
            raise BrokenLawError(f"a miss with a lease, or a hit without or too early: {reply}")
        if space is None:
            return
        asked = [
            keys[space.begin(g, reply.chunks, msg.first) : reply.chunks] if hit else []
            for g in range(space.groups)
        ]
        rows: list[tuple[RowKey, Source, Place]] = []
        for key, place in rows_of(space, range(space.groups), asked, reply.slots) if hit else ():
            source, at = self.ready.get(key, (None, None))
            if source is None or at != place:
                raise BrokenLawError(f"law 4: matched {key[1:]} at {place}, published was {at}")
            self.judge(key, source)
            rows.append((key, source, place))
        self._length(space, keys, msg.first, msg.spare, reply.chunks, now, late)
        if hit:
            self._lease(member, msg, reply, rows, keys[msg.first : reply.chunks], now)

    def _length(
        self,
        space: Space,
        keys: list[bytes],
        first: int,
        spare: int,
        chunks: int,
        now: float,
        late: Pending | None,
    ) -> None:
        """No longer than what is READY; where nothing is evicted, no shorter than that, and than
        what healthy tiers have."""
        most = space.longest(lambda g, k: (space, g, k) in self.ready, keys, first, spare)
        if chunks > most:
            raise BrokenLawError(f"{chunks} chunks are told, but {most} are READY")
        if self.roomy and (late is None or (late.space is space and late.epoch == space.epoch)):
            sure = self.sure(late, now) if late is not None else self._sure_of(space)
            least = space.longest(sure, keys, first, spare)
            if chunks < least:
                raise BrokenLawError(f"nothing was evicted, {least} chunks match, yet: {chunks}")

    def _sure_of(self, space: Space) -> Callable[[int, bytes], bool]:
        return lambda group, key: self.surely_ready((space, group, key))

    def _on_prefetch(
        self,
        session: int,
        msg: m.Prefetch,
        reply: m.Prefetched,
        now: float,
        late: Pending | None = None,
    ) -> None:
        space = self.space_of(session, msg) if late is None else late.space
        if space is not None:
            keys = split(msg.digests, msg.width)
            self._length(space, keys, 0, 0, reply.chunks, now, late)
        elif reply.chunks:
            raise BrokenLawError(f"a rank is missing, yet: {reply}")

    def _lease(
        self,
        member: Member,
        msg: m.Lookup,
        reply: m.Matched,
        rows: list[tuple[RowKey, Source, Place]],
        keys: list[bytes],
        now: float,
    ) -> None:
        if reply.lease <= 0 or reply.lease in self.readings or reply.boot != self.boot:
            raise BrokenLawError(f"law 2: lease id or boot of {reply}")
        if not now < reply.deadline_s <= now + self.timing.lease_s + 1e-6:
            raise BrokenLawError(f"law 5: deadline {reply.deadline_s} at {now}")
        readers = {0} if msg.readers is None else set(msg.readers)
        lease = Reading(
            reply.lease, member, reply.deadline_s, readers & member.sessions.keys(), rows, keys
        )
        self.readings[lease.id] = lease
        for _, source, place in rows:
            if isinstance(source, Fill):
                source.lent = True
            for page in pages(place):
                self.pinned.setdefault(page, []).append(lease)

    def _on_release(self, session: int, msg: m.Release, _: None, now: float) -> None:
        member, rank = self.roles[session]
        lease = self.readings.get(msg.lease)
        if lease is None or lease.member is not member:
            if lease is not None and lease.live(now):
                raise BrokenLawError(
                    f"law 2: {member.name} released a lease of {lease.member.name}"
                )
            return
        if rank != msg.rank or not lease.live(now):
            return
        if rank == SCHEDULER and not lease.handed:
            self._drop(lease, msg.bad)
            lease.owing.clear()
        elif rank in lease.owing:
            self._drop(lease, msg.bad)
            lease.owing.discard(rank)

    def _drop(self, lease: Reading, bad: tuple[int, ...]) -> None:
        left = Counter(key[1] for key, _, _ in lease.rows)
        for key, source, _ in lease.rows:
            at = len(lease.keys) - left[key[1]]  # a group's rows are those of the last chunks
            left[key[1]] -= 1
            if at in bad and self.ready.get(key, (None,))[0] is source:
                del self.ready[key]
                self.spoil(key)

    def _on_renew(self, session: int, msg: m.Renew, reply: m.Renewed, now: float) -> None:
        lease = self.readings.get(msg.lease)
        if lease is None or lease.member is not self.roles[session][0] or not lease.live(now):
            raise BrokenLawError(f"law 5: renewed lease {msg.lease}, which nobody there holds")
        if not lease.deadline <= reply.deadline_s <= now + self.timing.lease_s + 1e-6:
            raise BrokenLawError(f"law 5: renewed to {reply.deadline_s} at {now}")
        lease.deadline = reply.deadline_s

    # ------------------------------------------------------------ of both

    def _on_handedover(self, session: int, msg: m.HandedOver, _: None, now: float) -> None:
        member, rank = self.roles[session]
        if rank != SCHEDULER:
            raise BrokenLawError("a worker handed over")
        for book, ids in ((self.readings, msg.leases), (self.writings, msg.reservations)):
            for i in ids:
                held = book.get(i)
                if held is not None and held.member is member:
                    held.handed = True

    def _on_clear(self, session: int, msg: m.Clear, reply: m.Cleared, now: float) -> None:
        one = Pending(session, msg)
        self._cleared(session, msg, one)
        self.clear_answered(one, reply)

    def _cleared(self, session: int, msg: m.Clear, one: Pending | None = None) -> None:
        """From here on nothing of before matches; in later boots once it is confirmed."""
        one = one or self.pending[session, msg.seq]
        if msg.everything:
            spaces = list(self.spaces.values())
        elif msg.namespace:
            spaces = [s for s in [self.by_digest.get(msg.namespace)] if s is not None]
        else:
            own = self.roles[session][0].space
            spaces = [] if own is None else [own]
        gone = [key for key in self.ready if key[0] in spaces]
        one.rows = len(gone)
        one.sure_rows = sum(map(self.surely_ready, gone))
        for space in spaces:
            space.epoch += 1
            self.archive.clears[space.key] += 1
            # Of everything, a daemon knows what lives.
            if not msg.everything or any(x.space is space for x in self.members.values()):
                space.floor = self.archive.clears[space.key]
                one.spaces.append((space, space.floor))
        for digest, tier in list(self.told):
            if self.by_digest[digest] in spaces:
                del self.told[digest, tier]
        for key in gone:
            del self.ready[key]
