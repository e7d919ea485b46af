"""Splits a job into batches of copies: arrays of addresses and lengths, without Python per block.

Pages that are adjacent both in the arena and on the device are one run. No run crosses a boundary
of the arena's windows. The windows of a batch are pinned as late as possible, while earlier batches
are in flight. Runs in windows that are not pinned are copied as pageable memory.

Short runs cost a copy engine more than their bytes do. In a slot they lie back to back, in the
order of the row's pages. So as long as a batch is *staged* in that order on the device, the arena's
side of it is one piece, or a few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvass.layout.copy_plan import CopyPlan, RowCopy
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Job
from kvass.transfer.batch import MAX_DESCRIPTORS, Batch, Kind, Region, Staging, Way
from kvass.transfer.pins import BoolArray, Pinned
from kvass.types import I64Array

KERNEL_BELOW: Final[dict[Kind, int]] = {"store": 0, "load": 28 << 10}
"""By kind: runs shorter than this are copied by a kernel. vLLM has the same limit
(``THRESHOLD_BYTES``), found on an H100."""
KERNEL_UNIT: Final = 8
"""The kernel copies words of this many bytes. Runs that are no multiple of it are copied by DMA."""
PAGEABLE_PART: Final = 4
"""A batch of pageable memory has this part of the bytes of others: the call that gives it may block
with the driver's locks held, and then the engine's own calls wait."""


@dataclass(frozen=True, slots=True, eq=False)
class HowToCopy:
    """How the copies of one kind are made. Runs shorter than ``kernel_below`` are copied by a
    kernel, unless they are staged (``batch.Staging``), which no fewer than ``fewest_staged`` are. A
    batch has about ``bytes`` bytes (see ``PAGEABLE_PART``) and at most ``runs`` runs. ``pins``:
    whether memory may be pinned."""

    kernel_below: int
    staging: Staging | None
    fewest_staged: int
    bytes: int
    runs: int
    pins: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of bytes to copy: ``count[i]`` bytes at device address ``device[i]`` and at byte
    ``host[i]`` of the arena."""

    device: I64Array
    host: I64Array
    count: I64Array

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, part: I64Array | BoolArray | slice) -> Runs:
        return Runs(self.device[part], self.host[part], self.count[part])


