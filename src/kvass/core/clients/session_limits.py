"""How many sessions there may be, in all and of one user, and which must end for another.

No user can take all places. A session that has not said Hello is ended if another needs its place.
The daemon's own user can always connect to look (``kvass status``). Only sessions that have not
registered are ended, because others may owe a commit or a release (law 3).
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Final

from kvass.core.clients.registry import ClientSession
from kvass.errors import Refused
from kvass.types import Limits

OBSERVERS: Final = 16
"""Places beyond the limits, for the daemon's own user. Who has one of them can look and not
register. If they are all taken, the one taken first is given to the next."""


class SessionLimits:
    """Which sessions have a place. ``hello_s``: how long a session may take to say Hello."""

    def __init__(self, limits: Limits, hello_s: float, slice_ends: int) -> None:
        self._limits = limits
        self._hello_s = hello_s
        self._slice_ends = slice_ends
        self._seated: dict[int, int] = {}
        """Session -> its user, without those of ``_observers``."""
        self._of_uid: Counter[int] = Counter()
        self._observers: dict[int, None] = {}
        """Sessions in the places of ``OBSERVERS``, the oldest first."""
        self._silent: dict[int, float] = {}
        """Sessions that have not said Hello, the oldest first, and when that becomes too long."""

    def admit(self, session: ClientSession, now: float) -> int | None:
        """Give a new session a place. Returns which session must end for it, perhaps itself."""
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
        self._silent.pop(session.id, None)

    def check(self, session: ClientSession) -> None:
        """Raises ``Refused`` (``limit``) if a session may only look."""
        if session.id in self._observers and (lacks := self._lacks(session.uid)):
            raise Refused("limit", lacks)

    def settle(self, session: ClientSession) -> None:
        """It registers, which ``check`` allowed."""
        if self._observers.pop(session.id, 0) is None:
            self._seat(session)

    def leave(self, session: ClientSession) -> None:
        self._silent.pop(session.id, None)
        self._observers.pop(session.id, None)
        if self._seated.pop(session.id, None) is not None:
            self._of_uid[session.uid] -= 1
            if not self._of_uid[session.uid]:
                del self._of_uid[session.uid]

    def overdue(self, now: float) -> list[int]:
        """Some of the sessions that should have said Hello by now; the next tick has more."""
        first = itertools.islice(self._silent.items(), self._slice_ends)
        return [session for session, due in first if due <= now]

    @property
    def next_due(self) -> float | None:
        return next(iter(self._silent.values()), None)

    def _seat(self, session: ClientSession) -> None:
        self._seated[session.id] = session.uid
        self._of_uid[session.uid] += 1

    def _lacks(self, uid: int) -> str:
        """Why there is no place for one more session of a user; empty if there is one."""
        if self._of_uid[uid] >= self._limits.sessions_per_uid:
            return f"user {uid} has {self._of_uid[uid]} sessions, which is all it may have"
        if len(self._seated) >= self._limits.sessions:
            return f"all {self._limits.sessions} sessions are taken"
        return ""
