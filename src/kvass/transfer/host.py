"""The mover for KV pages in host memory: numpy on one background thread.

Law of this file: one numpy call moves one row of a *bundle*, which is all layers of a group where
they lie evenly (they do in vLLM). So the thread takes the GIL a handful of times per row, and
releases it for all of the copy.

What was measured (2 cores Zen 3, memfd with 4 KiB pages, 128-256 MiB, medians of 9 interleaved
rounds; percent of a memcpy in pieces of one row; figures of busy cores, so +-10):

======================================  ====  =====  =====  =====  =====
run                                     4 K   18 K   32 K   64 K   1 M
======================================  ====  =====  =====  =====  =====
gather, take per layer                   63     95     97    101    107
gather, take over the bundle             71    102    100    108    107
scatter, a[idx] = slot, per layer        64     96     97    106    102
scatter, a[:, idx] = slot, bundle        75     98    103    103    103
16 consecutive blocks as slices, bundle 112    118    116    117    107
======================================  ====  =====  =====  =====  =====

And for an MLA layout (61 layers, rows of 16 scattered runs of 18 KiB in each, 17 MiB a row), the
same way, two runs of 9 rounds:

===========================================  =======  =======
one row by                                   store    load
===========================================  =======  =======
take, or a[:, idx] = slot, over the bundle    93, 94   92, 93
the same, on uint64 words                     93, 95   91, 92
the same, per layer                           92, 91   92, 90
a slice per block, all layers at once         92, 92   94, 92
a slice per run                               73, 73   74, 72
memcpy per run, by ctypes                     69, 70   71, 68
slot[:] = a[:, idx], or flat.put              65, 63   96, 95
===========================================  =======  =======

So one way serves all layouts: what is above 90 differs by noise, and the bundle takes the GIL least
often.

Pages are items of numpy's void dtype ``V<run>``: as fast as uint64 words, at any alignment and for
any length. ``np.take`` would first copy a source that is not contiguous, all of it; so strided
planes are taken from a contiguous view over their gaps, and where the stride is no multiple of the
run, block by block.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from threading import Condition, Thread, current_thread
from time import monotonic
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.errors import UsageError
from kvass.layout.copy_plan import RowCopy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Done, Job, Mover, Outcome, U8Array
from kvass.transfer.checks import check_bytes, check_job
from kvass.types import I64Array

Pages = npt.NDArray[np.void]

BLOCKS_PER_SPAN: Final = 4
"""From this many consecutive blocks on (on average), slices beat gather and scatter."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Bundle:
    """Consecutive planes of one group that lie evenly in one region: their pages as one grid.

    ``grid`` has shape ``(layers, blocks)`` and ``at`` is where its first layer begins in a slot.
    ``flat``, if stride and spacing are multiples of the page, is the same memory as a contiguous
    list of pages; page of (l, b) is ``flat[origin[l] + b * step]``.
    """

    grid: Pages
    at: int
    chunk_blocks: int
    flat: Pages | None
    origin: I64Array
    step: int

    def slot(self, arena: U8Array, row: RowCopy) -> Pages:
        """The row's pages in the arena, shape ``(layers, len(row.blocks))``."""
        run, layers = self.grid.dtype.itemsize, len(self.grid)
        whole = np.ndarray(
            (layers, self.chunk_blocks), self.grid.dtype, arena.data, row.slot + self.at
        )
        assert run * whole.size <= arena.nbytes
        return whole[:, row.first : row.first + len(row.blocks)]

    def store(self, arena: U8Array, row: RowCopy) -> None:
        """Gather the row's pages into its slot."""
        slot, spans = self.slot(arena, row), row.spans()
        if self.flat is None or len(spans) * BLOCKS_PER_SPAN <= len(row.blocks):
            for block, at, n in spans:
                slot[:, at : at + n] = self.grid[:, block : block + n]
        else:  # "clip" writes straight into the slot; the plan has checked the ids
            self.flat.take(self.origin[:, None] + row.blocks * self.step, None, slot, "clip")

    def load(self, arena: U8Array, row: RowCopy) -> None:
        """Scatter the slot into the row's pages."""
        slot, spans = self.slot(arena, row), row.spans()
        if len(spans) * BLOCKS_PER_SPAN <= len(row.blocks):
            for block, at, n in spans:
                self.grid[:, block : block + n] = slot[:, at : at + n]
        else:
            self.grid[:, row.blocks] = slot


def _bundles(planes: GroupPlanes, regions: Sequence[U8Array]) -> tuple[_Bundle, ...]:
    """Cut the planes into the fewest bundles, keeping their order."""
    cut: list[list[Plane]] = []
    for plane in planes.planes:
        if cut and _continues(cut[-1], plane):
            cut[-1].append(plane)
        else:
            cut.append([plane])
    firsts = [0, *accumulate(len(part) for part in cut)]
    return tuple(
        _bundle(part, planes.slot_offsets()[first], planes, regions)
        for part, first in zip(cut, firsts, strict=False)
    )


def _continues(part: list[Plane], plane: Plane) -> bool:
    last = part[-1]
    same = (plane.region, plane.run, plane.block_stride) == (
        last.region,
        last.run,
        last.block_stride,
    )
    return same and (len(part) == 1 or plane.base - last.base == part[1].base - part[0].base)


