"""The times at which stamps were assigned, from which the age of a row follows.

Law of this file: memory is bounded. Older times are less exact.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Final

STEP_S: Final = 0.25
_MOST: Final = 8192
_RECENT: Final = 2048


class UseTimes:
    """A sample of (next stamp, time) pairs, at most one per ``STEP_S``."""

    def __init__(self) -> None:
        self._stamps, self._times = array("q"), array("d")
        self.now = float("-inf")
        self.begun = 0
        """The next stamp when the present step began."""

    def mark(self, clock: int, now: float) -> None:
        """Record that ``clock`` is the next stamp at time ``now``."""
        self.now, self.begun = now, clock
        if self._times and now - self._times[-1] < STEP_S:
            return
        if self._stamps and self._stamps[-1] == clock:
            self._times[-1] = now
            return
        self._stamps.append(clock)
        self._times.append(now)
        if len(self._stamps) > _MOST:
            del self._stamps[1:-_RECENT:2], self._times[1:-_RECENT:2]

    def since(self, seconds: float) -> int:
        """A stamp: none below it was assigned in the last ``seconds``. While stamps are assigned
        all the time, those are below it that are older by twice ``STEP_S``."""
        return self._stamps[max(0, bisect_right(self._times, self.now - seconds) - 1)]

    def age(self, stamp: int) -> float:
        """Seconds since ``stamp`` was assigned, at most ``STEP_S`` too many for recent stamps."""
        return self.now - self._times[max(0, bisect_right(self._stamps, stamp) - 1)]
