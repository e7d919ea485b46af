"""Sessions: connect, Hello, and the end of a session.

A session that may still write to the arena is never closed. It is half-closed, and the core waits
for its EOF (law 3).
"""

from __future__ import annotations

from typing import Final

from kvass.core.clients.registry import ClientSession
from kvass.core.effects import Close, Faulted, HalfClose, Lost, Opened, PopulatedTo, Watch
from kvass.core.handlers import former, shadow
from kvass.core.state import State
from kvass.core.tiers import promote
from kvass.errors import ErrorCode, Refused
from kvass.messages import FEATURES, PROTOCOL_MAX, PROTOCOL_MIN, Error, Hello, Populated, Welcome
from kvass.types import SCHEDULER

CLOCK_SLACK_S: Final = 600.0
"""How long a Hello may have waited in a queue. A clock that is further behind, or ahead, belongs
to another time namespace."""


def opened(state: State, event: Opened) -> None:
    """A client has connected: refuse it, or give it a place. That may end another session."""
    assert event.session not in state.sessions, "a session id was reused"
    session = ClientSession(id=event.session, uid=event.uid, own=event.own, pid=event.pid)
    session.start = event.start
    state.sessions[session.id] = session
    if event.refusal:
        end(state, session, "forbidden", event.refusal)
    elif (leaver := state.session_limits.admit(session, state.now)) is not None:
        end(state, state.sessions[leaver], "limit", "there are too many sessions: end some")


def end_silent(state: State) -> None:
    """End the sessions that have not sent Hello in time."""
    for session in state.session_limits.overdue(state.now):
        text = f"say Hello within {state.config.timing.hello_s:g} s"
        end(state, state.sessions[session], "limit", text)


def faulted(state: State, event: Faulted) -> None:
    """A session sent bytes that are no message: end the session."""
    session = state.sessions.get(event.session)
    if session is not None and not session.ending:
        end(state, session, event.code, event.text)


def end(state: State, session: ClientSession, code: ErrorCode, text: str, seq: int = 0) -> None:
    """Send a session the error for which it is ended, and close it, or half-close it (law 3)."""
    promote.session_lost(state, session.id)
    state.counters[f"ended_{code}"] += 1
    state.send(session.id, Error(seq=seq, code=code, text=text, fatal=True))
    session.ending = True
    who = session.registered
    if who is not None and who.rank == SCHEDULER:
        # A HandedOver that it sent may be lost.
        state.settlement.presume_handed_over(who.instance)
    elif who is not None and state.settlement.owes(who.instance, who.rank):
        instance = state.instances[who.instance]
        instance.workers.pop(who.rank, None)
        instance.namespace = None
        state.out.append(HalfClose(session.id))
        return
    state.out.append(Close(session.id))
    lost(state, Lost(session.id))


def lost(state: State, event: Lost) -> None:
    """A session has ended: end what it held of leases and reservations, and its promotions."""
    session = state.sessions.pop(event.session, None)
    promote.session_lost(state, event.session)
    if session is None:
        return
    state.session_limits.leave(session)
    state.counters["ended_closed"] += not session.ending
    state.followers.removed.leave(session.id)
    former.lost(state, session)
    if session.registered is None:
        return
    who = session.registered
    instance = state.instances[who.instance]
    del instance.sessions[who.rank]
    if who.rank == SCHEDULER:
        state.settlement.lost(instance.id, SCHEDULER)
    else:
        instance.workers.pop(who.rank, None)
        until = state.settlement.rank_lost(instance.id, who.rank, session.id, event.exiting)
        if until is not None:
            state.out.append(Watch(session.id, until))
    instance.namespace = None if instance.missing else instance.namespace
    if not instance.sessions:
        del state.instances[instance.id]
        shadow.engine_left(state, instance)


def populated(state: State, event: PopulatedTo) -> None:
    """More of the arena is populated: send ``Populated`` to the sessions that mapped it."""
    state.populated_bytes = event.bytes
    for session in state.sessions.values():
        if session.wants_arena and session.greeted and not session.ending:
            state.send(session.id, Populated(bytes=event.bytes))


def hello(state: State, session: ClientSession, msg: Hello) -> None:
    """Answer with ``Welcome``, or end a session whose protocol or clock does not fit."""
    if session.greeted:
        raise Refused("bad_message", "Hello was said already")
    protocol = min(msg.protocol_max, PROTOCOL_MAX)
    if protocol < max(msg.protocol_min, PROTOCOL_MIN):
        ours = f"{PROTOCOL_MIN}..{PROTOCOL_MAX}"
        theirs = f"{msg.protocol_min}..{msg.protocol_max}"
        text = f"this daemon speaks protocol {ours}, you {theirs}: install matching versions"
        end(state, session, "incompatible_version", text, msg.seq)
        return
    if not -0.001 <= state.now - msg.clock_s <= CLOCK_SLACK_S:
        text = "your CLOCK_MONOTONIC is not this daemon's: share the host's time namespace"
        end(state, session, "incompatible_clock", text, msg.seq)
        return
    state.session_limits.greeted(session)
    session.greeted, session.wants_arena = True, msg.wants_arena
    session.features = tuple(f for f in msg.features if f in FEATURES)
    welcome = Welcome(
        seq=msg.seq,
        protocol=protocol,
        features=session.features,
        boot=state.config.boot,
        version=state.config.version,
        clock_s=state.now,
        arena_bytes=state.config.arena_bytes,
        populated_bytes=state.populated_bytes,
        limits=state.config.limits,
        timing=state.config.timing,
        tiers=len(state.tiers.used),
    )
    state.send(session.id, welcome, with_arena=msg.wants_arena)
