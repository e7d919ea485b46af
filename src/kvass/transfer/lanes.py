"""Jobs on their way to a device, and what flies of them.

Law of this file: what flies on a lane is bounded, in bytes and in descriptors, each lane for
itself: a driver that is given too many for a stream that still waits may keep the thread that gives
them, and its locks, until the engine's work is done. A batch that alone is more than that goes all
the same, once nothing else flies.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Final

from kvass.transfer.base import Job, Outcome
from kvass.transfer.runtime import Batch, Event, Fault, Kind, Stream

FLYING_BYTES: Final = 256 << 20
"""Given to a stream and not over: enough for the 5 ms that another thread may hold the GIL."""
FLYING_RUNS: Final = 8192
"""Descriptors, likewise; of short runs these are less than 5 ms. Twice the largest batch."""


class Task:
    """A job on its way. ``flying`` counts its batches on the device."""

    def __init__(self, job: Job, since: float, order: Event | Fault) -> None:
        self.job = job
        self.since = since
        self.order = order
        self.ordered = False
        self.batches = deque[Batch]()
        self.more: Iterator[Batch] | None = None
        """Makes the batches after those, once it was begun."""
        self.begun = False
        self.flying = 0
        self.outcome: Outcome | None = None
        self.error = ""
        self.settled = False

    def end(self, outcome: Outcome, error: str = "") -> None:
        """Nothing more of it will be given to the device; the first reason counts."""
        if self.outcome is None:
            self.outcome, self.error = outcome, error
        self.batches.clear()
        self.begun, self.more = True, None

    @property
    def given(self) -> bool:
        """Whether all of it was given to the device, or never will be."""
        return self.begun and not self.batches and self.more is None


class Lane:
    """Copies of one kind: a stream, the jobs that wait, the batches that fly (oldest first).

    Whoever has it guards ``queue`` and ``moved_bytes``; the rest is the copy thread's.
    """

    def __init__(self, kind: Kind, most_bytes: int, most_runs: int) -> None:
        self.kind: Kind = kind
        self.stream: Stream | None = None
        self.queue: list[tuple[int, int, Task]] = []
        self.flying: deque[tuple[Event | None, Task, Batch]] = deque()
        self.moved_bytes = 0
        self.mute = False
        """Events say nothing: the end of what flies shows when the stream is empty."""
        self.silent_s: float | None = None
        """Since when the stream does not say even that."""
        self._most_bytes, self._most_runs = most_bytes, most_runs
        self._bytes = self._runs = 0

    def drop(self, task: Task) -> None:
        """It is in the queue no longer."""
        self.queue = [entry for entry in self.queue if entry[-1] is not task]
        heapq.heapify(self.queue)

    @property
    def full(self) -> bool:
        """Whether enough bytes fly."""
        return self._bytes >= self._most_bytes

    def has_room(self, batch: Batch) -> bool:
        """Whether as many descriptors more may fly."""
        if not self.flying:
            self.mute = False
            return True
        return not self.mute and self._runs + len(batch.bytes) <= self._most_runs

    def take_off(self, event: Event | None, task: Task, batch: Batch) -> None:
        """``event`` comes after ``batch``, if there was one to be had."""
        self.flying.append((event, task, batch))
        self.mute = self.mute or event is None
        task.flying += 1
        self._bytes += batch.total
        self._runs += len(batch.bytes)

    def land(self) -> tuple[Event | None, Task, Batch]:
        """The oldest is over."""
        event, task, batch = self.flying.popleft()
        task.flying -= 1
        self._bytes -= batch.total
        self._runs -= len(batch.bytes)
        return event, task, batch

    def orders(self, task: Task) -> set[Event]:
        """The places in the engine's stream for which this stream may have to wait, once it waits
        for that of ``task``: jobs may have overtaken one another."""
        tasks = {task, *(other for _, other, _ in self.flying)}
        return {one.order for one in tasks if not isinstance(one.order, Fault)}
