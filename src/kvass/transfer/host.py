"""The mover for KV pages in host memory: numpy on a copy thread, and more of them for loads.

A request waits for its load, and often nothing else runs meanwhile. Two threads copy the load in
two thirds of the time; where the engine's threads are bound and leave more CPUs free, there are up
to eight (``transfer.cores``). No request waits for a store, and it runs beside the engine's own
threads.

A *bundle* is layers of a group at equal distances in memory; in vLLM that is all of them. One numpy
call copies one row of a bundle, so a thread takes the GIL a few times per row. These ways to copy
were the fastest of those measured: 92 to 118 % of a memcpy, for runs of 18 KiB and more.

Pages are items of numpy's void dtype ``V<run>``. It is as fast as words at any alignment and
length. ``np.take`` would first copy a source that is not contiguous. So strided planes are taken
from a contiguous view over their gaps or, where the stride is no multiple of the run, block by
block.

numpy keeps the GIL while it assigns fewer than 500 items, unless they have an axis that is not
indexed. A row of 8 blocks and 12 layers has only 96 pages. So slices are copied as bytes, and pages
that are scattered have a last axis of one page.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from threading import Thread
from time import monotonic
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.errors import UsageError
from kvass.layout.copy_plan import RowCopy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import cores
from kvass.transfer.base import Job, Mover, Outcome, U8Array, check_bytes
from kvass.types import I64Array

Pages = npt.NDArray[np.void]

BLOCKS_PER_SPAN: Final = 4
"""If the runs of consecutive blocks have at least this many on average, slices are faster than
gather and scatter."""
PAGE_IN_ORDER: Final = 4096
"""If pages have at least this many bytes, scattering them in the slot's order is 1.1 to 1.4 times
as fast as block by block. Smaller pages would take up to 1.5 times as long."""


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Consecutive planes of one group at equal distances in one region: their pages as one grid.

    ``grid`` has shape ``(layers, blocks)`` and ``at`` is where its first layer begins in a slot.
    ``flat``, if stride and spacing are multiples of the page, is the same memory as a contiguous
    list of pages. The page of layer l and block b is ``flat[origin[l] + b * step]``.
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
        slot, spans = self.slot(arena, row), row.spans()
        if self.flat is None or len(spans) * BLOCKS_PER_SPAN <= len(row.blocks):
            to, pages = as_bytes(slot), as_bytes(self.grid)
            for block, at, n in spans:
                to[:, at : at + n] = pages[:, block : block + n]
        else:  # "clip" writes straight into the slot; the plan has checked the ids
            self.flat.take(self._places(row), None, slot, "clip")

    def load(self, arena: U8Array, row: RowCopy) -> None:
        slot, spans = self.slot(arena, row), row.spans()
        if len(spans) * BLOCKS_PER_SPAN <= len(row.blocks):
            to, pages = as_bytes(self.grid), as_bytes(slot)
            for block, at, n in spans:
                to[:, block : block + n] = pages[:, at : at + n]
        elif self.flat is None or self.flat.itemsize < PAGE_IN_ORDER:
            self.grid[:, row.blocks] = slot
        else:
            self.flat[:, np.newaxis][self._places(row)] = slot[..., np.newaxis]

    def _places(self, row: RowCopy) -> I64Array:
        """Where the row's pages are in ``flat``, shape ``(layers, len(row.blocks))``."""
        return self.origin[:, np.newaxis] + row.blocks * self.step


def as_bytes(pages: Pages) -> U8Array:
    """The same memory, with a last axis of the bytes of each page."""
    return pages[..., np.newaxis].view(np.uint8)


def bundles_of(planes: GroupPlanes, regions: Sequence[U8Array]) -> tuple[Bundle, ...]:
    """Cut the planes into the fewest bundles, keeping their order."""
    parts: list[tuple[int, list[Plane]]] = []
    for at, plane in zip(planes.slot_offsets(), planes.planes, strict=True):
        if parts and _lie_evenly([*parts[-1][1][-2:], plane]):
            parts[-1][1].append(plane)
        else:
            parts.append((at, [plane]))
    return tuple(_bundle(part, at, planes, regions) for at, part in parts)


def _lie_evenly(part: list[Plane]) -> bool:
    shapes = {(plane.region, plane.run, plane.block_stride) for plane in part}
    return len(shapes) == len({b.base - a.base for a, b in pairwise(part)}) == 1


