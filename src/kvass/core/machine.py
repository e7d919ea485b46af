"""``CacheMachine``: the state of the cache, and ``step``, the only function that changes it.

``step(event, now) -> effects`` is pure, and ``now`` never decreases (law 1). Every request is
answered exactly once. A refused message is answered by an error and changes nothing (law 11).

``_MESSAGES`` has the handler of each message, ``_EVENTS`` that of each event, ``_FOLLOW_UPS`` that
of each kind of follow-up (``pending/follow_ups.py``) in their order, ``_WORK`` what is done in
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import chain, count
from operator import attrgetter
from typing import Any, Final

from kvass import messages
from kvass.core import adoption, effects, invariants
from kvass.core import status as fields
from kvass.core.clients.registry import ClientConnection
from kvass.core.effects import ConnectionId, Effect, Event
from kvass.core.handlers import (
    admission,
    clearing,
    connections,
    explaining,
    former,
    reading,
    segments,
    session_ending,
    session_fetching,
    shadow,
    writing,
)
from kvass.core.pending.follow_ups import FirstHit, FollowUp, Published, Woken
from kvass.core.pending.ledger import soonest
from kvass.core.pending.tier_operations import Looking, NotingEpoch
from kvass.core.rows.row_classes import Namespace
from kvass.core.saved.index_file import SavedIndex
from kvass.core.state import CoreConfig, State
from kvass.core.tiers import epochs, flush, presence, probe, promote, tier_changes
from kvass.errors import Refused
from kvass.messages import Error, FromDaemon, Hello, Pong, Register, StatusReply
from kvass.types import Quota, small_l1

__all__ = ["CacheMachine", "CoreConfig"]


_MESSAGES: Final[dict[type, Callable[[State, ClientConnection, Any], FromDaemon | None]]] = {
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
    messages.Drained: former.drained,
    messages.ShadowReport: shadow.shadow_report,
    messages.Clear: clearing.clear,
    messages.ClearTenant: clearing.clear_tenant,
    messages.EmptyTier: clearing.empty_tier,
    messages.SetQuota: clearing.set_quota,
    messages.EndSession: session_ending.end_session,
    messages.AskSession: session_fetching.ask_session,
    messages.Removals: reading.removals,
    messages.Present: reading.present,
    messages.LookupNotes: explaining.lookup_notes,
    messages.Explain: explaining.explain,
    messages.Ping: lambda *_: Pong(),
    messages.Status: lambda state, _, msg: StatusReply(fields=fields.status(state, msg.terms_of)),
}


def _received(state: State, event: effects.Received) -> None:
    connection, message = state.connections.get(event.connection), event.message
    if connection is None or connection.ending:
        return
    state.messages[type(message)] += 1
    try:
        if type(message) is Hello:
            connections.hello(state, connection, message)
        elif not connection.greeted:
            connections.end(state, connection, "bad_message", "say Hello first", message.seq)
        else:
            reply = _MESSAGES[type(message)](state, connection, message)
            if reply is not None:
                reply.seq = message.seq
                state.send(connection.id, reply)
    except Refused as no:
        state.counters[f"refused_{no.code}"] += 1
        if type(message) is messages.Register:
            state.refused(message.instance, no.text)
        state.send(connection.id, Error(seq=message.seq, code=no.code, text=no.text))


def _tick(state: State, event: effects.Tick) -> None:
    connections.end_silent(state)
    former.sweep(state)
    epochs.read_again(state)
    _work_on(state)
    promote.continue_some(state)


def _epoch_is(state: State, event: effects.EpochIs) -> None:
    tier = state.tiers.all[epochs.epoch_answered(state, event)]
    if event.epoch is not None:
        flush.store_next(state, tier, len(tier.queue))
    promote.epoch_known(state)


def _tier_report(state: State, event: effects.TierReport) -> None:
    tier = state.tiers.all[event.tier]
    if not tier.place:
        return
    back = event.fields.get("up") and not tier.report.get("up", True)
    tier.report = event.fields
    if back:
        epochs.read_again(state, event.tier)


def _probed(state: State, event: effects.Probed) -> None:
    asked = presence if isinstance(state.tiers.ops[event.op], Looking) else probe
    asked.probed(state, event)


def _reclaim(state: State) -> None:
    state.reclaim()
    state.classes.warm()


_WORK: Final[dict[str, Callable[[State], None]]] = {
    "clears": clearing.clear_more,
    "endings": session_ending.end_more,
    "fetch_due": session_fetching.next_due,
    "followers.kept.sweeping": lambda state: state.followers.kept.sweep_more(state.now),
    "unreclaimed": _reclaim,
}
"""Work that is done in slices, one in a step: what of the state is true while there is any, and
what does the next slice. Each kind has its turn, in this order, so that much of one kind keeps no
other waiting."""
_UNDONE: Final[Callable[[State], tuple[object, ...]]] = attrgetter(*_WORK)
_SLICES: Final = tuple(_WORK.values())


def _work_on(state: State) -> None:
    """Do a slice of the next kind of work of which there is any."""
    undone, turn = _UNDONE(state), state.turn
    if any(undone):
        while not undone[turn % len(undone)]:
            turn += 1
        state.turn = (turn + 1) % len(undone)
        _SLICES[turn % len(undone)](state)


_EVENTS: Final[dict[type, Callable[[State, Any], None]]] = {
    effects.Received: _received,
    effects.Opened: connections.opened,
    effects.Lost: connections.lost,
    effects.Faulted: connections.faulted,
    effects.ProcessEnded: lambda state, event: state.settlement.process_ended(event.connection),
    effects.FormerEnded: former.ended,
    effects.PopulatedTo: connections.populated,
    effects.Tick: _tick,
    effects.Probed: _probed,
    effects.Loaded: promote.loaded,
    effects.Stored: flush.stored,
    effects.EpochIs: _epoch_is,
    effects.Emptied: epochs.emptied,
    effects.TierReport: _tier_report,
    effects.QuotasAre: lambda state, event: clearing.replace_quotas(state, event.quotas),
    effects.TiersAre: tier_changes.change,
    effects.Stopping: lambda state, _: flush.stop(state),
}

_FOLLOW_UPS: Final[dict[type[FollowUp], Callable[[State, list[Any]], None]]] = {
    Published: flush.published,  # before a promotion takes room, so that tiers get these rows
    Woken: promote.woken,
    FirstHit: flush.hit_first,  # also of the promotions that were answered
}


class CacheMachine:
    """The state of the cache. Only one thread may use it.

    ``index``: what a former life of the daemon has left, or an empty index for the next one;
    ``None``: nothing outlives this life. ``adoption``: what was adopted from it.
    """

    def __init__(self, config: CoreConfig, index: SavedIndex | None = None) -> None:
        self.state = State(config, index)
        self.adoption = None if index is None else adoption.adopt(self.state, index)

    def step(self, event: Event, now: float) -> list[Effect]:
        """Apply ``event`` at ``now``, which is CLOCK_MONOTONIC in seconds.

        Returns the effects that the daemon must carry out. The order: what is due by ``now`` ends,
        then the event, then its follow-ups, then tiers that were down are asked again.
        """
        assert now >= self.state.now, "time went back"
        state = self.state
        state.now, state.out = now, []
        state.rows.uses.mark(state.rows.table.clock, now)
        state.settlement.lapse(now)
        if state.promotions.all:
            promote.lapse(state)
        _EVENTS[type(event)](state, event)
        waiting = state.follow_ups.of
        while waiting:
            for kind, follow in _FOLLOW_UPS.items():
                if kind in waiting:
                    follow(state, waiting.pop(kind))
        flush.retry_due(state)
        return state.out

    def end(self) -> None:
        """There will be no other step: tell the next life the last deadline of the open leases."""
        if self.state.index is not None:
            deadlines = (lease.deadline for lease in self.state.leases.all.values())
            self.state.index.promise(max(deadlines, default=self.state.config.started_s))

    def next_deadline(self) -> float | None:
        """When the daemon must send a ``Tick`` if no other event comes before; ``None``: never.

        The daemon calls this after every event.
        """
        state = self.state
        if state.promotions.going or any(_UNDONE(state)):
            return state.now  # this step has left work for the next one
        due = soonest(state.settlement.next_due, state.connection_limits.next_due)
        due = soonest(due, state.sessions.next_due)
        if not (state.tiers.all or state.promotions.all):
            return due
        return soonest(due, soonest(state.promotions.next_due, state.tiers.next_due))

    def registered(self, connection: ConnectionId) -> Register | None:
        """The ``Register`` of a connection; ``None`` if it has not registered."""
        known = self.state.connections.get(connection)
        return None if known is None else known.registered

    def namespace(self, connection: ConnectionId) -> Namespace | None:
        """The namespace of a connection's instance.

        ``None`` while ranks of the instance are missing, and for a connection that is ending.
        """
        terms, known = self.registered(connection), self.state.connections.get(connection)
        if terms is None or known is None or known.ending:
            return None
        return self.state.namespace_of(self.state.instances[terms.instance])

    def small_l1(self) -> str:
        """The advice if L1 is too small beside the engines' own KV caches, and there is no tier."""
        state = self.state
        if state.tiers.used:
            return ""
        return small_l1(state.config.arena_bytes, state.engine_cache_bytes)

    def resting(self) -> dict[str, Any]:
        """What rests because of a former life (``former.resting``)."""
        return former.resting(self.state)

    def owes(self, connection: ConnectionId) -> bool:
        """Whether the connection is of a worker that may still read or write the arena."""
        terms = self.registered(connection)
        return terms is not None and self.state.settlement.owes(terms.instance, terms.rank)

    @property
    def flushing(self) -> bool:
        """Whether a tier is storing rows, or will store queued rows when it answers with
        its epoch."""
        tiers, ops = self.state.tiers.all, self.state.tiers.ops.values()
        return any(tier.storing_bytes for tier in tiers) or any(
            isinstance(op, NotingEpoch) and tiers[op.tier].queue for op in ops
        )

    @property
    def busy(self) -> bool:
        """Whether the daemon should wait before it ends: tiers are storing rows, or ranks are
        writing rows that the next daemon could read."""
        settling = self.state.leaving and any(
            not r.discarded for r in self.state.reservations.all.values()
        )
        return self.flushing or settling

    def unflushed(self) -> list[tuple[str, int]]:
        """The tiers that have not stored all rows queued for them, and how many rows are left.

        The daemon asks when it stops.
        """
        left = [(t.name, flush.unflushed(self.state, t)) for t in self.state.tiers.used]
        return [(name, rows) for name, rows in left if rows]

    def tier_number(self, name: str, taken: Container[int]) -> int:
        """The number for a tier of that name that is to be added.

        It is the number of a removed tier of that name, or a new one; but no number in ``taken``.
        """
        every = self.state.tiers.all
        removed = (t.number for t in every if t.name == name and not t.place)
        return next(n for n in chain(removed, count(len(every))) if n not in taken)

    @property
    def quotas(self) -> frozenset[Quota]:
        """All quotas that are in force."""
        return frozenset(t.quota for t in self.state.tenants.all.values() if t.listed)

    def status(self) -> dict[str, Any]:
        return fields.status(self.state)

    def validate(self) -> None:
        """Check the laws that the state shows. It is for tests and the simulator.

        Raises:
            AssertionError: the state breaks a law.
        """
        invariants.validate(self.state)
