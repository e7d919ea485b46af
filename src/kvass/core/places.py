"""Who has a place: how many sessions there may be, of whom, and who must go for another.

Law of this file: no user has all places; who has not said Hello gives way to others; and the
daemon's own user can always look. It says who must go; the machine ends that session. Nobody is
named here who may owe a commit or a release (law 3): only who has not registered.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Final

from kvass.core.registry import Session
from kvass.errors import Refused
from kvass.types import Limits

LOOKERS: Final = 16
"""Places beyond the limits, for the daemon's own user. Who has one of them can look (``kvass
status``) and not register. If they are all taken, the one taken first is given to the next."""


class Places:
    """Which sessions have one. ``hello_s``: how long a session may take to say Hello."""

    def __init__(self, limits: Limits, hello_s: float, slice_ends: int = 64) -> None:
        self._limits = limits
        self._hello_s = hello_s
        self._slice_ends = slice_ends
        self._seated: dict[int, int] = {}
        """Session -> its user, without those of ``_looking``."""
        self._of_uid: Counter[int] = Counter()
        self._looking: dict[int, None] = {}
        """Sessions in the places of ``LOOKERS``, the oldest first."""
        self._silent: dict[int, float] = {}
        """Sessions that have not said Hello, the oldest first, and when that becomes too long."""

    def admit(self, one: Session, now: float) -> int | None:
        """Give a new session a place. Which session must go then, if any; perhaps it is itself."""
        self._silent[one.id] = now + self._hello_s
        if not self._lacks(one.uid):
            self._seat(one)
            return None
        alike = self._of_uid[one.uid] >= self._limits.sessions_per_uid
        for other in self._silent:
            if other in self._seated and (not alike or self._seated[other] == one.uid):
                self._seat(one)
                return other
        if not one.own:
            return one.id
        self._looking[one.id] = None
        return next(iter(self._looking)) if len(self._looking) > LOOKERS else None

    def greeted(self, one: Session) -> None:
        """It said Hello."""
        self._silent.pop(one.id, None)

    def check(self, one: Session) -> None:
        """Raises ``Refused`` (``limit``) if a session may only look."""
        if one.id in self._looking and (lacks := self._lacks(one.uid)):
            raise Refused("limit", lacks)

    def settle(self, one: Session) -> None:
        """It registers, which ``check`` allowed."""
        if self._looking.pop(one.id, 0) is None:
            self._seat(one)

    def leave(self, one: Session) -> None:
        """Its place is free."""
        self._silent.pop(one.id, None)
        self._looking.pop(one.id, None)
        if self._seated.pop(one.id, None) is not None:
            self._of_uid[one.uid] -= 1
            if not self._of_uid[one.uid]:
                del self._of_uid[one.uid]

    def overdue(self, now: float) -> list[int]:
        """Some of the sessions that should have said Hello by now; the next tick has more."""
        first = itertools.islice(self._silent.items(), self._slice_ends)
        return [session for session, due in first if due <= now]

    @property
    def next_due(self) -> float | None:
        """When ``overdue`` will name somebody."""
        return next(iter(self._silent.values()), None)

    def _seat(self, one: Session) -> None:
        self._seated[one.id] = one.uid
        self._of_uid[one.uid] += 1

    def _lacks(self, uid: int) -> str:
        """Why there is no place for one more session of a user; empty if there is one."""
        if self._of_uid[uid] >= self._limits.sessions_per_uid:
            return f"user {uid} has {self._of_uid[uid]} sessions, which is all it may have"
        if len(self._seated) >= self._limits.sessions:
            return f"all {self._limits.sessions} sessions are taken"
        return ""
