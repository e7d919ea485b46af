"""Observes connections: nobody is refused or sent away without a reason (law 12)."""

from __future__ import annotations

from dataclasses import dataclass

from kvass.core.clients.connection_limits import OBSERVERS
from kvass.core.effects import Close, Effect, Event, Opened
from kvass.messages import Error, FromDaemon, Hello, Welcome
from kvass.types import Limits
from tests.support.witness.records import BrokenLawError


@dataclass(eq=False, slots=True)
class ObservedConnection:
    """One open connection."""

    uid: int
    own: bool
    since: float
    features: tuple[str, ...] = ()
    greeted: bool = False
    registered: bool = False
    half_closed: bool = False


class ConnectionWitness:
    """Checks who may connect, and who may be told to go."""

    def __init__(self, limits: Limits, hello_s: float) -> None:
        self.limits = limits
        self.hello_s = hello_s
        self.connections: dict[int, ObservedConnection] = {}

    def opened(self, event: Opened, effects: list[Effect], now: float) -> None:
        """A client is refused only if there is no place for it; the daemon's own user never is."""
        seen = ObservedConnection(event.uid, event.own, now)
        refused = Close(event.connection) in effects
        others = list(self.connections.values())
        alike = [g for g in others if g.uid == event.uid]
        room = len(others) < self.limits.sessions and len(alike) < self.limits.sessions_per_uid
        if refused and (room or event.own):
            raise BrokenLawError(f"there was a place for {event}")
        if refused and any(not g.greeted for g in alike):
            raise BrokenLawError(f"{event} was refused, and others of its user say nothing")
        self.connections[event.connection] = seen
        closed = [e for e in effects if isinstance(e, Close)]
        if len(closed) > 1 or (closed and room):
            raise BrokenLawError(f"law 12: more went than had to: {closed}")

    def may_end(self, connection: int, event: Event, message: FromDaemon) -> bool:
        """Whether ``message`` may end a connection that sent nothing in this step."""
        seen = self.connections[connection]
        if not isinstance(message, Error) or not message.fatal or message.code != "limit":
            return False
        looks = seen.own and not seen.registered and isinstance(event, Opened)
        return not seen.greeted or looks

    def ticked(self, effects: list[Effect], now: float, behind: bool) -> None:
        """One without ``Hello`` ends in time, and not before. ``behind``: perhaps later."""
        closed = {e.connection for e in effects if isinstance(e, Close)}
        for connection, seen in self.connections.items():
            late = not seen.greeted and now >= seen.since + self.hello_s
            gone = not seen.greeted and connection in closed
            if gone > late or (late > gone and not behind):
                raise BrokenLawError(f"{connection} has said nothing since {seen.since}")

    def listens(self, connection: int) -> bool:
        """Whether the daemon still reads what the connection sends."""
        return connection in self.connections and not self.connections[connection].half_closed

    def greeted(self, connection: int, message: Hello, reply: Welcome) -> None:
        """A connection has said ``Hello``."""
        self.connections[connection].greeted = True
        self.connections[connection].features = message.features

    def registered(self, connection: int) -> None:
        """A connection has registered; only so many may."""
        self.connections[connection].registered = True
        mine = [g for g in self.connections.values() if g.registered]
        alike = [g for g in mine if g.uid == self.connections[connection].uid]
        if len(mine) > self.limits.sessions or len(alike) > self.limits.sessions_per_uid:
            raise BrokenLawError("law 12: more have registered than there are places")

    def left(self, connection: int) -> None:
        """A connection ended; there may be no more than there are places."""
        del self.connections[connection]
        if len(self.connections) > self.limits.sessions + OBSERVERS:
            raise BrokenLawError("law 12: more connections than places")
