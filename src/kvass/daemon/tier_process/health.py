"""The state machine that decides whether requests may be sent to a backend.

Law of this file: pure. The caller passes the time (seconds, monotonic) and holds the lock.

========  ==========================  ==============================================================
state     accepts requests            it ends when
========  ==========================  ==============================================================
UP        yes                         a request fails: DOWN
DOWN      no; after a pause: one      the pause is over and one request begins: RETRYING
RETRYING  no                          that request succeeds: UP; it fails: DOWN, with a longer pause
========  ==========================  ==============================================================

It is used twice. In a tier's process each kind of work has a ``Health``, and a request is a call of
the tier (``executor``). In the daemon each tier has one, and a request is a start of the tier's
process (``supervisor``).
"""

from __future__ import annotations

import math
from enum import Enum


class HealthState(Enum):
    UP = "up"
    DOWN = "down"
    RETRYING = "retrying"


class Health:
    """The health of one backend.

    Pauses double from ``first_pause_s`` to ``longest_pause_s``. If the backend was up for at least
    ``steady_s`` and for at least the length of the last pause, the next pause is ``first_pause_s``.
    """

    def __init__(
        self,
        first_pause_s: float,
        longest_pause_s: float,
        steady_s: float = 0.0,
        state: HealthState = HealthState.UP,
    ) -> None:
        self.state = state
        self.pause_s = first_pause_s / 2
        """The last pause; the next one is twice as long."""
        self._first_s, self._longest_s, self._steady_s = first_pause_s, longest_pause_s, steady_s
        self._retry_at = self._up_since = -math.inf
        self._changes = 0

    def accepts(self, now: float) -> bool:
        if self.state is HealthState.DOWN:
            return now >= self._retry_at
        return self.state is HealthState.UP

    def begin(self, now: float) -> int | None:
        """Begin a request. Returns the number to pass to ``end``, or None if it may not be sent."""
        if not self.accepts(now):
            return None
        if self.state is HealthState.DOWN:
            self.retry()
        return self._changes

    def end(self, begun: int, ok: bool, now: float) -> bool:
        """End a request. Returns whether that changed the state.

        ``begun`` is what ``begin`` returned. The result of a request that began before the last
        change is ignored.
        """
        if begun != self._changes or (ok and self.state is HealthState.UP):
            return False
        if ok:
            self.succeeded(now)
        else:
            self.failed(now)
        return True

    def retry(self) -> None:
        """Begin an attempt, whether or not the pause is over."""
        self.state = HealthState.RETRYING

    def succeeded(self, now: float) -> None:
        self._changes += 1
        self.state, self._up_since = HealthState.UP, now

    def failed(self, now: float) -> None:
        """Mark the backend as down, and compute the pause before the next attempt."""
        self._changes += 1
        up_s = now - self._up_since if self.state is HealthState.UP else -math.inf
        steady = up_s >= max(self.pause_s, self._steady_s)
        self.pause_s = self._first_s if steady else min(2 * self.pause_s, self._longest_s)
        self.state = HealthState.DOWN
        self._retry_at = now + self.pause_s
