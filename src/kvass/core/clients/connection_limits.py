"""The limits on connections, in all and per user, and which connection is ended at a limit.

Law of this file: no user can take all places (law 12).

A *place* is one of the limited number of connections. A connection that has not sent Hello is ended
if another one needs its place. The daemon's own user can always connect to read the status (``kvass
status``). A connection that has registered is never ended to free its place, because it may owe a
commit or a release (law 3).
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Final

from kvass.core.clients.registry import ClientConnection
from kvass.errors import Refused
from kvass.types import Limits

OBSERVERS: Final = 16
"""The number of extra places for the daemon's own user. A connection in one of them cannot
register. If all are taken, a new connection replaces the oldest."""


class ConnectionLimits:
    """The connections that have a place. ``hello_s``: how long a connection may take to send Hello.
    ``slice_ends``: the most connections that ``overdue`` returns."""

    def __init__(self, limits: Limits, hello_s: float, slice_ends: int) -> None:
        self._limits = limits
        self._hello_s = hello_s
        self._slice_ends = slice_ends
        self._seated: dict[int, int] = {}
        """Connection -> its user, for connections in ordinary places."""
        self._of_uid: Counter[int] = Counter()
        self._observers: dict[int, None] = {}
        """The connections in the extra places (``OBSERVERS``); the oldest is first."""
        self._silent: dict[int, float] = {}
        """The connections that have not sent Hello, with their deadlines for it; the oldest is
        first."""

    def admit(self, connection: ClientConnection, now: float) -> int | None:
        """Give a new connection a place. Returns the one that must be ended for that, if any. It is
        the new connection itself if no place can be freed."""
        self._silent[connection.id] = now + self._hello_s
        if not self._lacks(connection.uid):
            self._seat(connection)
            return None
        alike = self._of_uid[connection.uid] >= self._limits.sessions_per_uid
        for other in self._silent:
            if other in self._seated and (not alike or self._seated[other] == connection.uid):
                self._seat(connection)
                return other
        if not connection.own:
            return connection.id
        self._observers[connection.id] = None
        return next(iter(self._observers)) if len(self._observers) > OBSERVERS else None

    def greeted(self, connection: ClientConnection) -> None:
        """Record that a connection sent Hello."""
        self._silent.pop(connection.id, None)

    def check(self, connection: ClientConnection) -> None:
        """Check that a connection may register.

        Raises:
            Refused: ``limit``, if it is in an extra place and there is no ordinary one.
        """
        if connection.id in self._observers and (lacks := self._lacks(connection.uid)):
            raise Refused("limit", lacks)

    def take_place(self, connection: ClientConnection) -> None:
        """Move a connection that registers to an ordinary place. Call ``check`` before."""
        if self._observers.pop(connection.id, 0) is None:
            self._seat(connection)

    def leave(self, connection: ClientConnection) -> None:
        """Free the place of a connection that ended."""
        self._silent.pop(connection.id, None)
        self._observers.pop(connection.id, None)
        if self._seated.pop(connection.id, None) is not None:
            self._of_uid[connection.uid] -= 1
            if not self._of_uid[connection.uid]:
                del self._of_uid[connection.uid]

    def overdue(self, now: float) -> list[int]:
        """Connections past their deadline for Hello, at most ``slice_ends`` of them."""
        first = itertools.islice(self._silent.items(), self._slice_ends)
        return [connection for connection, due in first if due <= now]

    @property
    def next_due(self) -> float | None:
        """The first deadline for a Hello."""
        return next(iter(self._silent.values()), None)

    def _seat(self, connection: ClientConnection) -> None:
        self._seated[connection.id] = connection.uid
        self._of_uid[connection.uid] += 1

    def _lacks(self, uid: int) -> str:
        """Why there is no ordinary place for a connection of a user; empty if there is one."""
        if self._of_uid[uid] >= self._limits.sessions_per_uid:
            return f"user {uid} has {self._of_uid[uid]} sessions, which is all it may have"
        if len(self._seated) >= self._limits.sessions:
            return f"all {self._limits.sessions} sessions are taken"
        return ""