def _bundle(part: list[Plane], at: int, planes: GroupPlanes, regions: Sequence[U8Array]) -> Bundle:
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
    return Bundle(grid, at, planes.chunk_blocks, flat, origin, head.block_stride // head.run)


class _Task:
    """A queued job: the rows that no thread has begun to copy, and its place in the queue.

    ``copying`` counts the rows that are being copied. ``end`` is the outcome of the job, if it is
    known before all rows are copied. The job ends when no row is being copied. ``copying_s``: how
    long its rows took, one after the other.
    """

    def __init__(self, job: Job, since: float, moved_bytes: int) -> None:
        self.job = job
        self.since = since
        self.rows = deque((p.planes, row) for p in job.plans for row in p.rows)
        self.copying = 0
        self.copying_s = 0.0
        self.end: tuple[Outcome, str] | None = None
        # The bytes that the mover would have copied at the end of this job, if no other job came.
        # A smaller job that comes soon has a lower number, one that comes later does not.
        self.place = (job.kind == "store", moved_bytes + job.bytes)

    def stop(self, outcome: Outcome, error: str = "") -> None:
        """Set the outcome, unless there is one, and begin no more rows."""
        self.end = self.end or (outcome, error)
        self.rows.clear()


class HostMover(Mover):
    """A mover between ``regions`` (uint8 arrays of shape ``(bytes,)``) and arena slots."""

    copies_now = True

    def __init__(
        self,
        regions: Sequence[U8Array],
        groups: Sequence[GroupPlanes],
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        for number, region in enumerate(regions):
            check_bytes(region, f"region {number}")
        super().__init__(groups, [region.nbytes for region in regions], clock)
        self._bundles = {planes.group: bundles_of(planes, regions) for planes in groups}
        # Guarded by _changed.
        self._queue: list[_Task] = []
        self._moved_bytes = 0

    def submit(self, job: Job) -> None:
        self._check(job)
        with self._changed:
            self._start()
            task = _Task(job, self._clock(), self._moved_bytes)
            insort(self._queue, task, key=lambda task: task.place)
            self._unsettled += 1
            self._changed.notify_all()

    def copy_now(self, job: Job) -> None:
        self._check(job)
        with self._changed:
            if self._closed:
                raise UsageError("this mover is closed")
            self._unsettled += 1
        task = _Task(job, self._clock(), 0)
        while task.rows:
            task.copying += 1
            self._move(task, *task.rows.popleft())
        outcome, error = self._end_of(task)
        self._settle(job, task.since, outcome, error, task.copying_s)

    def _run(self) -> None:
        spare = cores.spare_cpus()
        helpers = [
            Thread(target=self._help, args=(spare,), name=f"kvass-copy-{number}", daemon=True)
            for number in range(2, cores.threads_on(spare) + 1)
        ]
        with suppress(RuntimeError):  # there is no thread left: those that there are copy all
            for helper in helpers:
                helper.start()
        cores.run_on(spare)
        while self._step():
            pass
        for helper in helpers:
            if helper.ident is not None:
                helper.join()

    def _help(self, cpus: set[int]) -> None:
        cores.run_on(cpus)
        while self._step(helps=True):
            pass

    def _step(self, helps: bool = False) -> bool:
        """Copy one row or, unless this thread only ``helps``, end a job. False when the mover is
        closed and nothing is left for this thread.

        No local variable outlives the step, so an idle mover keeps no arena alive.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._next(helps) or (self._closed and (helps or not self._queue))
            )
            if (task := self._next(helps)) is None:
                return False
            if self._closed and task.rows:
                task.stop("cancelled")
            if task.rows:
                row = task.rows.popleft()
                task.copying += 1
            elif task.copying:  # the job ends when the helper has copied its row
                return True
            else:
                row = None
                self._queue.remove(task)
        if row is not None:
            self._move(task, *row)
        else:
            outcome, error = self._end_of(task)
            self._settle(task.job, task.since, outcome, error, task.copying_s)
        return True

    def _next(self, helps: bool) -> _Task | None:
        """The first job that this thread can copy a row of, or can end. No store is begun while a
        load is copied. The caller holds ``_changed``."""
        for task in self._queue:
            if task.job.kind == "store" and (helps or task is not self._queue[0]):
                return None
            if task.rows and not (helps and self._closed):
                return task
            if task is self._queue[0] and not (task.copying or helps):
                return task  # jobs end in their order
        return None

    def _end_of(self, task: _Task) -> tuple[Outcome, str]:
        """The outcome of ``task``. No row of it is left to copy."""
        if task.end is not None:
            return task.end
        return ("done" if self._clock() < task.job.deadline_s else "late"), ""

    def _move(self, task: _Task, planes: GroupPlanes, row: RowCopy) -> None:
        began_s = monotonic()
        end = self._copy(task.job, planes, row)
        took_s = monotonic() - began_s
        with self._changed:
            task.copying -= 1
            task.copying_s += took_s
            if end is None:
                self._moved_bytes += planes.block_bytes * len(row.blocks)
            else:
                task.stop(*end)
            if not (task.rows or task.copying):
                self._changed.notify_all()

    def _copy(self, job: Job, planes: GroupPlanes, row: RowCopy) -> tuple[Outcome, str] | None:
        """Copy one row. Returns the outcome of its job if the row could not be copied in time."""
        try:
            if self._clock() >= job.deadline_s:
                return "late", ""
            job.prepare_row(planes, row)
            for bundle in self._bundles[planes.group]:
                if job.kind == "store":
                    bundle.store(job.arena, row)
                else:
                    bundle.load(job.arena, row)
        except Exception as e:  # noqa: BLE001 - an executor: one job's error must not end the others
            return "failed", f"{type(e).__name__}: {e}"
        return None
