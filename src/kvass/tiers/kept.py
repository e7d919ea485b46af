"""The notes that a tier has read or set in this life, for a server that may evict them.

Law of this file: no I/O; whoever asks what is due gets it, and says later what the server had. Of
two values the higher one counts: a server that has a lower one was put back to an older state.

A server that keeps its capacity by ``allkeys-lru`` takes notes for what is needed least, since a
namespace's epoch is read once in a daemon's life. Without it no record is found again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Kept:
    """``due`` gives each ``every_s`` all that is kept, and nothing in between."""

    def __init__(self, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s, self._clock = every_s, clock
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._next = clock() + every_s

    def remember(self, name: str, value: bytes) -> None:
        """It was set."""
        with self._lock:
            self._values[name] = value

    def due(self) -> list[tuple[str, bytes]]:
        """What shall be shown to the server now; whoever is given it does it alone."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                return []
            self._next = now + self._every_s
            return list(self._values.items())

    def found(self, name: str, value: bytes) -> None:
        """The server has ``value``."""
        with self._lock:
            self._values[name] = max(value, self._values.get(name, b""))
