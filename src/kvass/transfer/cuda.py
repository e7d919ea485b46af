"""The mover for KV pages in a GPU's memory: batches of asynchronous copies, and events.

Laws of this file:

- A copy touches engine memory only after everything that the engine's stream was given before
  ``submit``: a store so reads what the forward pass (and a drafter) wrote, and a load does not
  write into blocks that queued work still reads or zeroes. The device waits for it, no thread.
- A job is settled when nothing of it runs any more: not before its last event, whatever failed,
  was late or was cancelled meanwhile. Of what cannot be known to have stopped, we say so (``lost``)
  and keep the memory mapped for good.
- Being in time is judged by the clock after the last event was seen (law 5).
- On the engine's thread one event is recorded, and nothing else is asked of the device.

Loads and stores have a stream each and do not compete; what ``base.py`` says of their order holds
for each kind alone, and the unit is a batch. Nothing here knows torch or CUDA: ``runtime.py`` is
the seam, ``cuda_runtime.py`` the real thing, ``tests.support.gpu.fake_cuda`` a hostile one.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from threading import Condition, Thread, current_thread
from time import monotonic
from typing import Final

from kvass.errors import UsageError
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Done, Job, Mover
from kvass.transfer.batching import job_batches
from kvass.transfer.checks import check_job
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.lanes import FLYING_BYTES, FLYING_RUNS, Lane, Task
from kvass.transfer.pins import WINDOW_BYTES, Pins
from kvass.transfer.runtime import Batch, Fault, Kind, Region, Runtime, Stream, Way

BATCH_BYTES: Final = 16 << 20
POLL_S: Final = 100e-6
LONGEST_POLL_S: Final = 500e-6
"""Between two looks at the device: an eighth of the time for which nothing was over. Each look
takes the GIL from the engine, whose own step it is that mostly keeps us waiting."""
PATIENCE_S: Final = 30.0
"""How long ``close`` waits for a device that finishes nothing."""
JOIN_S: Final = 10.0
"""How much longer it waits for the thread, which unpins the rest, or hangs in the driver."""

_log = logging.getLogger(__name__)
_lost: Final[list[object]] = []
"""Arenas, and tables of batches, that a dead device may still use: never let go of."""


class CudaMover(Mover):
    """Copies between ``regions`` of one device's memory and arena slots.

    ``groups`` describe the planes inside the regions. Raises UsageError if a plane leaves its
    region, or if the regions are on several devices. The thread starts with the first job; with
    ``threaded`` False somebody else calls ``turn``, for tests that must repeat themselves. With an
    empty ``kernel_below`` nothing is ever pinned. ``ways``: those that copies took so far.
    """

    def __init__(
        self,
        runtime: Runtime,
        regions: Sequence[Region],
        groups: Sequence[GroupPlanes],
        *,
        clock: Callable[[], float] = monotonic,
        window: int = WINDOW_BYTES,
        batch_bytes: int = BATCH_BYTES,
        flying_bytes: int = FLYING_BYTES,
        flying_runs: int = FLYING_RUNS,
        kernel_below: Mapping[Kind, int] = KERNEL_BELOW,
        threaded: bool = True,
        quiet: bool = False,
    ) -> None:
        if len({region.device for region in regions}) > 1:
            raise UsageError("KV memory on several devices in one worker")
        for planes in groups:
            planes.check([region.bytes for region in regions])
        self._planes = {planes.group: planes for planes in groups}
        self._runtime, self._regions, self._clock = runtime, regions, clock
        self._changed = Condition()
        self._pins = Pins(runtime, window, quiet, self._wake, clock)
        self.ways = set[Way]()
        self._batch_bytes, self._below = batch_bytes, kernel_below
        self._threaded = threaded
        self._thread: Thread | None = None
        # Guarded by _changed: the lanes' queues, and what follows. All else is the copy thread's.
        kinds: tuple[Kind, ...] = ("load", "store")
        most_runs = min(flying_runs, 2 * runtime.batch_runs)
        self._lanes = {kind: Lane(kind, flying_bytes, most_runs) for kind in kinds}
        self._arrivals = count()
        self._unsettled = 0
        self._settled: deque[Done] = deque()
        self._closed = False
        self._give_up_s = 0.0
        self._dead = ""
        self._broken = ""
        """What we did wrong ourselves: then all ends as it must, and nothing begins."""
        self._complained = False

    # ------------------------------------------------------------ the caller's side

    def submit(self, job: Job) -> None:
        check_job(job, self._planes)
        useless = self._dead or self._broken
        order = Fault(useless) if useless else self._runtime.order()
        task = Task(job, self._clock(), order)
        lane = self._lanes[job.kind]
        with self._changed:
            try:
                self._accept()
            except BaseException:
                if not isinstance(order, Fault):
                    self._runtime.forget(order)
                raise
            place = lane.moved_bytes + job.bytes  # see HostMover.submit
            heapq.heappush(lane.queue, (place, next(self._arrivals), task))
            self._unsettled += 1
            self._changed.notify_all()

    def _accept(self) -> None:
        """Raise unless a job can be taken on; without a thread it would never end."""
        if self._closed:
            raise UsageError("this mover is closed; submit before close()")
        if self._thread is None and self._threaded:
            thread = Thread(target=self._run, name="kvass-copy", daemon=True)
            thread.start()
            self._thread = thread

    def poll(self) -> list[Done]:
        with self._changed:
            done = list(self._settled)
            self._settled.clear()
            return done

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._unsettled == 0, timeout_s)

    def close(self) -> None:
        """As ``Mover.close``; then what was registered is not any more."""
        with self._changed:
            if not self._closed:
                self._give_up_s = self._clock() + PATIENCE_S
            self._closed = True
            self._changed.notify_all()
        if self._thread is current_thread():
            raise UsageError("close() was called from on_done; call it from another thread")
        if self._thread is not None:
            self._thread.join(PATIENCE_S + JOIN_S)
            if self._thread.is_alive():  # inside the driver, which does not come back
                _lost.append(self)
                self._die(Fault("a call of the driver does not return", dead=True))
                self._settle_all()
        else:
            while self._unsettled:
                self._turn_or_die()
            self._release()

    # ------------------------------------------------------------ the copy thread

    def _run(self) -> None:
        since = self._clock()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsettled or self._closed or self._pins.ended)
                if self._closed and not self._unsettled:
                    break
            if self._turn_or_die():
                since = self._clock()
                continue
            with self._changed:
                idle = (self._clock() - since) / 8
                self._changed.wait(min(max(POLL_S, idle), LONGEST_POLL_S))
        self._release()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _turn_or_die(self) -> bool:
        """As ``turn``; whatever it raises ends the mover, not this thread: jobs must end."""
        try:
            return self.turn()
        except Exception as e:  # noqa: BLE001 - the last resort of a thread: see above
            _log.exception("kvass: the copy thread failed, the engine runs uncached")
            fault = Fault(f"{type(e).__name__}: {e}", dead=bool(self._broken))
            self._broken = fault.text
            if fault.dead:
                self._die(fault)
                self._settle_all()
            return True

    def turn(self) -> bool:
        """See what is over, give the device what it may have; whether anything changed."""
        changed = self._pins.reap()
        for lane in self._lanes.values():
            if self._broken and not self._dead:
                changed = self._wind_up(lane) or changed
                continue
            changed = self._reap(lane) or changed
            changed = self._feed(lane) or changed
        if self._closed and self._unsettled and self._clock() > self._give_up_s:
            self._die(Fault(f"the device finished nothing for {PATIENCE_S:g} s", dead=True))
        return changed

    def _reap(self, lane: Lane) -> bool:
        """Take back the batches that are over. A stream ends them in order."""
        before = len(lane.flying)
        while lane.flying:
            over = self._over(lane)
            if isinstance(over, Fault):
                self._die(over)
                return True
            if not over:
                break
            self._land(lane)
        return len(lane.flying) < before

    def _over(self, lane: Lane) -> bool | Fault:
        """Whether the oldest batch is. What its event does not say, its stream does; what neither
        says shows later, if the context lives. An event's error may be the copy's."""
        event, task, _ = lane.flying[0]
        if event is None:
            return self._idle(lane)
        over = self._runtime.done(event)
        if isinstance(over, Fault) and not over.dead:
            self._complain(over)
            lane.mute = True
            task.end("failed", over.text)
            return self._idle(lane)
        lane.silent_s = None
        return over

    def _idle(self, lane: Lane) -> bool | Fault:
        """Whether nothing runs on the lane's stream; False if that cannot be told yet."""
        idle = lane.stream is None or self._runtime.idle(lane.stream)
        if not isinstance(idle, Fault):
            lane.silent_s = None
            return idle
        self._complain(idle)
        if lane.silent_s is None:
            lane.silent_s = self._clock()
        silent = self._clock() - lane.silent_s > PATIENCE_S
        return Fault(idle.text, dead=True) if idle.dead or silent else False

    def _complain(self, fault: Fault) -> None:
        if fault.dead:
            self._die(fault)
        elif not self._complained:
            self._complained = True
            _log.warning("kvass: the GPU does not say what is copied: %s", fault.text)

    def _land(self, lane: Lane) -> None:
        event, task, batch = lane.land()
        batch.keep.clear()
        self._settle_if_over(task)
        if event is not None:
            self._runtime.forget(event)

    def _feed(self, lane: Lane) -> bool:
        """Give the lane's stream batches of whoever is first, as many as may fly."""
        changed = False
        while (task := self._first(lane)) is not None:
            self._end_if_useless(task)
            self._make(task)
            if task.batches and not self._give(lane, task):
                return changed
            self._make(task)
            changed = True
            if task.given:
                self._drop(lane, task)
                self._settle_if_over(task)
        return changed

    def _first(self, lane: Lane) -> Task | None:
        """Whoever is first; nobody while enough is flying, unless all is to end now."""
        with self._changed:
            full = lane.full and not self._closed
            return lane.queue[0][-1] if lane.queue and not full else None

    def _drop(self, lane: Lane, task: Task) -> None:
        with self._changed:
            lane.drop(task)

    def _end_if_useless(self, task: Task) -> None:
        if isinstance(task.order, Fault):
            task.end("failed", task.order.text)
        elif self._dead:
            task.end("failed", self._dead)
        elif self._closed:
            task.end("cancelled")
        elif self._clock() >= task.job.deadline_s:
            task.end("late")

    # ------------------------------------------------------------ giving

    def _make(self, task: Task) -> None:
        """Have the task's next batch at hand, if there is one more."""
        try:
            if not task.begun:
                task.begun, task.more = True, self._batches(task.job)
            if not task.batches and task.more is not None:
                task.batches.extend(islice(task.more, 1))
                if not task.batches:
                    task.more = None
        except Exception as e:  # noqa: BLE001 - an executor: one job's error must not end the others
            task.end("failed", f"{type(e).__name__}: {e}")

    def _batches(self, job: Job) -> Iterator[Batch]:
        pinned = self._pins.of(job.arena)
        limit, most = self._batch_bytes, self._runtime.batch_runs
        return job_batches(job, self._regions, pinned, self._below, limit, most)

    def _give(self, lane: Lane, task: Task) -> bool:
        """Give the task's next batch; False if it must wait."""
        assert not isinstance(task.order, Fault)
        batch = task.batches[0]
        if not lane.has_room(batch):
            return False
        if lane.stream is None:
            opened = self._runtime.open_stream(lane.kind)
            if isinstance(opened, Fault):
                return self._failed(task, opened)
            lane.stream = opened
        if batch.way == "pageable":  # this call may block, with the driver's locks
            for order in lane.orders(task):
                ready = self._runtime.done(order)
                if isinstance(ready, Fault):
                    return self._failed(task, ready)
                if not ready:
                    return False
        if not task.ordered:
            fault = self._runtime.wait(lane.stream, task.order)
            if fault is not None:
                return self._failed(task, fault)
            with self._changed:  # ``close`` may have given up on this thread, and settled the job
                if self._dead:
                    return True
                task.ordered = True
        task.batches.popleft()
        self.ways.add(batch.way)
        fault = self._runtime.copy(lane.stream, batch)
        return self._fly(lane, lane.stream, task, batch, fault)

    def _fly(
        self, lane: Lane, stream: Stream, task: Task, batch: Batch, fault: Fault | None
    ) -> bool:
        """Mark the end of a batch that was given, if perhaps in part only."""
        event = self._runtime.mark(stream)
        lane.take_off(None if isinstance(event, Fault) else event, task, batch)
        if isinstance(event, Fault):
            self._complain(event)
        with self._changed:
            lane.moved_bytes += batch.total
        return True if fault is None else self._failed(task, fault)

    def _failed(self, task: Task, fault: Fault) -> bool:
        task.end("failed", fault.text)
        if fault.dead:
            self._die(fault)
        return True

    # ------------------------------------------------------------ ends

    def _settle_if_over(self, task: Task) -> None:
        if task.flying or not task.given:
            return
        with self._changed:  # ``close`` may settle what hangs, beside the copy thread
            if task.settled:
                return
            task.settled = True
        if task.outcome is None:
            task.outcome = "done" if self._clock() < task.job.deadline_s else "late"
        done = Done(task.job, task.outcome, self._clock() - task.since, task.error)
        if done.job.on_done is not None:
            try:
                done.job.on_done(done)
            except Exception:  # noqa: BLE001 - the caller's bug must not cost other jobs their end
                _log.exception("on_done of job %r raised", done.job.name)
        with self._changed:
            self._settled.append(done)
            self._unsettled -= 1
            self._changed.notify_all()
        if not isinstance(task.order, Fault) and not self._dead:
            self._runtime.forget(task.order)

    def _die(self, fault: Fault) -> None:
        """The context is of no use any more: nothing that flies is known ever to stop."""
        if self._dead:
            return
        self._dead = fault.text
        _log.error("the GPU failed kvass, the engine runs uncached: %s", fault.text)
        self._pins.abandon()
        for lane in self._lanes.values():
            with self._changed:  # of what was begun nobody knows how much was given
                begun = [entry[-1] for entry in lane.queue if entry[-1].ordered]
            flown = dict.fromkeys(begun)
            while lane.flying:
                _, task, batch = lane.land()
                _lost.append(batch)
                flown[task] = None
            for task in flown:
                _lost.append(task.job.arena)
                task.outcome = None
                task.end("lost", fault.text)
                self._drop(lane, task)
                self._settle_if_over(task)

    def _wind_up(self, lane: Lane) -> bool:
        """We failed, not the device: nothing more is given, and what was begun has ended once the
        stream is empty."""
        idle = self._idle(lane)
        if isinstance(idle, Fault):
            self._die(idle)
            self._settle_all()
            return True
        before = self._unsettled
        while idle and lane.flying:
            self._land(lane)
        with self._changed:
            tasks = [entry[-1] for entry in lane.queue if idle or not entry[-1].ordered]
        self._fail(lane, tasks, self._broken)
        return self._unsettled < before

    def _settle_all(self) -> None:
        """Of a dead mover: what the device never heard of ends here, without asking it again."""
        for lane in self._lanes.values():
            self._fail(lane, [entry[-1] for entry in lane.queue], self._dead)

    def _fail(self, lane: Lane, tasks: list[Task], text: str) -> None:
        for task in tasks:
            task.end("failed", text)
            self._drop(lane, task)
            self._settle_if_over(task)

    def _release(self) -> None:
        """Nothing runs any more: unregister, and close the streams."""
        if self._dead:
            return
        self._pins.let_go()
        for lane in self._lanes.values():
            if lane.stream is not None:
                self._runtime.close_stream(lane.stream)
                lane.stream = None
