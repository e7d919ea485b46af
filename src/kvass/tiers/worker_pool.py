"""A thread pool for a tier that works on many records at once.

Law of this file: when a call returns or raises, all work that it began has ended, because the
memory belongs to the caller.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from kvass.errors import TierDown

T = TypeVar("T")


class WorkerPool:
    """``size`` threads. They help the threads that call, which work as well; a call has at most
    ``size`` pieces of its work done at a time.

    With ``room``, all calls together do at most ``size`` pieces of work at a time, which need at
    most ``room`` bytes; one that needs more is done alone.

    After ``give_up`` pieces in a row that raised, or one that took ``long_s`` seconds to raise, a
    call begins no more: a server that answers nobody costs the time of one request, not of a
    thousand.
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
        self._name = name
        self._size, self._room, self._give_up, self._long_s = size, room, give_up, long_s
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name)
        self._busy = self._bytes = 0
        self._order = threading.Lock()  # what needs much room is not overtaken by what needs less
        self._changed = threading.Condition()

    def each(self, work: Callable[[int], T], needs: Sequence[int]) -> list[T | TierDown]:
        """``work(i)`` for every ``i`` in order; ``TierDown`` for one that raised it or ``OSError``.
        What else ``work`` raises is raised here. ``needs[i]``: the bytes of ``room`` it takes."""
        results: list[T | TierDown] = [TierDown("it was not begun")] * len(needs)
        left = iter(range(len(needs)))  # shared: each thread takes the next piece when it is free
        failures = 0
        lost: TierDown | None = None

        def run() -> None:
            nonlocal failures, lost
            for i in left:
                with self._place(needs[i]):
                    begun = time.monotonic()
                    try:
                        results[i] = lost or work(i)
                        failures = 0
                    except (TierDown, OSError) as error:
                        # without the frames, which hold the caller's memory
                        results[i] = failure = as_down(self._name, error)
                        failures += 1
                        if failures >= self._give_up or time.monotonic() - begun >= self._long_s:
                            lost = failure

        helpers = [self._threads.submit(run) for _ in range(min(self._size, len(needs)) - 1)]
        try:
            run()
        finally:
            wait([helper for helper in helpers if not helper.cancel()])  # a cancelled one never ran
        for helper in helpers:
            if not helper.cancelled():
                helper.result()
        return results

    @contextmanager
    def _place(self, need: int) -> Iterator[None]:
        """A place and ``need`` bytes of room, first come first served."""
        if self._room is None:
            yield
            return
        room, need = self._room, min(need, self._room)
        with self._order, self._changed:
            self._changed.wait_for(lambda: self._busy < self._size and self._bytes + need <= room)
            self._busy += 1
            self._bytes += need
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._bytes -= need
                self._changed.notify_all()

    def close(self) -> None:
        self._threads.shutdown()


def as_down(name: str, error: TierDown | OSError) -> TierDown:
    """The error of a tier's own that says the same."""
    if isinstance(error, TierDown):
        return TierDown(str(error))
    return TierDown(f"{name}: {error.strerror or error}")
