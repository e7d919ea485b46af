"""The threads of a tier that works on many records at once.

What a call began has ended when it returns or raises, whatever happens: its memory is its caller's.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from kvass.errors import TierDown

T = TypeVar("T")


class WorkerPool:
    """``size`` threads. They help the threads that call, which work as well.

    With ``room``, all calls together do at most ``size`` pieces of work at a time, which need at
    most ``room`` bytes; one that needs more is done alone.

    After ``give_up`` pieces in a row that raised ``TierDown``, or after one that took ``long_s``
    seconds to do so, a call begins no more: a server that answers nobody costs the time of one
    request, not of a thousand.
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        room: int | None = None,
        give_up: float = math.inf,
        long_s: float = math.inf,
    ) -> None:
        self.give_up, self.long_s = give_up, long_s
        self._size, self._room = size, room
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name)
        self._busy = self._bytes = 0
        self._order = threading.Lock()  # what needs much room is not overtaken by what needs less
        self._changed = threading.Condition()

    def each(
        self, work: Callable[[int], T], needs: Sequence[int], at_once: int | None = None
    ) -> list[T | TierDown]:
        """``work(i)`` for every ``i``, or the ``TierDown`` that it raised, in order.

        ``needs[i]``: the bytes of ``room`` that ``work(i)`` takes; ``at_once``: pieces of this call
        at a time, at most ``size``. What else ``work`` raises is raised here.
        """
        batch = _Batch(self, work, needs)
        helpers = [
            self._threads.submit(batch.run)
            for _ in range(min(at_once or self._size, len(needs)) - 1)
        ]
        try:
            batch.run()
        finally:
            wait([helper for helper in helpers if not helper.cancel()])  # a cancelled one never ran
        for helper in helpers:
            if not helper.cancelled():
                helper.result()
        return batch.results

    def enter(self, need: int) -> None:
        """Wait for a place and for ``need`` bytes of room, first come first served."""
        if self._room is not None:
            room, need = self._room, min(need, self._room)
            with self._order, self._changed:
                self._changed.wait_for(
                    lambda: self._busy < self._size and self._bytes + need <= room
                )
                self._busy += 1
                self._bytes += need

    def leave(self, need: int) -> None:
        """Give back what ``enter`` took."""
        if self._room is not None:
            with self._changed:
                self._busy -= 1
                self._bytes -= min(need, self._room)
                self._changed.notify_all()

    def close(self) -> None:
        """After the last call."""
        self._threads.shutdown()


class _Batch(Generic[T]):
    """The work of one call. Every thread takes the next piece when it is free."""

    def __init__(self, pool: WorkerPool, work: Callable[[int], T], needs: Sequence[int]) -> None:
        self._pool, self._work, self._needs = pool, work, needs
        self.results: list[T | TierDown] = [TierDown("it was not begun")] * len(needs)
        self._left = iter(range(len(needs)))
        self._lock = threading.Lock()
        self._failures = 0
        self._lost: TierDown | None = None
        """Why nothing more is begun."""

    def run(self) -> None:
        for i in self._left:
            self._pool.enter(self._needs[i])
            try:
                self.results[i] = self._lost or self._attempt(i)
            finally:
                self._pool.leave(self._needs[i])

    def _attempt(self, i: int) -> T | TierDown:
        begun = time.monotonic()
        try:
            result = self._work(i)
        except TierDown as error:
            failure = TierDown(str(error))  # without the frames, which hold the caller's memory
            with self._lock:
                self._failures += 1
                took_s = time.monotonic() - begun
                if self._failures >= self._pool.give_up or took_s >= self._pool.long_s:
                    self._lost = failure
            return failure
        if self._failures:
            with self._lock:
                self._failures = 0
        return result
