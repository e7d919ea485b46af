"""Populates the arena in the background: threads of low priority fault in its pages, without the
GIL, while the daemon serves.

Law of this file: all that is below a mark is populated. A page is charged to the cgroup of the
process that touches it first: here, of the daemon. If the kernel has no memory for a page, the
daemon ends, because a process that touches the page later, such as an engine, would be killed
(SIGBUS).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvass.arena.memory import SLICE_BYTES, Arena
from kvass.arena.nodes import by_node, nodes
from kvass.processes import lower_priority

MOST_THREADS: Final = 16
CPUS_PER_THREAD: Final = 4
"""The other CPUs are left to the engines, which start at the same time."""
MARKS: Final = 256
"""The most times that the mark is told. Each connection that maps the arena gets each of them."""
_NICE: Final = 5

Cpus = set[int]


def thread_cpus() -> list[Cpus]:
    """For each thread to start, the CPUs that it may use. On several nodes the threads are spread
    over their CPUs, so that all nodes' memory is written at once."""
    allowed = os.sched_getaffinity(0)
    count = min(MOST_THREADS, max(1, len(allowed) // CPUS_PER_THREAD))
    near = [here for cpus in nodes().values() if (here := cpus & allowed)] or [allowed]
    return [near[number % len(near)] for number in range(count)]


class Populating:
    """The threads that populate ``arena``, one for each of ``cpus``.

    They call ``told`` with the mark as it rises. If there is no memory, the last thread calls
    ``failed`` with the bytes that there was memory for, and the error. ``by_node`` has the bytes on
    each NUMA node, once all of the arena is populated.
    """

    def __init__(
        self,
        arena: Arena,
        told: Callable[[int], None],
        failed: Callable[[int, OSError], None],
        cpus: Sequence[Cpus],
    ) -> None:
        self._arena, self._told, self._failed = arena, told, failed
        self._slice = max(SLICE_BYTES, arena.page_bytes)
        self._step = max(1, arena.size // MARKS // self._slice)
        self._slices = -(-arena.size // self._slice)
        self.by_node: dict[int, int] = {}
        self._stopping = threading.Event()
        # Guarded by _lock.
        self._lock = threading.Lock()
        self._next = self._whole = self._said = 0
        """Slices: taken, populated without a gap, told."""
        self._ahead = set[int]()
        """Slices that were populated before an earlier one."""
        self._error: tuple[int, OSError] | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(each,), name="kvass-populate") for each in cpus
        ]
        self._running = len(self._threads)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop after the slices that are being populated, and wait for the threads."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, cpus: Cpus) -> None:
        lower_priority(_NICE)
        with suppress(OSError):  # a CPU went away
            os.sched_setaffinity(0, cpus)
        while (number := self._take()) is not None:
            lo = number * self._slice
            try:
                self._arena.populate(lo, min(lo + self._slice, self._arena.size))
            except OSError as error:
                self._lacks(lo, error)
                break
            self._done(number)
        self._ended()

    def _take(self) -> int | None:
        with self._lock:
            number = self._next
            if number == self._slices or self._error is not None or self._stopping.is_set():
                return None
            self._next += 1
            return number

    def _done(self, number: int) -> None:
        with self._lock:
            self._ahead.add(number)
            while self._whole in self._ahead:
                self._ahead.remove(self._whole)
                self._whole += 1
            if self._whole >= min(self._said + self._step, self._slices) > self._said:
                self._said = self._whole
                self._told(min(self._whole * self._slice, self._arena.size))

    def _lacks(self, lo: int, error: OSError) -> None:
        with self._lock:
            if self._error is None or lo < self._error[0]:
                self._error = lo, error

    def _ended(self) -> None:
        with self._lock:
            self._running -= 1
            last = not self._running
        if last and self._error is not None:
            self._failed(*self._error)
        elif last and self._whole == self._slices:
            self.by_node = by_node(self._arena)
