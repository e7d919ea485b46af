"""The mover for KV pages in a GPU's memory: batches of asynchronous copies, and events.

- A copy touches engine memory only after everything that the engine's stream was given before
  ``submit``: a store reads what the forward pass (and a drafter) wrote, and a load does not write
  into blocks that queued work still reads or zeroes. The device waits for it, no thread does.
- A job is settled when nothing of it runs any more: not before its last event, whatever failed, was
  late or was cancelled. If nobody can know that, it is ``lost`` and its memory stays mapped.
- Whether a job was in time is judged by the clock after its last event was seen (law 5).
- On the engine's thread one event is recorded, and nothing else is asked of the device.

Loads and stores have streams of their own and do not compete. What ``base.py`` says of their order
holds for each kind alone, and the unit is a batch.

A kind whose short runs are staged (``batch.Staging``) has a stream for each stage. Batches are
given to them in turns, and each waits for the engine's stream by itself. Nothing orders two of
them, and nothing has to: a stage is written and read on its own stream only.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import Final

from kvass.errors import UsageError
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Job, Mover, Outcome
from kvass.transfer.batch import Batch, Kind, Region, Stage, Stagings, Way
from kvass.transfer.descriptors import KERNEL_BELOW, HowToCopy, job_batches
from kvass.transfer.device import DeviceRuntime, Event, Fault, Stream
from kvass.transfer.pins import WINDOW_BYTES, Pins

BATCH_BYTES: Final = 64 << 20
"""After each batch that it gives, the copy thread waits for the GIL, up to 5 ms."""
FLYING_BYTES: Final = 256 << 20
"""In flight in one direction: enough for the 5 ms that another thread may hold the GIL."""
POLL_S: Final = 100e-6
LONGEST_POLL_S: Final = 500e-6
"""Between two looks at the device: an eighth of the time for which nothing was over. Each look
takes the GIL from the engine, whose own step it is that mostly keeps us waiting."""
SEEN_S: Final = 0.01
"""How much later an event may be seen than one that comes after it."""
IDLE_S: Final = 1.0
"""Between two looks at the arenas, for some that are gone."""
PATIENCE_S: Final = 30.0
"""``close`` waits so long for the last copy, and for unpinning."""

NO_STAGES: Final[Stagings] = {}

_log = logging.getLogger(__name__)
_lost: Final[list[object]] = []
"""Arenas, and tables of batches, that a dead device may still use."""


class Task:
    """A job on its way. ``order`` is its place in the engine's stream; ``ordered``: which streams
    of the lane wait for it. ``queued``: there may be more to give. ``flying`` counts its batches on
    the device."""

    def __init__(self, job: Job, since: float, order: Event | Fault, place: int) -> None:
        self.job, self.since, self.order, self.place = job, since, order, place
        self.ordered = set[int]()
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
    """Copies of one kind: streams, the jobs that wait, the batches in flight (oldest first).

    ``stages`` belong to the streams, one each; a lane without any has one stream.

    What is in flight is bounded, in bytes and in copies: a driver that is given too many for a
    stream that still waits may block the caller, with its locks held, until the engine's work is
    done. The mover's lock guards ``queue`` and ``moved_bytes``; the rest is the copy thread's.
    """

    def __init__(self, kind: Kind, how: HowToCopy, most_bytes: int, most_runs: int) -> None:
        self.kind: Kind = kind
        self.how = how
        self.stages: tuple[Stage | None, ...] = (None,)
        if how.staging is not None:
            self.stages = how.staging.stages
        self.streams: list[Stream] = []
        self.queue: list[Task] = []
        self.flying: deque[tuple[Event, Task, Batch]] = deque()
        self.moved_bytes = 0
        self._most_bytes, self._most_runs = most_bytes, most_runs
        self._bytes = self._runs = self._given = 0

    def push(self, job: Job, since: float, order: Event | Fault) -> None:
        """Queue a job by its fair finish, as ``HostMover`` does."""
        task = Task(job, since, order, self.moved_bytes + job.bytes)
        insort(self.queue, task, key=lambda task: task.place)

    def drop(self, task: Task) -> None:
        """All of it was given to the device, or never will be."""
        task.queued = False
        self.queue.remove(task)

    @property
    def turn(self) -> int:
        """Which stream the next batch is given to."""
        return self._given % len(self.streams)

    def has_room(self, batch: Batch) -> bool:
        runs = self._runs + len(batch.bytes)
        return self._bytes < self._most_bytes and runs <= self._most_runs

    def take_off(self, event: Event, task: Task, batch: Batch) -> None:
        """``batch`` was given to the stream, and ``event`` marks its end."""
        self.flying.append((event, task, batch))
        task.flying += 1
        self._given += 1
        self._bytes += batch.total
        self._runs += len(batch.bytes)

    def land(self) -> tuple[Event, Task, Batch]:
        event, task, batch = self.flying.popleft()
        task.flying -= 1
        self._bytes -= batch.total
        self._runs -= len(batch.bytes)
        return event, task, batch


class DeviceMover(Mover):
    """Copies between ``regions`` of one device's memory and arena slots.

    Shorter runs than ``kernel_below`` are moved by a kernel; if it is empty, nothing is ever
    pinned. ``stagings``: of the kinds whose short runs are staged. ``window``: the bytes that are
    pinned at a time. ``ways``: those that copies took so far. Raises UsageError if a plane leaves
    its region, or for regions on several devices.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        regions: Sequence[Region],
        groups: Sequence[GroupPlanes],
        *,
        clock: Callable[[], float] = monotonic,
        window: int = WINDOW_BYTES,
        batch_bytes: int = BATCH_BYTES,
        flying_bytes: int = FLYING_BYTES,
        kernel_below: Mapping[Kind, int] = KERNEL_BELOW,
        stagings: Stagings = NO_STAGES,
    ) -> None:
        if len({region.device for region in regions}) > 1:
            raise UsageError("KV memory on several devices in one worker")
        super().__init__(groups, [region.bytes for region in regions], clock)
        self._runtime, self._regions = runtime, regions
        self._pins = Pins(runtime, window, clock)
        self._dead = False
        self._useless = ""
        """Why nothing is given to the device any more."""
        self.ways = set[Way]()
        self._lanes: dict[Kind, Lane] = {}
        for kind in ("load", "store"):
            below, pins = kernel_below.get(kind, 0), bool(kernel_below)
            staging, fewest = stagings.get(kind), runtime.fewest_staged
            how = HowToCopy(below, staging, fewest, batch_bytes, runtime.batch_runs, pins)
            self._lanes[kind] = Lane(kind, how, flying_bytes, 2 * runtime.batch_runs)

    def submit(self, job: Job) -> None:
        self._check(job)
        with self._changed:
            self._start()
            order = Fault(self._useless) if self._useless else self._runtime.order()
            self._lanes[job.kind].push(job, self._clock(), order)
            self._unsettled += 1
            self._changed.notify_all()

    def close(self) -> None:
        """As ``Mover.close``; then what was pinned is not any more. If the device or its driver
        hangs, the rest is never settled, and the thread keeps its memory mapped."""
        if not self._join(PATIENCE_S):
            _log.error("kvass: the GPU has not finished its copies for %g s", PATIENCE_S)

    # ------------------------------------------------------------ the copy thread

    def _run(self) -> None:
        since = self._clock()
        if (fault := self._runtime.enter_thread()) is not None:
            self._end_all(fault)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsettled or self._closed, IDLE_S)
                if self._closed and not self._unsettled:
                    break
            if self._turn():
                since = self._clock()
                continue
            with self._changed:
                idle = (self._clock() - since) / 8
                self._changed.wait(min(max(POLL_S, idle), LONGEST_POLL_S))
        if not self._dead:
            self._pins.close()

    def _turn(self) -> bool:
        """See what is over, give the device what it may have; whether anything changed."""
        try:
            changed = self._pins.reap()
            for lane in self._lanes.values():
                changed = self._reap(lane) or changed
                changed = self._feed(lane) or changed
            return changed
        except Exception as error:  # noqa: BLE001 - the last resort of a thread: jobs must end
            _log.exception("kvass: the copy thread failed")
            self._end_all(Fault(f"{type(error).__name__}: {error}"))
            return True

    # ------------------------------------------------------------ what is over

    def _reap(self, lane: Lane) -> bool:
        """Take back the batches that are over; whether there were any. Those of a stream end in
        order, and streams take turns, so the oldest one is the first to look at."""
        before = len(lane.flying)
        while lane.flying:
            over = self._runtime.done(lane.flying[0][0])
            if isinstance(over, Fault):
                self._end_all(over)
            if over is not True:
                break
            _, task, batch = lane.land()
            batch.keep.clear()
            self._settle_if_over(task)
        return len(lane.flying) < before

    def _settle_if_over(self, task: Task) -> None:
        if task.flying or task.queued:
            return
        if task.outcome is None and not self._in_order(task):
            task.end("failed", "its copies did not wait for the engine's work before them")
        if task.outcome is None:
            task.outcome = "done" if self._clock() < task.job.deadline_s else "late"
        self._settle(task.job, task.since, task.outcome, task.error)

    def _in_order(self, task: Task) -> bool:
        """Whether the engine's work before the job is done, now that its copies are. Nothing but a
        wait that does not work makes this False. An event may be seen a little late."""
        until_s = monotonic() + SEEN_S
        while task.ordered and not isinstance(task.order, Fault):
            done = self._runtime.done(task.order)
            if done is not False or monotonic() >= until_s:
                return done is True
            sleep(POLL_S)
        return True

    # ------------------------------------------------------------ what is given

    def _feed(self, lane: Lane) -> bool:
        """Give the lane's stream batches of the first job, as many as may be in flight."""
        changed = False
        while lane.queue:
            with self._changed:
                task = lane.queue[0]
            batch = self._next(lane, task)
            if batch is None:
                with self._changed:
                    lane.drop(task)
                self._settle_if_over(task)
            elif not self._give(lane, task, batch):
                break
            changed = True
        return changed

    def _next(self, lane: Lane, task: Task) -> Batch | None:
        """The task's next batch; None if no more of it is to be given."""
        if isinstance(task.order, Fault):
            task.end("failed", task.order.text)
        elif self._closed:
            task.end("cancelled")
        elif self._clock() >= task.job.deadline_s:
            task.end("late")
        if task.next is None and task.outcome is None:
            try:
                if task.more is None:
                    pinned = self._pins.of(task.job.arena)
                    for plan in task.job.plans:
                        for row in plan.rows:
                            task.job.prepare_row(plan.planes, row)
                    task.more = job_batches(task.job, self._regions, pinned, lane.how)
                task.next = next(task.more, None)
            except Exception as e:  # noqa: BLE001 - one job's error must not end the others
                task.end("failed", f"{type(e).__name__}: {e}")
        return task.next

    def _give(self, lane: Lane, task: Task, batch: Batch) -> bool:
        """Give the task's next batch to a stream of the lane; False if it must wait."""
        assert not isinstance(task.order, Fault)
        if not lane.has_room(batch):
            return False
        while len(lane.streams) < len(lane.stages):
            opened = self._runtime.open_stream(lane.kind)
            if isinstance(opened, Fault):
                return self._failed(task, opened)
            lane.streams.append(opened)
        turn = lane.turn
        stream, batch.stage = lane.streams[turn], lane.stages[turn]
        if batch.way == "pageable":  # this call may block, with the driver's locks
            ready = not lane.flying and self._runtime.done(task.order)
            if isinstance(ready, Fault):
                return self._failed(task, ready)
            if not ready:
                return False
        if turn not in task.ordered:
            fault = self._runtime.wait(stream, task.order)
            if fault is not None:
                return self._failed(task, fault)
            task.ordered.add(turn)
        task.next = None
        self.ways.add(batch.way)
        fault = self._runtime.copy(stream, batch)
        event = self._runtime.mark(stream)  # also after a fault: a part may have been given
        if isinstance(event, Fault):
            _lost.append(batch)
            self._end_all(event)
            return True
        lane.take_off(event, task, batch)
        with self._changed:
            lane.moved_bytes += batch.total
        return True if fault is None else self._failed(task, fault)

    # ------------------------------------------------------------ ends

    def _failed(self, task: Task, fault: Fault) -> bool:
        task.end("failed", fault.text)
        return True

    def _end_all(self, fault: Fault) -> None:
        """Give nothing to the device any more: later jobs fail, those there are end now. They fail,
        too, if the device has done what it was given; else they are lost."""
        self._useless = fault.text
        self._dead = self._dead or not self._stopped()
        if self._dead:
            self._pins.abandon()
        _log.error("the GPU failed kvass, the engine runs uncached: %s", fault.text)
        for lane in self._lanes.values():
            with self._changed:
                tasks = dict.fromkeys(lane.queue)
                lane.queue.clear()
            tasks.update((task, None) for _, task, _ in lane.flying)
            if self._dead:
                _lost.extend(([*lane.flying], [task.job.arena for task in tasks]))
            lane.flying.clear()
            outcome: Outcome = "lost" if self._dead else "failed"
            for task in tasks:
                self._settle(task.job, task.since, outcome, fault.text)

    def _stopped(self) -> bool:
        """Wait until all streams are empty; False if nobody can tell, or not in time."""
        until_s = monotonic() + PATIENCE_S
        try:
            for stream in self._streams():
                while (idle := self._runtime.idle(stream)) is False and monotonic() < until_s:
                    sleep(POLL_S)
                if idle is not True:
                    return False
        except Exception:  # noqa: BLE001 - whatever failed may fail here, too
            _log.exception("kvass: the GPU cannot be asked what it has done")
            return False
        return True

    def _streams(self) -> list[Stream]:
        return [stream for lane in self._lanes.values() for stream in lane.streams]