def _bundle(part: list[Plane], at: int, planes: GroupPlanes, regions: Sequence[U8Array]) -> _Bundle:
    head, memory = part[0], regions[part[0].region]
    spacing = part[1].base - head.base if len(part) > 1 else 0
    page = np.dtype((np.void, head.run))
    grid = np.ndarray(
        (len(part), planes.blocks), page, memory.data, head.base, (spacing, head.block_stride)
    )
    flat, low = None, min(p.base for p in part)
    if head.block_stride % head.run == 0 and spacing % head.run == 0:
        end = max(p.end(planes.blocks) for p in part)
        flat = np.ndarray(((end - low) // head.run,), page, memory.data, low)
    origin = np.array([(p.base - low) // head.run for p in part], np.int64)
    return _Bundle(grid, at, planes.chunk_blocks, flat, origin, head.block_stride // head.run)


class _Task:
    """A job on its way, and the rows that it still has to copy."""

    def __init__(self, job: Job, since: float) -> None:
        self.job = job
        self.since = since
        self.rows = deque((p.planes, row) for p in job.plans for row in p.rows)


class HostMover(Mover):
    """Copies between ``regions`` (uint8 arrays of shape ``(bytes,)``) and arena slots.

    ``groups`` describe the planes inside the regions; a job's plans must be of one of them. The
    thread starts with the first job. Raises UsageError if a plane leaves its region.
    """

    def __init__(
        self,
        regions: Sequence[U8Array],
        groups: Sequence[GroupPlanes],
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        for number, region in enumerate(regions):
            check_bytes(region, f"region {number}")
        self._bundles: dict[int, tuple[_Bundle, ...]] = {}
        self._planes: dict[int, GroupPlanes] = {}
        for planes in groups:
            planes.check([r.nbytes for r in regions])
            self._planes[planes.group] = planes
            self._bundles[planes.group] = _bundles(planes, regions)
        self._clock = clock
        self._changed = Condition()
        # Guarded by _changed: the queue as a heap of (stores last, fair finish, arrival, task).
        self._queue: list[tuple[bool, int, int, _Task]] = []
        self._arrivals = count()
        self._moved_bytes = 0
        self._unsettled = 0
        self._settled: deque[Done] = deque()
        self._closed = False
        self._thread: Thread | None = None

    # ------------------------------------------------------------ the caller's side

    def submit(self, job: Job) -> None:
        check_job(job, self._planes)
        task = _Task(job, self._clock())
        with self._changed:
            if self._closed:
                raise UsageError("this mover is closed; submit before close()")
            if self._thread is None:
                thread = Thread(target=self._run, name="kvass-copy", daemon=True)
                thread.start()  # before the job is taken on: without a thread it would never end
                self._thread = thread
            # Fair finish: what would have moved by its end if it were alone from now on. Smaller
            # jobs that come soon have a lower one; those that come later do not.
            place = self._moved_bytes + job.bytes
            entry = (job.kind == "store", place, next(self._arrivals), task)
            heapq.heappush(self._queue, entry)
            self._unsettled += 1
            self._changed.notify_all()

    def poll(self) -> list[Done]:
        with self._changed:
            done = list(self._settled)
            self._settled.clear()
            return done

    def drain(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._unsettled == 0, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is current_thread():
            raise UsageError("close() was called from on_done; call it from another thread")
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------ the copy thread

    def _run(self) -> None:
        while self._step():
            pass

    def _step(self) -> bool:
        """Copy one row of whoever is first, or settle him; False when closed and all settled.

        No local outlives the step, so that an idle mover keeps no arena alive.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return False
            entry = heapq.heappop(self._queue)
            closed = self._closed
        task = entry[-1]
        if closed:
            self._settle(task, "cancelled")
        elif self._clock() >= task.job.deadline_s:
            self._settle(task, "late")
        elif not self._copy_row(task):
            pass  # it was settled as failed
        elif task.rows:
            with self._changed:
                heapq.heappush(self._queue, entry)
        else:
            self._settle(task, "done" if self._clock() < task.job.deadline_s else "late")
        return True

    def _copy_row(self, task: _Task) -> bool:
        """Copy the task's next row, if it has one left. False: that raised, and the job failed."""
        if not task.rows:
            return True
        planes, row = task.rows.popleft()
        arena, storing = task.job.arena, task.job.kind == "store"
        try:
            for bundle in self._bundles[planes.group]:
                if storing:
                    bundle.store(arena, row)
                else:
                    bundle.load(arena, row)
        except Exception as e:  # noqa: BLE001 - an executor: one job's error must not end the others
            self._settle(task, "failed", f"{type(e).__name__}: {e}")
            return False
        with self._changed:
            self._moved_bytes += planes.row_bytes // planes.chunk_blocks * len(row.blocks)
        return True

    def _settle(self, task: _Task, outcome: Outcome, error: str = "") -> None:
        done = Done(task.job, outcome, self._clock() - task.since, error)
        if done.job.on_done is not None:
            try:
                done.job.on_done(done)
            except Exception:  # noqa: BLE001 - the caller's bug must not cost other jobs their end
                _log.exception("on_done of job %r raised", done.job.name)
        with self._changed:
            self._settled.append(done)
            self._unsettled -= 1
            self._changed.notify_all()
