"""Connections: connect, Hello, and the end of a connection.

A connection that may still write to the arena is never closed. It is half-closed, and the core
waits for its EOF (law 3).
"""

from __future__ import annotations

from typing import Final

from kvass.core.clients.registry import ClientConnection
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
    """A client has connected: refuse it, or give it a place. That may end another connection."""
    assert event.connection not in state.connections, "a number of a connection was reused"
    connection = ClientConnection(id=event.connection, uid=event.uid, own=event.own, pid=event.pid)
    connection.start = event.start
    state.connections[connection.id] = connection
    if event.refusal:
        end(state, connection, "forbidden", event.refusal)
    elif (leaver := state.connection_limits.admit(connection, state.now)) is not None:
        end(state, state.connections[leaver], "limit", "there are too many sessions: end some")


def end_silent(state: State) -> None:
    """End the connections that have not sent Hello in time."""
    for connection in state.connection_limits.overdue(state.now):
        text = f"say Hello within {state.config.timing.hello_s:g} s"
        end(state, state.connections[connection], "limit", text)


def faulted(state: State, event: Faulted) -> None:
    """A connection sent bytes that are no message: end the connection."""
    connection = state.connections.get(event.connection)
    if connection is not None and not connection.ending:
        end(state, connection, event.code, event.text)


def end(
    state: State, connection: ClientConnection, code: ErrorCode, text: str, seq: int = 0
) -> None:
    """Send a connection the error for which it is ended, and close it, or half-close it (law 3)."""
    promote.connection_lost(state, connection.id)
    state.counters[f"ended_{code}"] += 1
    state.send(connection.id, Error(seq=seq, code=code, text=text, fatal=True))
    connection.ending = True
    who = connection.registered
    if who is not None and who.rank == SCHEDULER:
        # A HandedOver that it sent may be lost.
        state.settlement.presume_handed_over(who.instance)
    elif who is not None and state.settlement.owes(who.instance, who.rank):
        instance = state.instances[who.instance]
        instance.workers.pop(who.rank, None)
        instance.namespace = None
        state.out.append(HalfClose(connection.id))
        return
    state.out.append(Close(connection.id))
    lost(state, Lost(connection.id))


def lost(state: State, event: Lost) -> None:
    """A connection has ended: end what it held of leases and reservations, and its promotions."""
    connection = state.connections.pop(event.connection, None)
    promote.connection_lost(state, event.connection)
    if connection is None:
        return
    state.connection_limits.leave(connection)
    state.counters["ended_closed"] += not connection.ending
    state.followers.removed.leave(connection.id)
    former.lost(state, connection)
    if connection.registered is None:
        return
    who = connection.registered
    instance = state.instances[who.instance]
    del instance.connections[who.rank]
    if who.rank == SCHEDULER:
        state.settlement.lost(instance.id, SCHEDULER)
    else:
        instance.workers.pop(who.rank, None)
        until = state.settlement.rank_lost(instance.id, who.rank, connection.id, event.exiting)
        if until is not None:
            state.out.append(Watch(connection.id, until))
    instance.namespace = None if instance.missing else instance.namespace
    if not instance.connections:
        del state.instances[instance.id]
        shadow.engine_gone(state, instance)


def populated(state: State, event: PopulatedTo) -> None:
    """More of the arena is populated: send ``Populated`` to the connections that mapped it."""
    state.populated_bytes = event.bytes
    for connection in state.connections.values():
        if connection.wants_arena and connection.greeted and not connection.ending:
            state.send(connection.id, Populated(bytes=event.bytes))


def hello(state: State, connection: ClientConnection, msg: Hello) -> None:
    """Answer with ``Welcome``, or end a connection whose protocol or clock does not fit."""
    if connection.greeted:
        raise Refused("bad_message", "Hello was said already")
    protocol = min(msg.protocol_max, PROTOCOL_MAX)
    if protocol < max(msg.protocol_min, PROTOCOL_MIN):
        ours = f"{PROTOCOL_MIN}..{PROTOCOL_MAX}"
        theirs = f"{msg.protocol_min}..{msg.protocol_max}"
        text = f"this daemon speaks protocol {ours}, you {theirs}: install matching versions"
        end(state, connection, "incompatible_version", text, msg.seq)
        return
    if not -0.001 <= state.now - msg.clock_s <= CLOCK_SLACK_S:
        text = "your CLOCK_MONOTONIC is not this daemon's: share the host's time namespace"
        end(state, connection, "incompatible_clock", text, msg.seq)
        return
    state.connection_limits.greeted(connection)
    connection.greeted, connection.wants_arena = True, msg.wants_arena
    connection.features = tuple(f for f in msg.features if f in FEATURES)
    welcome = Welcome(
        seq=msg.seq,
        protocol=protocol,
        features=connection.features,
        boot=state.config.boot,
        version=state.config.version,
        clock_s=state.now,
        arena_bytes=state.config.arena_bytes,
        populated_bytes=state.populated_bytes,
        limits=state.config.limits,
        timing=state.config.timing,
        tiers=len(state.tiers.used),
    )
    state.send(connection.id, welcome, with_arena=msg.wants_arena)
