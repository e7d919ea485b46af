"""How fast a store and this machine's processor are, as seen by the calls that are made anyway."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

_ENOUGH_BYTES: Final = 8 << 20
"""Fewer bytes say nothing yet."""
_REMEMBERED_BYTES: Final = 512 << 20
"""At that many, what was measured counts half. So a rate follows what changes."""


class Rate:
    """The bytes a second of some kind of work while any of it runs. Thread-safe.

    ``each``: of one thread. Otherwise of all together: what ran at the same time took that time
    once.
    """

    def __init__(self, each: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._each, self._clock = each, clock
        self._lock = threading.Lock()
        self._running = 0
        self._since = self._bytes = self._seconds = 0.0

    def timed(self, work: Callable[[], T], moved: Callable[[T], int]) -> T:
        """Do ``work``, and return its result, of which ``moved`` says how many bytes it took. None:
        it took no time, either."""
        begun = self._clock()
        with self._lock:
            if not self._running:
                self._since = begun
            self._running += 1
        size = 0
        try:
            result = work()
            size = moved(result)
        finally:
            now = self._clock()
            with self._lock:
                self._running -= 1
                if size:
                    self._bytes += size
                    self._seconds += now - (begun if self._each else self._since)
                    self._since = now
                if self._bytes > _REMEMBERED_BYTES:
                    self._bytes, self._seconds = self._bytes / 2, self._seconds / 2
        return result

    def value(self) -> float | None:
        """Return the bytes a second. None if too little was measured."""
        with self._lock:
            if self._bytes < _ENOUGH_BYTES or not self._seconds:
                return None
            return self._bytes / self._seconds
