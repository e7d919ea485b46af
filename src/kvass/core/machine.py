"""``CacheMachine``: everything the daemon knows, and the one door through which it changes.

Law of this file: ``step(event, now) -> effects`` is pure; ``now`` never goes back; every request is
answered exactly once, refusals included (law 11), and a refused message changed nothing.

The parts: ``registry`` and ``admission`` (who), ``l1`` (rows, slots, room), ``custody`` (leases,
reservations, and how they end), ``flows`` (what a message does), ``report`` (what can be seen).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvass.core import admission, epochs, flows, flush, promote, report
from kvass.core.effects import (
    Close,
    Effect,
    Emptied,
    EpochIs,
    Event,
    Faulted,
    HalfClose,
    Loaded,
    Lost,
    Opened,
    PopulatedTo,
    Probed,
    ProcessEnded,
    Received,
    Send,
    SessionId,
    Stopping,
    Stored,
    Tick,
    TierReport,
    Watch,
)
from kvass.core.registry import Session
from kvass.core.state import CoreConfig, State
from kvass.core.tiers import Asking
from kvass.errors import ErrorCode, Refused
from kvass.messages import (
    FEATURES,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Abort,
    Clear,
    Commit,
    Error,
    FromDaemon,
    HandedOver,
    Hello,
    Lookup,
    Ping,
    Pong,
    Populated,
    Prefetch,
    Register,
    Release,
    Renew,
    Reserve,
    Status,
    StatusReply,
    Welcome,
)
from kvass.types import SCHEDULER

__all__ = ["CacheMachine", "CoreConfig"]

CLOCK_SLACK_S: Final = 600.0
"""A Hello may have waited this long in a queue; another time namespace is off by more, or ahead."""


def _ping(state: State, session: Session, msg: Ping) -> Pong:
    return Pong()


def _status(state: State, session: Session, msg: Status) -> StatusReply:
    return StatusReply(fields=report.status(state))


_HANDLERS: Final[dict[type, Callable[[State, Session, Any], FromDaemon | None]]] = {
    Register: admission.register,
    Lookup: flows.lookup,
    Prefetch: flows.prefetch,
    Release: flows.release,
    Renew: flows.renew,
    Reserve: flows.reserve,
    Commit: flows.commit,
    Abort: flows.abort,
    HandedOver: flows.handed_over,
    Clear: flows.clear,
    Ping: _ping,
    Status: _status,
}


class CacheMachine:
    """The cache's state behind its one door; one thread owns it."""

    def __init__(self, config: CoreConfig) -> None:
        self.state = State(config)
        self._out: list[Effect] = []

    # ------------------------------------------------------------ the door

    def step(self, event: Event, now: float) -> list[Effect]:
        """Apply ``event`` at CLOCK_MONOTONIC ``now`` (seconds); returns what the shell must do."""
        assert now >= self.state.now, "time went back"
        state = self.state
        state.now = now
        out: list[Effect] = []
        self._out = state.out = out
        state.custody.lapse(now)
        if state.promotions.all:
            promote.lapse(state)
        if type(event) is Received:
            self._received(event)
        elif type(event) is Opened:
            self._opened(event)
        elif type(event) is Lost:
            self._lost(event)
        elif type(event) is Faulted:
            self._faulted(event)
        elif type(event) is ProcessEnded:
            state.custody.process_ended(event.session, now)
        elif type(event) is PopulatedTo:
            self._populated(event)
        elif type(event) is Tick:
            self._hurry()
            epochs.look_again(state)
            state.l1.reclaim()
            state.l1.warm()
            promote.go_on(state)
        else:
            self._of_tier(event)
        if state.custody.published:
            flush.take_published(state)
        if any(state.flushes.failures):
            flush.wake(state)  # after the event: it may have found a row to be wrong
        return out

    def _of_tier(self, event: Event) -> None:
        state = self.state
        if type(event) is Probed:
            promote.probed(state, event)
        elif type(event) is Loaded:
            promote.loaded(state, event)
        elif type(event) is Stored:
            flush.stored(state, event)
        elif type(event) is EpochIs:
            tier = epochs.answered(state, event)
            if event.epoch is not None:
                flush.pump(state, tier, len(state.flushes.queues[tier]))
            promote.resume(state)
        elif type(event) is Emptied:
            epochs.emptied(state, event)
        elif type(event) is TierReport:
            back = event.fields.get("up") and not state.tiers.reports[event.tier].get("up", True)
            state.tiers.reports[event.tier] = event.fields
            if back:
                epochs.look_again(state, event.tier)
        elif type(event) is Stopping:
            state.stopping = True
            flush.hurry(state)
            flush.all_left(state)

    def next_deadline(self) -> float | None:
        """When a ``Tick`` is due, if nothing happens before. Asked after every message."""
        state = self.state
        if state.custody.losing or state.l1.unfinished or state.promotions.unfinished:
            return state.now  # a slice of work is left to do
        due, hello = state.ledger.next_due, state.places.next_due
        if due is None or (hello is not None and hello < due):
            due = hello
        if not state.config.tiers:
            return due
        more = due, state.promotions.next_due, state.flushes.next_due
        return min((when for when in more if when is not None), default=None)

    def owes(self, session: SessionId) -> bool:
        """Whether a session is a worker's that may still read or write the arena."""
        one = self.state.sessions.get(session)
        who = None if one is None else one.registered
        return who is not None and self.state.custody.owes(who.instance, who.rank)

    @property
    def flushing(self) -> bool:
        """Whether tiers take what they were promised, or will once they have told an epoch."""
        flushes, ops = self.state.flushes, self.state.tiers.ops.values()
        return any(flushes.bytes_out) or any(
            isinstance(op, Asking) and flushes.queues[op.tier] for op in ops
        )

    def unflushed(self) -> list[tuple[str, int]]:
        """Of a daemon that ends: tiers, and how many rows each was promised and has not taken."""
        left = [(tier, flush.left(self.state, i)) for i, tier in enumerate(self.state.config.tiers)]
        return [(tier, rows) for tier, rows in left if rows]

    # ------------------------------------------------------------ sessions

    def _opened(self, event: Opened) -> None:
        assert event.session not in self.state.sessions, "a session id was reused"
        session = Session(id=event.session, uid=event.uid, own=event.own)
        self.state.sessions[event.session] = session
        if event.refusal:
            self._end(session, "forbidden", event.refusal)
        elif (leaver := self.state.places.admit(session, self.state.now)) is not None:
            text = "there are too many sessions: end some"
            self._end(self.state.sessions[leaver], "limit", text)

    def _hurry(self) -> None:
        """Who has said nothing yet makes room."""
        for session in self.state.places.overdue(self.state.now):
            text = f"say Hello within {self.state.config.timing.hello_s:g} s"
            self._end(self.state.sessions[session], "limit", text)

    def _received(self, event: Received) -> None:
        session = self.state.sessions.get(event.session)
        if session is None or session.ending:
            return
        message = event.message
        self.state.messages[type(message)] += 1
        try:
            if type(message) is Hello:
                self._hello(session, message)
            elif not session.greeted:
                self._end(session, "bad_message", "say Hello first", message.seq)
            else:
                reply = _HANDLERS[type(message)](self.state, session, message)
                if reply is not None:
                    reply.seq = message.seq
                    self._send(session, reply)
        except Refused as no:
            self.state.counters[f"refused_{no.code}"] += 1
            self._send(session, Error(seq=message.seq, code=no.code, text=no.text))

    def _faulted(self, event: Faulted) -> None:
        session = self.state.sessions.get(event.session)
        if session is not None and not session.ending:
            self._end(session, event.code, event.text)

    def _end(self, session: Session, code: ErrorCode, text: str, seq: int = 0) -> None:
        """Tell a session why it must go, and see it out as law 3 wants."""
        promote.forget(self.state, session.id)
        self.state.counters[f"ended_{code}"] += 1
        self._send(session, Error(seq=seq, code=code, text=text, fatal=True))
        session.ending = True
        who = session.registered
        if who is not None and who.rank == SCHEDULER:
            # Words of its may be lost, a HandedOver among them.
            self.state.custody.presume_handed_over(who.instance)
        elif who is not None and self.state.custody.owes(who.instance, who.rank):
            instance = self.state.instances[who.instance]
            instance.workers.pop(who.rank, None)
            instance.namespace = None
            self._out.append(HalfClose(session.id))
            return
        self._out.append(Close(session.id))
        self._lost(Lost(session.id))

    def _lost(self, event: Lost) -> None:
        session = self.state.sessions.pop(event.session, None)
        promote.forget(self.state, event.session)
        if session is None:
            return
        self.state.places.leave(session)
        if session.registered is None:
            return
        who = session.registered
        instance = self.state.instances[who.instance]
        del instance.sessions[who.rank]
        if who.rank == SCHEDULER:
            self.state.custody.scheduler_lost(instance.id, event.session, self.state.now)
        else:
            instance.workers.pop(who.rank, None)
            until = self.state.custody.rank_lost(
                instance.id, who.rank, event.session, event.exiting, self.state.now
            )
            if until is not None:
                self._out.append(Watch(event.session, until))
        instance.namespace = None if instance.missing else instance.namespace
        if not instance.sessions:
            del self.state.instances[instance.id]

    def _populated(self, event: PopulatedTo) -> None:
        self.state.populated_bytes = event.bytes
        for session in self.state.sessions.values():
            if session.wants_arena and session.greeted and not session.ending:
                self._send(session, Populated(bytes=event.bytes))

    def _send(self, session: Session, message: FromDaemon, with_arena: bool = False) -> None:
        self._out.append(Send(session.id, message, with_arena))

    # ------------------------------------------------------------ handshake, registration

    def _hello(self, session: Session, msg: Hello) -> None:
        if session.greeted:
            raise Refused("bad_message", "Hello was said already")
        protocol = min(msg.protocol_max, PROTOCOL_MAX)
        if protocol < max(msg.protocol_min, PROTOCOL_MIN):
            ours = f"{PROTOCOL_MIN}..{PROTOCOL_MAX}"
            theirs = f"{msg.protocol_min}..{msg.protocol_max}"
            text = f"this daemon speaks protocol {ours}, you {theirs}: install matching versions"
            self._end(session, "incompatible_version", text, msg.seq)
            return
        if not -0.001 <= self.state.now - msg.clock_s <= CLOCK_SLACK_S:
            text = "your CLOCK_MONOTONIC is not this daemon's: share the host's time namespace"
            self._end(session, "incompatible_clock", text, msg.seq)
            return
        self.state.places.greeted(session)
        session.greeted, session.client, session.wants_arena = True, msg.client, msg.wants_arena
        welcome = Welcome(
            seq=msg.seq,
            protocol=protocol,
            features=tuple(f for f in msg.features if f in FEATURES),
            boot=self.state.config.boot,
            version=self.state.config.version,
            clock_s=self.state.now,
            arena_bytes=self.state.config.arena_bytes,
            populated_bytes=self.state.populated_bytes,
            limits=self.state.config.limits,
            timing=self.state.config.timing,
            tiers=len(self.state.config.tiers),
        )
        self._send(session, welcome, with_arena=msg.wants_arena)

    # ------------------------------------------------------------ looking

    def status(self) -> dict[str, Any]:
        """The fields of ``kvass status --json``."""
        return report.status(self.state)

    def validate(self) -> None:
        """Assert every law that shows in the state; for tests and the simulator."""
        report.validate(self.state)
