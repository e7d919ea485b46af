"""The limits on sessions, in all and per user, and which session is ended at a limit.

Law of this file: no user can take all places (law 12).

A *place* is one of the limited number of sessions. A session that has not sent Hello is ended if
another one needs its place. The daemon's own user can always connect to read the status (``kvass
status``). A session that has registered is never ended to free its place, because it may owe a
commit or a release (law 3).
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Final

from kvass.core.clients.registry import ClientSession
from kvass.errors import Refused
from kvass.types import Limits

OBSERVERS: Final = 16
"""The number of extra places for the daemon's own user. A session in one of them cannot register.
If all are taken, a new session replaces the oldest."""


class SessionLimits:
    """The sessions that have a place. ``hello_s``: how long a session may take to send Hello.
    ``slice_ends``: the most sessions that ``overdue`` returns."""

    def __init__(self, limits: Limits, hello_s: float, slice_ends: int) -> None:
        self._limits = limits
        self._hello_s = hello_s
        self._slice_ends = slice_ends
        self._seated: dict[int, int] = {}
        """Session -> its user, for sessions in ordinary places."""
        self._of_uid: Counter[int] = Counter()
        self._observers: dict[int, None] = {}
        """The sessions in the extra places (``OBSERVERS``); the oldest is first."""
        self._silent: dict[int, float] = {}
        """The sessions that have not sent Hello, with their deadlines for it; the oldest is
        first."""

    def admit(self, session: ClientSession, now: float) -> int | None:
        """Give a new session a place. Returns the session that must be ended for that, if any. It
        is the new session itself if no place can be freed."""
        self._silent[session.id] = now + self._hello_s
        if not self._lacks(session.uid):
            self._seat(session)
            return None
        alike = self._of_uid[session.uid] >= self._limits.sessions_per_uid
        for other in self._silent:
            if other in self._seated and (not alike or self._seated[other] == session.uid):
                self._seat(session)
                return other
        if not session.own:
            return session.id
        self._observers[session.id] = None
        return next(iter(self._observers)) if len(self._observers) > OBSERVERS else None

    def greeted(self, session: ClientSession) -> None:
        """Record that a session sent Hello."""
        self._silent.pop(session.id, None)

    def check(self, session: ClientSession) -> None:
        """Check that a session may register.

        Raises:
            Refused: ``limit``, if it is in an extra place and there is no ordinary one.
        """
        if session.id in self._observers and (lacks := self._lacks(session.uid)):
            raise Refused("limit", lacks)

    def take_place(self, session: ClientSession) -> None:
        """Move a session that registers to an ordinary place. Call ``check`` before."""
        if self._observers.pop(session.id, 0) is None:
            self._seat(session)

    def leave(self, session: ClientSession) -> None:
        """Free the place of a session that ended."""
        self._silent.pop(session.id, None)
        self._observers.pop(session.id, None)
        if self._seated.pop(session.id, None) is not None:
            self._of_uid[session.uid] -= 1
            if not self._of_uid[session.uid]:
                del self._of_uid[session.uid]

    def overdue(self, now: float) -> list[int]:
        """Sessions past their deadline for Hello, at most ``slice_ends`` of them."""
        first = itertools.islice(self._silent.items(), self._slice_ends)
        return [session for session, due in first if due <= now]

    @property
    def next_due(self) -> float | None:
        """The first deadline for a Hello."""
        return next(iter(self._silent.values()), None)

    def _seat(self, session: ClientSession) -> None:
        self._seated[session.id] = session.uid
        self._of_uid[session.uid] += 1

    def _lacks(self, uid: int) -> str:
        """Why there is no ordinary place for a session of a user; empty if there is one."""
        if self._of_uid[uid] >= self._limits.sessions_per_uid:
            return f"user {uid} has {self._of_uid[uid]} sessions, which is all it may have"
        if len(self._seated) >= self._limits.sessions:
            return f"all {self._limits.sessions} sessions are taken"
        return ""
