"""``CacheMachine``: everything the daemon knows, and the one way in which it changes.

``step(event, now) -> effects`` is pure; ``now`` never goes back; every request is answered exactly
once, refusals included (law 11), and a refused message changed nothing.

Who: ``sessions``, ``session_limits``, ``registry``, ``admission``. Rows, slots and room:
``row_classes``, ``row_states``, ``row_allocator``. Leases and reservations: ``settlement``. What
messages do: ``reading``, ``promote``, ``segments``, ``writing``, ``clearing``. Tiers: ``flush``,
``epochs``, ``tier_changes``.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import chain, count
from typing import Any, Final

from kvass import messages
from kvass.core import effects, invariants
from kvass.core import status as fields
from kvass.core.clients.registry import ClientSession
from kvass.core.effects import Effect, Event, SessionId
from kvass.core.handlers import admission, clearing, reading, segments, sessions, writing
from kvass.core.pending.ledger import soonest
from kvass.core.pending.tier_state import Asking
from kvass.core.rows.row_classes import Namespace
from kvass.core.state import CoreConfig, State
from kvass.core.tiers import epochs, flush, promote, tier_changes
from kvass.errors import Refused
from kvass.messages import Error, FromDaemon, Hello, Pong, Register, StatusReply
from kvass.types import Quota

__all__ = ["CacheMachine", "CoreConfig"]


_MESSAGES: Final[dict[type, Callable[[State, ClientSession, Any], FromDaemon | None]]] = {
    messages.Register: admission.register,
    messages.Lookup: reading.lookup,
    messages.Prefetch: reading.prefetch,
    messages.IndexChunks: segments.index_chunks,
    messages.FindSegments: segments.find_segments,
    messages.Release: reading.release,
    messages.Reserve: writing.reserve,
    messages.Commit: writing.commit,
    messages.Abort: writing.abort,
    messages.HandedOver: writing.handed_over,
    messages.Clear: clearing.clear,
    messages.EmptyTier: clearing.empty_tier,
    messages.SetQuota: clearing.set_quota,
    messages.Removals: reading.removals,
    messages.Ping: lambda *_: Pong(),
    messages.Status: lambda state, *_: StatusReply(fields=fields.status(state)),
}


def _received(state: State, event: effects.Received) -> None:
    session, message = state.sessions.get(event.session), event.message
    if session is None or session.ending:
        return
    state.messages[type(message)] += 1
    try:
        if type(message) is Hello:
            sessions.hello(state, session, message)
        elif not session.greeted:
            sessions.end(state, session, "bad_message", "say Hello first", message.seq)
        else:
            reply = _MESSAGES[type(message)](state, session, message)
            if reply is not None:
                reply.seq = message.seq
                state.send(session.id, reply)
    except Refused as no:
        state.counters[f"refused_{no.code}"] += 1
        if type(message) is messages.Register:
            state.refused(message.instance, no.text)
        state.send(session.id, Error(seq=message.seq, code=no.code, text=no.text))


def _tick(state: State, event: effects.Tick) -> None:
    sessions.end_silent(state)
    epochs.read_again(state)
    if state.clears:
        clearing.go_on(state)
    else:
        state.allocator.reclaim()
        state.classes.warm()
    promote.go_on(state)


def _epoch_is(state: State, event: effects.EpochIs) -> None:
    tier = state.tiers.all[epochs.epoch_told(state, event)]
    if event.epoch is not None:
        flush.store_next(state, tier, len(tier.queue))
    promote.resume(state)


def _tier_report(state: State, event: effects.TierReport) -> None:
    tier = state.tiers.all[event.tier]
    if not tier.place:
        return
    back = event.fields.get("up") and not tier.report.get("up", True)
    tier.report = event.fields
    if back:
        epochs.read_again(state, event.tier)


_EVENTS: Final[dict[type, Callable[[State, Any], None]]] = {
    effects.Received: _received,
    effects.Opened: sessions.opened,
    effects.Lost: sessions.lost,
    effects.Faulted: sessions.faulted,
    effects.ProcessEnded: lambda state, event: state.settlement.process_ended(event.session),
    effects.PopulatedTo: sessions.populated,
    effects.Tick: _tick,
    effects.Probed: promote.probed,
    effects.Loaded: promote.loaded,
    effects.Stored: flush.stored,
    effects.EpochIs: _epoch_is,
    effects.Emptied: epochs.emptied,
    effects.TierReport: _tier_report,
    effects.QuotasAre: lambda state, event: state.tenants.replace(event.quotas),
    effects.TiersAre: tier_changes.change,
    effects.Stopping: lambda state, _: flush.stop(state),
}


class CacheMachine:
    """The cache's state; one thread owns it."""

    def __init__(self, config: CoreConfig) -> None:
        self.state = State(config)

    def step(self, event: Event, now: float) -> list[Effect]:
        """Apply ``event`` at CLOCK_MONOTONIC ``now`` (seconds); returns what the daemon must do."""
        assert now >= self.state.now, "time went back"
        state = self.state
        state.now, state.out = now, []
        state.rows.uses.mark(state.rows.table.clock, now)
        state.settlement.lapse(now)
        if state.promotions.all:
            promote.lapse(state)
        _EVENTS[type(event)](state, event)
        if state.settlement.published:
            flush.queue_published(state)
        if state.settlement.woken:
            woken, state.settlement.woken = state.settlement.woken, []
            promote.go_on(state, woken)
        flush.retry_due(state)
        return state.out

    def next_deadline(self) -> float | None:
        """When a ``Tick`` is due, if nothing happens before. Asked after every message."""
        state = self.state
        if state.allocator.unfinished or state.promotions.going or state.clears:
            return state.now  # a slice of work is left to do
        due = soonest(state.settlement.next_due, state.session_limits.next_due)
        if not (state.tiers.all or state.promotions.all):
            return due
        return soonest(due, soonest(state.promotions.next_due, state.tiers.next_due))

    def registered(self, session: SessionId) -> Register | None:
        """As what a session has registered."""
        known = self.state.sessions.get(session)
        return None if known is None else known.registered

    def namespace(self, session: SessionId) -> Namespace | None:
        """The namespace of a session's instance; None while ranks are missing, and if nothing that
        the session says is done any more."""
        who, known = self.registered(session), self.state.sessions.get(session)
        if who is None or known is None or known.ending:
            return None
        return self.state.namespace_of(self.state.instances[who.instance])

    def owes(self, session: SessionId) -> bool:
        """Whether a session is a worker's that may still read or write the arena."""
        who = self.registered(session)
        return who is not None and self.state.settlement.owes(who.instance, who.rank)

    @property
    def flushing(self) -> bool:
        """Whether tiers take what they were promised, or will once they have told an epoch."""
        tiers, ops = self.state.tiers.all, self.state.tiers.ops.values()
        return any(tier.storing_bytes for tier in tiers) or any(
            isinstance(op, Asking) and tiers[op.tier].queue for op in ops
        )

    def unflushed(self) -> list[tuple[str, int]]:
        """Of a daemon that ends: tiers, and how many rows each was promised and has not taken."""
        left = [(t.name, flush.rows_left(self.state, t)) for t in self.state.tiers.used]
        return [(name, rows) for name, rows in left if rows]

    def tier_number(self, name: str, taken: Container[int]) -> int:
        """The number of a tier of that name that is added, not one of ``taken``: a removed one's,
        or the next."""
        every = self.state.tiers.all
        removed = (t.number for t in every if t.name == name and not t.place)
        return next(n for n in chain(removed, count(len(every))) if n not in taken)

    @property
    def quotas(self) -> frozenset[Quota]:
        """All that are in force."""
        return frozenset(t.quota for t in self.state.tenants.all.values() if t.listed)

    def status(self) -> dict[str, Any]:
        return fields.status(self.state)

    def validate(self) -> None:
        """Assert every law that shows in the state; for tests and the simulator."""
        invariants.validate(self.state)
