"""The witness: checks the core by what passes between it and its clients and tiers.

It never looks inside the core. It reads the events that went in and the effects that came out,
keeps records of its own, and raises ``BrokenLawError`` as soon as an effect contradicts them. So a
bug in the core's own bookkeeping cannot hide behind the core's ``validate()``.

Each subject has an observer; they share one ``ObservedState``. The numbers of laws are those of
``docs/laws.md``: 2 (ownership), 3 (writable slots), 4 (publishing), 5 (deadlines), 6 (pins), 11
(every request is answered), 12 (limits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final

from kvass import messages as m
from kvass.core import effects as fx
from kvass.core.machine import CoreConfig
from kvass.types import DEVICE_S, SCHEDULER
from tests.support.witness.connections import ConnectionWitness
from tests.support.witness.instances import InstanceWitness
from tests.support.witness.reads import ReadWitness
from tests.support.witness.records import (
    Archive,
    BrokenLawError,
    Lease,
    LoadedRow,
    Pending,
    Reservation,
)
from tests.support.witness.state import Holds, ObservedState
from tests.support.witness.tiers import TierWitness
from tests.support.witness.waiting import WaitingWitness
from tests.support.witness.writes import WriteWitness

WAITING: Final = m.Lookup | m.Prefetch | m.Clear | m.Present | m.AskSession
"""What may be answered in a later step."""
PRESENCE: Final = {(m.Present, m.Presence), (m.AskSession, m.SessionIs)}
"""Questions where rows are, and their answers."""


def asks_to_fetch(message: m.AnyMessage) -> bool:
    """Whether its session comes back, so that the core fetches its rows by itself."""
    items = message.items if isinstance(message, m.Reserve) else [message]
    return any(getattr(getattr(i, "context", i), "then_s", 0.0) > 0 for i in items)


class Witness:
    """Observes one boot. Arguments as for ``ObservedState``."""

    def __init__(
        self,
        config: CoreConfig,
        roomy: bool,
        archive: Archive | None = None,
        holds: Holds | None = None,
    ) -> None:
        state = self.state = ObservedState(config, roomy, archive, holds)
        self.connections = ConnectionWitness(config.limits, config.timing.hello_s)
        self.instances = InstanceWitness(state)
        self.writes = WriteWitness(state)
        self.waiting = WaitingWitness(state)
        self.reads = ReadWitness(state, self.waiting)
        self.tiers = TierWitness(state)
        self._answered: dict[type[m.FromClient], Callable[[int, Any, Any], None]] = {
            m.Hello: self.connections.greeted,
            m.Register: self._registered,
            m.Reserve: self.writes.reserve,
            m.Lookup: self.reads.lookup,
            m.Prefetch: self.reads.prefetch,
            m.Clear: self._clear,
        }
        self._said: dict[type[m.AnyMessage], Callable[[int, Any], None]] = {
            m.Commit: self.writes.commit,
            m.Abort: self.writes.abort,
            m.Release: self.reads.release,
            m.HandedOver: self._handed_over,
            m.Drained: lambda *_: None,
            m.LookupNotes: lambda *_: None,
            m.ShadowReport: lambda *_: None,
        }

    def observe(
        self, event: fx.Event, effects: list[fx.Effect], now: float, due: float | None
    ) -> None:
        """Check the effects of ``event``, and note what follows from them. ``due``: when the core
        wants its next tick."""
        state = self.state
        state.now, state.behind = now, due is not None and due <= now
        late = self.waiting.late_answers(effects)
        for i, one in late.items():
            if one.due <= now:  # before anything else happened
                self._late_answer(one, effects[i])
        prompt = [effect for i, effect in enumerate(effects) if i not in late]
        if isinstance(event, fx.FromTier):
            self.tiers.ended(event)
        elif isinstance(event, fx.TiersAre):
            self.tiers.changed(event)
        if isinstance(event, fx.Opened):
            self.connections.opened(event, effects, now)
        elif isinstance(event, fx.Tick):
            self.connections.ticked(effects, now, state.behind)
        elif isinstance(event, fx.Received) and self.connections.listens(event.connection):
            self._received(event, prompt)
        elif isinstance(event, fx.Faulted) and self.connections.listens(event.connection):
            ends = (e for e in effects if isinstance(e, fx.Close | fx.HalfClose))
            if event.connection not in {e.connection for e in ends}:
                raise BrokenLawError("law 11: a malformed frame did not end its connection")
        elif isinstance(event, fx.Lost):
            self._lost(event.connection, event.exiting)
        elif isinstance(event, fx.ProcessEnded):
            until = now + min(DEVICE_S, state.config.timing.lost_engine_grace_s)
            self.writes.process_ended(event.connection, until)
        clear = None
        if isinstance(event, fx.Received) and isinstance(event.message, m.Clear):
            clear = state.pending.get((event.connection, event.message.seq))
        elif isinstance(event, fx.Tick):  # one of everything goes on, namespace by namespace
            clears = (p for p in state.pending.values() if isinstance(p.message, m.Clear))
            clear = next((p for p in clears if getattr(p.message, "everything", False)), None)
        for i, effect in enumerate(effects):
            if isinstance(effect, fx.Watch):
                self.writes.watched(effect)
            elif isinstance(effect, fx.ToTier):
                self.tiers.began(effect, clear)
            elif i not in late:
                self._to_connection(event, effect)
            elif late[i].due > now:
                self._late_answer(late[i], effect)
        self.waiting.check_overdue()

    # ------------------------------------------------------------ messages

    def _received(self, event: fx.Received, effects: list[fx.Effect]) -> None:
        connection, message = event.connection, event.message
        self.state.fetches |= isinstance(message, m.AskSession) or asks_to_fetch(message)
        mine = [e.message for e in effects if isinstance(e, fx.Send) and e.connection == connection]
        replies = [r for r in mine if not isinstance(r, m.Populated | m.Promoting)]
        self._check_promoting(connection, message, mine, waits=not replies)
        errors = [r for r in replies if isinstance(r, m.Error)]
        if isinstance(message, m.OneWay):
            if len(replies) != len(errors) or len(errors) > 1:
                raise BrokenLawError(f"law 11: one-way {message} was answered by {replies}")
        elif not replies and isinstance(message, WAITING):
            one = self.waiting.begin(connection, message)
            if isinstance(message, m.Clear):
                self.waiting.cleared(one)
            return
        elif len(replies) != 1 or (replies[0].seq != message.seq and not errors):
            raise BrokenLawError(f"law 11: {message} was answered by {replies}")
        boot = self.state.config.boot
        if getattr(message, "boot", boot) != boot and not errors:
            raise BrokenLawError(f"law 9: {message} of another boot was accepted")
        if errors:  # a refusal changes nothing: a change would contradict the records later
            if isinstance(message, m.Register):
                self.instances.refused(message, errors[0])
        elif isinstance(message, m.OneWay):
            self._said[type(message)](connection, message)
        elif type(message) in self._answered:
            self._answered[type(message)](connection, message, replies[0])

    def _check_promoting(
        self, connection: int, message: m.AnyMessage, told: list[m.FromDaemon], waits: bool
    ) -> None:
        """An asker hears, once, that tiers or writers are at work on what waits for them."""
        due = isinstance(message, m.Lookup | m.Prefetch | m.Present | m.AskSession)
        seqs = [r.seq for r in told if isinstance(r, m.Promoting)]
        if seqs != [message.seq] * len(seqs) or not (due and waits) <= len(seqs) <= due:
            raise BrokenLawError(f"law 11: Promoting went to {seqs}, asked was {message}")

    def _registered(self, connection: int, msg: m.Register, reply: m.Registered) -> None:
        self.connections.registered(connection)
        self.instances.register(connection, msg, reply)

    def _late_answer(self, one: Pending, effect: fx.Effect) -> None:
        """A request of an earlier step is answered."""
        assert isinstance(effect, fx.Send)
        asked, reply = one.message, effect.message
        if self.state.pending.pop((one.connection, asked.seq), None) is not one:
            raise BrokenLawError(f"law 11: {asked} was answered again, or nobody waits: {reply}")
        if isinstance(asked, m.Clear):
            self.waiting.clear_answered(one, reply)
        elif isinstance(asked, m.Lookup) and isinstance(reply, m.Matched):
            self.reads.lookup(one.connection, asked, reply, one)
        elif isinstance(asked, m.Prefetch) and isinstance(reply, m.Prefetched):
            self.reads.prefetch(one.connection, asked, reply, one)
        elif (type(asked), type(reply)) not in PRESENCE:
            raise BrokenLawError(f"law 11: {asked} was answered by {reply}")

    def _clear(self, connection: int, msg: m.Clear, reply: m.Cleared) -> None:
        """A clear was answered at once."""
        one = Pending(connection, msg)
        self.waiting.cleared(one)
        self.waiting.clear_answered(one, reply)

    def _handed_over(self, connection: int, msg: m.HandedOver) -> None:
        instance, rank = self.state.roles[connection]
        if rank != SCHEDULER:
            raise BrokenLawError("a worker handed over")
        for held in (
            *(self.state.leases.get(i) for i in msg.leases),
            *(self.state.reservations.get(i) for i in msg.reservations),
        ):
            if held is not None and held.instance is instance:
                held.handed = True

    # ------------------------------------------------------------ connections

    def _to_connection(self, event: fx.Event, effect: fx.ToConnection) -> None:
        connection = effect.connection
        if connection not in self.connections.connections:
            raise BrokenLawError(f"{effect} to a connection that is gone")
        if isinstance(effect, fx.Close | fx.HalfClose):
            self._told_to_go(connection)
        if isinstance(effect, fx.Close):
            if owed := [*self._owed(connection)]:
                raise BrokenLawError(
                    f"law 3: closed connection {connection}, which still owes {owed}"
                )
            self._lost(connection)
        elif isinstance(effect, fx.HalfClose):
            self.connections.connections[connection].half_closed = True
        elif not self.connections.listens(connection):
            raise BrokenLawError("sent to a connection after half-closing it")
        elif (
            connection != getattr(event, "connection", None)
            and not isinstance(effect.message, m.Populated)
            and not self.connections.may_end(connection, event, effect.message)
        ):
            raise BrokenLawError(f"law 11: {effect.message} went to a connection that did not ask")

    def _told_to_go(self, connection: int) -> None:
        """Its last messages may be lost: a scheduler may have handed over all that it was given."""
        self.waiting.forget(connection)
        instance, rank = self.state.roles.get(connection, (None, 0))
        if instance is not None and rank == SCHEDULER:
            open_ones: list[Reservation | Lease] = [*self.state.reservations.values()]
            for held in (*open_ones, *self.state.leases.values()):
                held.handed = held.handed or held.instance is instance
        elif instance is not None:
            self.instances.without(instance, rank)

    def _owed(self, connection: int) -> Iterator[str]:
        instance, rank = self.state.roles.get(connection, (None, 0))
        for w in self.state.reservations.values():
            if w.instance is instance and rank in w.owing:
                yield f"commit {w.id}"
        for r in self.state.leases.values():
            if r.instance is instance and rank in r.owing and r.live(self.state.now):
                yield f"release {r.id}"

    def _lost(self, connection: int, exiting: bool = False) -> None:
        self.connections.left(connection)
        self.waiting.forget(connection)
        instance, rank = self.state.roles.pop(connection, (None, 0))
        if instance is not None:
            grace_s = self.state.config.timing.lost_engine_grace_s
            self.writes.lost(
                connection, instance, rank, inf if exiting else self.state.now + grace_s
            )
            self.reads.lost(instance, rank)
            self.instances.lost(instance, rank)

    # ------------------------------------------------------------ the end

    def settled(self, status: dict[str, Any], write_through: bool) -> None:
        """All clients and tiers are idle: the rows that must stay are READY, and no others."""
        state = self.state
        sources = [source for source, _ in state.ready.values()]
        stay = sum(not (isinstance(s, LoadedRow) and s.passing and s.lent) for s in sources)
        least = sum(map(state.surely_ready, state.ready)) if state.roomy else 0
        if not least <= status["rows"] <= stay:
            raise BrokenLawError(f"{status['rows']} rows are READY, not {least} to {stay}")
        lost = [tier for tier in status["tiers"] if not tier["place"]]
        if any(tier["flush_queue_rows"] for tier in lost):
            raise BrokenLawError(f"law 7: rows are queued for tiers that were removed: {lost}")
        if state.holds is None:
            return
        if any(tier["flush_queue_rows"] for tier in status["tiers"]):
            raise BrokenLawError(f"rows are queued for tiers that are idle: {status['tiers']}")
        if state.roomy and write_through and not self.tiers.emptied:
            self._check_flushed()

    def _check_flushed(self) -> None:
        """Every READY row is in every tier, or if a tier brought it, in one."""
        for row, (source, _) in self.state.ready.items():
            if not row[0].private and not self.state.is_tail(row):
                held = [*self.state.holders(row)]
                if not (all(held) if isinstance(source, Reservation) else any(held)):
                    raise BrokenLawError(f"READY, yet not flushed: {row[1:]}, tiers: {held}")
