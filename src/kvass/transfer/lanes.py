"""The jobs of one kind, and their batches in flight on a stream.

What is in flight is bounded, in bytes and in copies, for each kind on its own: a driver that is
given too many for a stream that still waits may block the caller, with its locks held, until the
engine's work is done.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Final

from kvass.transfer.base import Job, Kind, Outcome
from kvass.transfer.runtime import Batch, Event, Fault, Stream

FLYING_BYTES: Final = 256 << 20
"""Enough for the 5 ms that another thread may hold the GIL."""


class Task:
    """A job on its way. ``order`` is its place in the engine's stream; ``ordered``: the lane's
    stream waits for it. ``queued``: there may be more to give. ``flying`` counts its batches on the
    device."""

    def __init__(self, job: Job, since: float, order: Event | Fault, place: int) -> None:
        self.job, self.since, self.order, self.place = job, since, order, place
        self.ordered = False
        self.queued = True
        self.more: Iterator[Batch] | None = None
        self.next: Batch | None = None
        self.flying = 0
        self.outcome: Outcome | None = None
        self.error = ""

    def end(self, outcome: Outcome, error: str = "") -> None:
        """Nothing more of it will be given to the device; the first reason counts."""
        if self.outcome is None:
            self.outcome, self.error = outcome, error
        self.next = None


class Lane:
    """Copies of one kind: a stream, the jobs that wait, the batches in flight (oldest first).

    The mover's lock guards ``queue`` and ``moved_bytes``; the rest is the copy thread's.
    """

    def __init__(self, kind: Kind, most_bytes: int, most_runs: int) -> None:
        self.kind: Kind = kind
        self.stream: Stream | None = None
        self.queue: list[Task] = []
        self.flying: deque[tuple[Event, Task, Batch]] = deque()
        self.moved_bytes = 0
        self._most_bytes, self._most_runs = most_bytes, most_runs
        self._bytes = self._runs = 0

    def push(self, job: Job, since: float, order: Event | Fault) -> None:
        """Queue a job by its fair finish, as ``HostMover`` does."""
        task = Task(job, since, order, self.moved_bytes + job.bytes)
        insort(self.queue, task, key=lambda task: task.place)

    def drop(self, task: Task) -> None:
        """All of it was given to the device, or never will be."""
        task.queued = False
        self.queue.remove(task)

    def has_room(self, batch: Batch) -> bool:
        """Whether it may be in flight, too."""
        runs = self._runs + len(batch.bytes)
        return self._bytes < self._most_bytes and runs <= self._most_runs

    def take_off(self, event: Event, task: Task, batch: Batch) -> None:
        """``batch`` was given to the stream, and ``event`` marks its end."""
        self.flying.append((event, task, batch))
        task.flying += 1
        self._bytes += batch.total
        self._runs += len(batch.bytes)

    def land(self) -> tuple[Event, Task, Batch]:
        """The oldest batch is over."""
        event, task, batch = self.flying.popleft()
        task.flying -= 1
        self._bytes -= batch.total
        self._runs -= len(batch.bytes)
        return event, task, batch
