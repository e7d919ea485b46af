"""Descriptors: a copy plan as arrays of addresses, and cut into batches. Pure numpy.

Law of this file: no Python per block or per layer-and-block; what lies back to back on both sides
is one run, and no run crosses a boundary of the arena's windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvass.layout.copy_plan import CopyPlan, RowCopy
from kvass.layout.describe import GroupPlanes
from kvass.transfer.runtime import MAX_DESCRIPTORS, Kind, Region, Way
from kvass.types import I64Array

KERNEL_BELOW: Final[dict[Kind, int]] = {"store": 0, "load": 28 << 10}
"""By kind: shorter runs than this are moved by a kernel. Published for H100, not measured by us;
``CudaMover`` takes another table."""
KERNEL_UNIT: Final = 8
"""The kernel moves words; runs that are no multiple of them go by DMA."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """``count[i]`` bytes at device address ``device[i]`` and at byte ``host[i]`` of the arena."""

    device: I64Array
    host: I64Array
    count: I64Array

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, part: slice | I64Array) -> Runs:
        return Runs(self.device[part], self.host[part], self.count[part])

    @property
    def bytes(self) -> int:
        """Bytes in all runs."""
        return int(self.count.sum())


def plan_runs(plans: Sequence[CopyPlan], regions: Sequence[Region], window: int) -> Iterator[Runs]:
    """All runs of ``plans``, cut where they cross a multiple of ``window`` in the arena; some rows
    at a time, so that the first can be on their way while the others are made."""
    for plan in plans:
        pages = plan.planes.chunk_blocks * len(plan.planes.planes)
        step = max(1, MAX_DESCRIPTORS // max(1, pages))
        for at in range(0, len(plan.rows) if pages else 0, step):
            columns = _pages(plan.planes, plan.rows[at : at + step], regions)
            yield _cut(_merge(Runs(*columns)), window)


def _pages(
    group: GroupPlanes, rows: Sequence[RowCopy], regions: Sequence[Region]
) -> tuple[I64Array, I64Array, I64Array]:
    """Device addresses, arena offsets and lengths of single pages, row by row, plane by plane."""
    planes = group.planes
    base = np.array([regions[p.region].address + p.base for p in planes], np.int64)
    stride = np.array([p.block_stride for p in planes], np.int64)
    run = np.array([p.run for p in planes], np.int64)
    inside = np.array(group.slot_offsets(), np.int64)
    columns = []
    for some in (rows[:1], rows[1:]):  # only a job's first row may have fewer blocks
        if some:
            blocks = np.stack([row.blocks for row in some])[:, None, :]
            slot = np.array([row.slot for row in some], np.int64)[:, None, None]
            place = some[0].first + np.arange(blocks.shape[2], dtype=np.int64)
            device = base[:, None] + stride[:, None] * blocks
            host = slot + (inside[:, None] + run[:, None] * place)
            columns.append((device.ravel(), host.ravel(), _spread(run, device.shape)))
    device, host, count = (np.concatenate(column) for column in zip(*columns, strict=True))
    return device, host, count


def _spread(run: I64Array, shape: tuple[int, ...]) -> I64Array:
    """``run`` of each plane, for each page of shape ``(rows, planes, blocks)``."""
    return np.broadcast_to(run[:, None], shape).reshape(-1)


def _merge(runs: Runs) -> Runs:
    """Join neighbours that lie back to back on both sides."""
    if not len(runs):
        return runs
    joins = (runs.device[:-1] + runs.count[:-1] == runs.device[1:]) & (
        runs.host[:-1] + runs.count[:-1] == runs.host[1:]
    )
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Runs(runs.device[first], runs.host[first], np.add.reduceat(runs.count, first))


def _cut(runs: Runs, window: int) -> Runs:
    """Cut each run where it crosses a multiple of ``window`` in the arena."""
    if not len(runs):
        return runs
    low, high = runs.host // window, (runs.host + runs.count - 1) // window
    pieces = high - low + 1
    if int(pieces.max()) == 1:
        return runs
    of = np.repeat(np.arange(len(runs)), pieces)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin = np.maximum(runs.host[of], (low[of] + nth) * window)
    end = np.minimum(runs.host[of] + runs.count[of], (low[of] + nth + 1) * window)
    return Runs(runs.device[of] + begin - runs.host[of], begin, end - begin)


def choose(
    runs: Runs, kind: Kind, pinned: np.ndarray | None, below: Mapping[Kind, int]
) -> list[tuple[Way, Runs]]:
    """The runs by the way they go; ``pinned[i]``: its window is registered (None: all are)."""
    if pinned is not None:
        slow, fast = runs[np.flatnonzero(~pinned)], runs[np.flatnonzero(pinned)]
        return [*choose(fast, kind, None, below), ("pageable", slow)]
    short = runs.count < below.get(kind, 0)
    if not short.any():
        return [("dma", runs)]
    short &= (runs.device | runs.host | runs.count) % KERNEL_UNIT == 0
    return [("dma", runs[np.flatnonzero(~short)]), ("kernel", runs[np.flatnonzero(short)])]


def batches(count: I64Array, limit: int, most: int = MAX_DESCRIPTORS) -> Iterator[slice]:
    """Slices of at most ``most`` runs of ``count[i]`` bytes, that end with the run that reaches
    ``limit`` bytes."""
    ends, at = np.cumsum(count), 0
    while at < len(count):
        before = int(ends[at - 1]) if at else 0
        to = int(np.searchsorted(ends, before + limit)) + 1
        to = min(to, at + most, len(count))
        yield slice(at, to)
        at = to
