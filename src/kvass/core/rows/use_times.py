"""When rows were used, told from their stamps: no row has a time of its own.

Law of this file: memory is bounded. Of long ago it knows less exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

STEP_S: Final = 1.0
_MOST: Final = 2048
_RECENT: Final = 512


class UseTimes:
    """Marks: which stamp was the next to be given, and when; one each ``STEP_S`` at most."""

    def __init__(self) -> None:
        self._stamps: list[int] = []
        self._times: list[float] = []
        self.now = float("-inf")

    def mark(self, clock: int, now: float) -> None:
        """It is ``now``, and ``clock`` is the next stamp."""
        self.now = now
        if self._times and now - self._times[-1] < STEP_S:
            return
        if self._stamps and self._stamps[-1] == clock:
            self._times[-1] = now
            return
        self._stamps.append(clock)
        self._times.append(now)
        if len(self._stamps) > _MOST:
            del self._stamps[1:-_RECENT:2], self._times[1:-_RECENT:2]

    def age(self, stamp: int) -> float:
        """Seconds since ``stamp`` was given: at most ``STEP_S`` more than it is."""
        return self.now - self._times[max(0, bisect_right(self._stamps, stamp) - 1)]
