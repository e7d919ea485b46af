"""A thread pool for a tier that works on many records at once.

Law of this file: when ``each`` returns or raises, all work that it began has ended, because the
buffers belong to its caller.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

from kvass.errors import ItemUnreadable, TierDown

T = TypeVar("T")


class WorkerPool:
    """A pool of ``size`` threads. The thread that calls ``each`` works, too. One call runs at most
    ``size`` pieces of work at a time.

    With ``max_bytes``, all calls together run at most ``size`` pieces of work at a time, and these
    use at most ``max_bytes``. A piece that needs more runs alone.

    A call begins no more pieces after ``max_failures`` in a row have raised, or after one has
    raised that ran for ``slow_failure_s`` or longer. So a server that does not answer costs the
    time of one request, not of a thousand. An ``ItemUnreadable`` is no such failure: the next
    record may be well.
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        max_bytes: int | None = None,
        max_failures: float = math.inf,
        slow_failure_s: float = math.inf,
    ) -> None:
        self._name, self._size, self._max_bytes = name, size, max_bytes
        self._max_failures, self._slow_failure_s = max_failures, slow_failure_s
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=name)
        self._busy = self._bytes = 0
        self._order = threading.Lock()  # a small piece does not overtake a large one that waits
        self._changed = threading.Condition()

    def each(self, work: Callable[[int], T], needs: Sequence[int]) -> list[T | TierDown]:
        """Call ``work(i)`` for each ``i``, begun in order, and return the results. ``needs[i]``:
        the memory that call ``i`` uses, in bytes.

        If ``work(i)`` raises ``TierDown`` or ``OSError``, its result is a ``TierDown``. Any other
        exception is raised by this method.
        """
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
                        # A new exception, without the frames that refer to the caller's buffers.
                        results[i] = failure = as_down(self._name, error)
                        failures += not isinstance(error, ItemUnreadable)
                        slow = time.monotonic() - begun >= self._slow_failure_s
                        if slow or failures >= self._max_failures:
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
        """Wait until a piece of work that uses ``need`` bytes may run, and count it while it runs.
        First come, first served."""
        if self._max_bytes is None:
            yield
            return
        need = min(need, self._max_bytes)
        left = self._max_bytes - need
        with self._order, self._changed:
            self._changed.wait_for(lambda: self._busy < self._size and self._bytes <= left)
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
    """Return a new ``TierDown`` with the text of ``error``, and of its kind."""
    if isinstance(error, TierDown):
        return type(error)(str(error))
    return TierDown(f"{name}: {error.strerror or error}")
