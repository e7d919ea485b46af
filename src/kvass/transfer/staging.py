"""Whether short runs of an engine's pages go through a stage on the device: measured at the start.

A copy engine takes about 1 us for a run, whatever its length. A stage costs a kernel, and a second
copy on the device. Which is faster depends on the card, its bus and the pages, so both ways copy
some of the engine's own pages, and the faster one is used from then on.

- Stages are taken only where runs are short and the engine has a kernel. A device without memory
  for them copies as it would without this file.
- Before anything is measured, pages of known bytes go through the stages (``check_stages``).
- What is loaded into the engine's pages is what was stored from them, by the same mover, just
  before. Call this before the engine serves.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from time import monotonic
from typing import Final

import numpy as np

from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Job, U8Array
from kvass.transfer.batch import Kind, Region, Stage, Staging, Stagings
from kvass.transfer.descriptors import KERNEL_UNIT
from kvass.transfer.device import DeviceRuntime, Fault, first_line
from kvass.transfer.device_mover import NO_STAGES, DeviceMover
from kvass.transfer.open_device import ERRORS
from kvass.transfer.self_check import Scratch, check_stages

STAGE_BYTES: Final = 16 << 20
STAGES: Final = 2
"""Of each kind of job: one is filled while the other one is emptied."""
LONGEST: Final = 64 << 10
"""Runs of this length and more are not staged: copy engines reach 0.8 of their speed with them."""
FASTER: Final = 1.1
"""How much faster staged copies must be."""
PROBE_BYTES: Final = 32 << 20
ROUNDS: Final = 5
_PATIENCE_S: Final = 60.0
_KINDS: Final[tuple[Kind, ...]] = ("store", "load")  # a load needs what was stored
_log = logging.getLogger(__name__)
_kept: Final[list[object]] = []
"""Scratch pages and stages that a copy which did not end may still write to."""


@dataclass(frozen=True)
class Speeds:
    """Bytes per second of copies of runs of ``run`` bytes, with stages and without."""

    kind: Kind
    run: int
    staged: float
    plain: float

    @property
    def better(self) -> bool:
        return self.staged > FASTER * self.plain

    def __str__(self) -> str:
        chosen = "through a stage" if self.better else "without"
        return (
            f"{self.kind}s of {self.run / 1024:.3g} KiB pieces: {self.staged / 1e9:.1f} GB/s "
            f"through a stage, {self.plain / 1e9:.1f} without; they go {chosen}"
        )


def choose_stagings(
    runtime: DeviceRuntime,
    regions: Sequence[Region],
    groups: Sequence[GroupPlanes],
    kernel_below: Mapping[Kind, int],
    make_scratch: Callable[[], Scratch],
    clock: Callable[[], float] = monotonic,
) -> Stagings:
    """The stages for a mover with these arguments. Those that are not worth it are given back."""
    group = shortest(groups)
    if group is None or runtime.tables is None or not any(kernel_below.values()):
        return NO_STAGES
    stages = _open(runtime)
    try:
        if not stages or not _right(runtime, stages, make_scratch):
            return NO_STAGES
        found = measure(runtime, regions, group, kernel_below, stages, clock)
    except ERRORS as error:  # of torch, for example if it has no memory
        _log.warning("kvass: short pieces are copied one by one: %s", first_line(error))
        _kept.append(stages)
        return NO_STAGES
    return _chosen(runtime, found, stages)


def _right(
    runtime: DeviceRuntime, stages: tuple[Stage, ...], make_scratch: Callable[[], Scratch]
) -> bool:
    scratch = make_scratch()
    if wrong := check_stages(runtime, scratch, stages):
        _kept.extend((scratch, stages))
        _log.warning("kvass: short pieces are copied one by one on this device: %s", wrong)
    return not wrong


def _chosen(runtime: DeviceRuntime, found: Sequence[Speeds], stages: tuple[Stage, ...]) -> Stagings:
    """Stages of its own for each kind that is faster with them."""
    below = dict[Kind, int]()
    for one in found:
        _log.info("kvass: %s", one)
        if one.better:
            below[one.kind] = one.run * 3 // 2  # half of the way to the next length
    chosen = dict[Kind, Staging]()
    for kind, limit in below.items():
        own = stages if not chosen else _open(runtime)
        if own:
            chosen[kind] = Staging(limit, own)
    return chosen


def shortest(groups: Sequence[GroupPlanes]) -> GroupPlanes | None:
    """The group with the shortest runs, where these can be staged; None: there is none."""
    some = [g for g in groups if g.planes and g.chunk_blocks and _run(g) < LONGEST and _rows(g)]
    some = [g for g in some if not any(plane.run % KERNEL_UNIT for plane in g.planes)]
    return min(some, key=_run, default=None)


def _run(group: GroupPlanes) -> int:
    """The mean run of blocks that are no neighbours."""
    return group.block_bytes // len(group.planes)


def _open(runtime: DeviceRuntime) -> tuple[Stage, ...]:
    """New stages; none if the device has no memory for them."""
    stages = list[Stage]()
    for _ in range(STAGES):
        stage = runtime.open_stage(STAGE_BYTES)
        if isinstance(stage, Fault):
            _log.info("kvass: no memory for a stage, so short pieces go one by one: %s", stage.text)
            return ()
        stages.append(stage)
    return tuple(stages)


# ---------------------------------------------------------------- measuring


def measure(
    runtime: DeviceRuntime,
    regions: Sequence[Region],
    group: GroupPlanes,
    kernel_below: Mapping[Kind, int],
    stages: tuple[Stage, ...],
    clock: Callable[[], float] = monotonic,
) -> list[Speeds]:
    """How fast runs of a block are copied, of two neighbours, of four and so on. A kind ends with
    the first length that is not better with stages. Empty if a copy failed: then the stages are
    kept, because it may not have ended."""
    stagings: Stagings = {kind: Staging(1 << 40, stages) for kind in _KINDS}
    found, kinds, neighbours = list[Speeds](), list(_KINDS), 1
    with ExitStack() as stack:
        more = runtime, regions, group, kernel_below
        ways = [stack.enter_context(_way(*more, one, clock)) for one in (stagings, NO_STAGES)]
        while kinds and neighbours * _run(group) < LONGEST:
            plan = _plan(group, neighbours)
            for kind in _KINDS if plan.rows else ():
                seconds = _seconds(ways, kind, plan)
                if seconds is None:
                    _kept.append(stages)
                    return []
                if kind in kinds:
                    speeds = (plan.bytes / one for one in seconds)
                    found.append(Speeds(kind, neighbours * _run(group), *speeds))
                    if not found[-1].better:
                        kinds.remove(kind)
            neighbours *= 2
    return found


class _Way:
    """A mover, and an arena of its own, because memory is pinned once."""

    def __init__(self, mover: DeviceMover, size: int) -> None:
        self.mover, self.size = mover, size
        self.arena: U8Array = np.frombuffer(mmap.mmap(-1, size), np.uint8)

    def move(self, kind: Kind, plan: CopyPlan) -> float | None:
        """How many seconds a job takes; None if it fails."""
        self.mover.submit(Job(kind, (plan,), self.arena))
        if not self.mover.drain(_PATIENCE_S):
            return None
        (done,) = self.mover.poll()
        return max(done.seconds, 1e-9) if done.ok else None


@contextmanager
def _way(
    runtime: DeviceRuntime,
    regions: Sequence[Region],
    group: GroupPlanes,
    kernel_below: Mapping[Kind, int],
    stagings: Stagings,
    clock: Callable[[], float],
) -> Iterator[_Way]:
    mover = DeviceMover(
        runtime, regions, [group], clock=clock, kernel_below=kernel_below, stagings=stagings
    )
    try:
        yield _Way(mover, _rows(group) * group.shard_bytes)
    finally:
        mover.close()


def _rows(group: GroupPlanes) -> int:
    """How many rows are copied: half of the pages, at most."""
    return min(
        max(1, PROBE_BYTES // group.shard_bytes), (group.blocks - 1) // 2 // group.chunk_blocks
    )


def _plan(group: GroupPlanes, neighbours: int) -> CopyPlan:
    """Rows of blocks of which so many are neighbours."""
    count = _rows(group) * group.chunk_blocks
    begins = np.arange(1, group.blocks - neighbours, neighbours + 1)
    np.random.default_rng(neighbours).shuffle(begins)
    ids = (begins[:, None] + np.arange(neighbours)).reshape(-1)[:count]
    table = ids[: len(ids) // group.chunk_blocks * group.chunk_blocks]
    table = table.reshape(-1, group.chunk_blocks)
    return plan_copy(group, table, group.shard_bytes * np.arange(len(table)))


def _seconds(ways: Sequence[_Way], kind: Kind, plan: CopyPlan) -> list[float] | None:
    """The median of each way. The ways take turns, and the first round warms up."""
    taken: list[list[float]] = [[] for _ in ways]
    for number in range(ROUNDS + 1):
        for way, times in zip(ways, taken, strict=True):
            seconds = way.move(kind, plan)
            if seconds is None:
                return None
            if number:
                times.append(seconds)
    return [median(times) for times in taken]