def job_batches(
    job: Job,
    regions: Sequence[Region],
    pinned: Pinned,
    how: HowToCopy,
) -> Iterator[Batch]:
    """The batches of ``job``. ``pinned`` belongs to the job's arena."""
    for runs in plan_runs(job.plans, regions, pinned.window):
        fast = pinned.want(runs.host // pinned.window, job.populated if how.pins else 0)
        for way, some in choose(runs, fast, how):
            ends = (some.host + pinned.address).view(np.uint64), some.device.view(np.uint64)
            target, source = ends if job.kind == "store" else ends[::-1]
            most = how.bytes if way != "pageable" else -(-how.bytes // PAGEABLE_PART)
            if way == "staged" and how.staging is not None:
                most = min(most, how.staging.stages[0].bytes - int(some.count.max()))
            for part in batches(some.count, most, how.runs):
                count = some.count[part].view(np.uint64)
                batch = Batch(job.kind, way, target[part], source[part], count, int(count.sum()))
                if way == "staged":
                    batch.firsts = _pieces(some[part], pinned.window)
                yield batch


def plan_runs(plans: Sequence[CopyPlan], regions: Sequence[Region], window: int) -> Iterator[Runs]:
    """All runs of ``plans``, cut where they cross a multiple of ``window`` in the arena. A part is
    yielded for some rows at a time, so that it is copied while the next parts are computed."""
    for plan in plans:
        pages = plan.planes.chunk_blocks * len(plan.planes.planes)
        step = max(1, MAX_DESCRIPTORS // max(1, pages))
        for at in range(0, len(plan.rows) if pages else 0, step):
            runs = _pages(plan.planes, plan.rows[at : at + step], regions)
            yield _cut(_merge(runs), window)


def _pages(group: GroupPlanes, rows: Sequence[RowCopy], regions: Sequence[Region]) -> Runs:
    """A run for each page, row by row, plane by plane."""
    planes = group.planes
    base = np.array([regions[p.region].address + p.base for p in planes], np.int64)[:, None]
    stride = np.array([p.block_stride for p in planes], np.int64)[:, None]
    run = np.array([p.run for p in planes], np.int64)[:, None]
    inside = np.array(group.slot_offsets(), np.int64)[:, None]
    columns = []
    # only the first row and the last may have fewer blocks
    for some in (rows[:1], rows[1:-1], rows[1:][-1:]):
        if some:
            blocks = np.stack([row.blocks for row in some])[:, None, :]
            slot = np.array([row.slot for row in some], np.int64)[:, None, None]
            place = some[0].first + np.arange(blocks.shape[2], dtype=np.int64)
            device = base + stride * blocks
            host = slot + (inside + run * place)
            count = np.broadcast_to(run, device.shape)
            columns.append((device.ravel(), host.ravel(), count.ravel()))
    return Runs(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def _merge(runs: Runs) -> Runs:
    """Join neighbours that lie back to back on both sides."""
    joins = (runs.device[:-1] + runs.count[:-1] == runs.device[1:]) & (
        runs.host[:-1] + runs.count[:-1] == runs.host[1:]
    )
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Runs(runs.device[first], runs.host[first], np.add.reduceat(runs.count, first))


def _cut(runs: Runs, window: int) -> Runs:
    """Cut each run where it crosses a multiple of ``window`` in the arena."""
    low, high = runs.host // window, (runs.host + runs.count - 1) // window
    pieces = high - low + 1
    if int(pieces.max()) == 1:
        return runs
    of = np.repeat(np.arange(len(runs)), pieces)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(runs.host[of], (low[of] + nth) * window)
    end = np.minimum(runs.host[of] + runs.count[of], (low[of] + nth + 1) * window)
    return Runs(runs.device[of] + begin - runs.host[of], begin, end - begin)


def choose(runs: Runs, pinned: BoolArray, how: HowToCopy) -> list[tuple[Way, Runs]]:
    """The runs by how they are copied. ``pinned[i]``: the window of run ``i`` is registered."""
    words = pinned & ((runs.device | runs.host | runs.count) % KERNEL_UNIT == 0)
    staged = words if _is_staged(runs.count[words], how) else np.zeros_like(words)
    kernel = words & ~staged & (runs.count < how.kernel_below)
    dma = pinned & ~staged & ~kernel
    ways: dict[Way, BoolArray] = {"staged": staged, "dma": dma, "kernel": kernel}
    ways["pageable"] = ~pinned
    return [(way, runs if of.all() else runs[of]) for way, of in ways.items() if of.any()]


def _is_staged(count: I64Array, how: HowToCopy) -> bool:
    """Whether runs of ``count`` bytes are staged: all or none, because the pieces of host memory
    between those that are left out would be short as well."""
    staging = how.staging
    if staging is None or len(count) < how.fewest_staged:
        return False
    longest = staging.stages[0].bytes // 2
    return int(count.sum()) < staging.below * len(count) and int(count.max()) <= longest


def _pieces(runs: Runs, window: int) -> I64Array:
    """Which runs do not go on in the arena where the run before them ended, or begin a window."""
    apart = (runs.host[:-1] + runs.count[:-1] != runs.host[1:]) | (runs.host[1:] % window == 0)
    return np.flatnonzero(np.concatenate(([True], apart)))


def batches(count: I64Array, limit: int, most: int = MAX_DESCRIPTORS) -> Iterator[slice]:
    """Slices of the runs, where run ``i`` has ``count[i]`` bytes. A slice ends with the run that
    reaches ``limit`` bytes, and has at most ``most`` runs."""
    ends, at = np.cumsum(count), 0
    while at < len(count):
        before = int(ends[at - 1]) if at else 0
        to = int(np.searchsorted(ends, before + limit)) + 1
        to = min(to, at + most, len(count))
        yield slice(at, to)
        at = to
