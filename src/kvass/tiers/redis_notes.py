"""The notes that a Redis tier has to refresh, for a server that may evict them. No I/O.

A server that keeps its capacity by ``allkeys-lru`` would evict notes first, since the epoch of a
namespace is read once in a daemon's life. Without its epoch no record is found again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class NotesToRefresh:
    """What a tier has read or set in this life; ``due`` gives all of it every ``every_s``.

    Of two values of a note the higher one is kept: a server that has a lower one went back to an
    older state.
    """

    def __init__(self, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s, self._clock = every_s, clock
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._next = clock() + every_s

    def was_set(self, name: str, value: bytes) -> None:
        """The server has ``value`` because we set it."""
        with self._lock:
            self._values[name] = value

    def was_read(self, name: str, value: bytes) -> None:
        """The server has ``value``."""
        with self._lock:
            self._values[name] = max(value, self._values.get(name, b""))

    def due(self) -> list[tuple[str, bytes]]:
        """What the caller shall refresh now; nothing if it is too soon, or another caller does."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                return []
            self._next = now + self._every_s
            return list(self._values.items())
