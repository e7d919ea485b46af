"""When a backend in trouble is left alone, and when it is tried again.

Law of this file: no clock and no lock; the caller has both. After trouble nothing is let through
for a while, then one call alone, whose outcome decides. What was under way before says nothing new.
"""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 0.25
MOST_S: Final = 30.0


class Breaker:
    """Closed: calls go through. Open: none does, but for one at a time that tries."""

    def __init__(self) -> None:
        self._open_until: float | None = None
        self._open_s = 0.0
        self._closed_at = float("-inf")
        self._trying = False
        self._next = 0
        self._news = 0
        """Calls of lower numbers began before it last opened or closed."""

    @property
    def closed(self) -> bool:
        """Whether calls go through."""
        return self._open_until is None

    def refuses(self, now: float) -> bool:
        """Whether a call that begins now would be turned away."""
        return self._open_until is not None and (self._trying or now < self._open_until)

    def enter(self, now: float) -> int | None:
        """Begin a call: the number to ``leave`` with; None: turned away."""
        if self.refuses(now):
            return None
        self._trying = self._open_until is not None
        self._next += 1
        return self._next - 1

    def leave(self, number: int, well: bool, now: float) -> bool:
        """End a call; whether that opened or closed the breaker, or kept it open for longer."""
        if number < self._news or (well and self.closed):
            return False
        self._trying = False
        self._news = self._next
        if well:
            self._open_until, self._closed_at = None, now
            return True
        calm = self.closed and now - self._closed_at >= self._open_s
        self._open_s = FIRST_S if calm else min(2 * self._open_s, MOST_S)
        self._open_until = now + self._open_s
        return True
