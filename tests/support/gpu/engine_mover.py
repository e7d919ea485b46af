"""A mover over a fake GPU for whole engines. The engine's own kernels are late too.

- When the mover gets a store, the pages are not computed yet: they hold noise until the engine's
  stream has run. When it gets a load, earlier kernels still write to those blocks. So a mover that
  does not wait for the engine's stream copies noise.
- Whoever looks at pages for the engine calls ``synchronize`` first. Calls other than ``order`` on
  the engine's thread are noticed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Final, Literal

from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Done, Job, U8Array
from kvass.transfer.batch import Kind, Stage, Staging, Stagings
from kvass.transfer.descriptors import KERNEL_BELOW, plan_runs
from kvass.transfer.device import Event, Fault, Stream
from kvass.transfer.device_mover import NO_STAGES, DeviceMover
from kvass.transfer.staging import choose_stagings
from tests.support.gpu.fake_device import meet
from tests.support.gpu.fake_gpu import FakeGpu
from tests.support.gpu.fake_scratch import FakeScratch

NOISE: Final = 0x3D
"""A small float: attention multiplies masked values with 0, and a NaN would stay a NaN."""
LONG: Final = 40
"""Pieces of work before an engine's kernel: copies that do not wait for it come first."""
STAGE_BYTES: Final = 64 << 10
Break = Literal["", "unordered", "hasty"]
"""Faults that no device has, to show that tests notice them. ``unordered``: streams wait for no
event. ``hasty``: every copy is reported as done at once."""
_seeds = count()


class EngineFake(FakeGpu):
    """See above."""

    broken: Break = ""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, eager=40, watched=False)
        self._ends = set[Event]()

    def break_(self, how: Break) -> None:
        """Have this fault from now on. Work submitted before is done first."""
        if how != self.broken:
            self.run()
            self.broken = how

    def finish(self) -> None:
        """Do all work of the engine's stream."""
        with self._lock:
            ops = self.streams[self.compute]
            while ops:
                self._do(ops.popleft())

    def wait(self, stream: Stream, event: Event) -> Fault | None:
        return None if self.broken == "unordered" else super().wait(stream, event)

    def done(self, event: Event) -> bool | Fault:
        if self.broken == "hasty" or (self.broken and event not in self._ends):
            return True  # of the engine's own work, too: else the mover would notice it
        return super().done(event)

    def mark(self, stream: Stream) -> Event | Fault:
        event = super().mark(stream)
        if not isinstance(event, Fault):
            self._ends.add(event)
        return event


class EngineMover(DeviceMover):
    """A mover for ``regions``, host memory that is treated as device memory. ``stages``: whether it
    has stages; None: every other one has."""

    def __init__(
        self,
        regions: Sequence[U8Array],
        planes: Sequence[GroupPlanes],
        stages: bool | None = None,
    ) -> None:
        number = next(_seeds)
        self.fake = EngineFake(number)
        self._memory = [self.fake.adopt(region) for region in regions]
        self._late: list[tuple[Kind, list[tuple[int, int]]]] = []
        """Of each kernel that has not run: the kind of job it belongs to, addresses and lengths."""
        super().__init__(
            self.fake,
            self._memory,
            planes,
            window=1 << 20,
            batch_bytes=50_000,
            stagings=self._stagings(number % 2 > 0 if stages is None else stages),
        )

    def try_stages(self) -> None:
        """The trial of ``kvass.gpu_stages``, on these pages."""
        groups = tuple(self._planes.values())
        with self.fake.engine_thread():
            choose_stagings(
                self.fake, self._memory, groups, KERNEL_BELOW, lambda: FakeScratch(self.fake)
            )

    def _stagings(self, some: bool) -> Stagings:
        """Small ones, for any number of runs."""
        self.fake.few = self.fake.fewest_staged = 1
        opened = [self.fake.open_stage(STAGE_BYTES) for _ in range(4 * some)]
        stages = tuple(one for one in opened if isinstance(one, Stage))
        if not stages:
            return NO_STAGES
        return {"store": Staging(1 << 40, stages[:2]), "load": Staging(1 << 40, stages[2:])}

    def submit(self, job: Job) -> None:
        self._check(job)
        self._delay(job)
        with self.fake.engine_thread():
            super().submit(replace(job, on_done=self._ended(job.on_done)))

    def slow(self, row_s: float) -> None:
        """Make a row's copy take so much longer (a row of the largest group)."""
        rows = [sum(x.run for x in one.planes) * one.chunk_blocks for one in self._planes.values()]
        self.fake.byte_s = row_s / max(rows)

    def synchronize(self) -> None:
        """Wait for the engine's stream."""
        self.fake.finish()

    def begin_step(self) -> None:
        """A forward pass may read any computed page, so these are computed first."""
        if any(kind == "store" for kind, _ in list(self._late)):
            if self.fake.broken:  # a copy that waits for nothing is earlier, also on a busy machine
                self.drain(10)
            self.synchronize()

    def check(self) -> None:
        """Raise ``AssertionError`` if anything was done that CUDA forbids."""
        assert not self.fake.violations, self.fake.violations

    def check_closed(self) -> None:
        """The same after ``close``; also if anything is still registered, unless it is dead."""
        self.check()
        assert self.fake.dead or not self.fake.registered

    def _delay(self, job: Job) -> None:
        """Queue the engine's earlier work on the job's blocks as a kernel that has not run yet: for
        a store it writes the pages, for a load it overwrites them with noise."""
        runs = [
            run
            for some in plan_runs(job.plans, self._memory, 1 << 62)
            for run in zip(some.device.tolist(), some.count.tolist(), strict=True)
        ]
        if any(meet(*run, *one) for _, late in list(self._late) for one in late for run in runs):
            self.synchronize()
        pages = [ctypes.string_at(*run) if job.kind == "store" else b"" for run in runs]
        if job.kind == "store":
            _write_noise(runs)

        def kernel() -> None:
            if job.kind == "load":
                _write_noise(runs)
            for (address, _), page in zip(runs, pages, strict=True):
                ctypes.memmove(address, page, len(page))
            self._late.remove((job.kind, runs))  # not before: a step that begins must wait for it

        self._late.append((job.kind, runs))
        for _ in range(LONG):
            self.fake.queue(lambda: None)
        self.fake.queue(kernel)

    def _ended(self, on_done: Callable[[Done], None] | None) -> Callable[[Done], None]:
        """When a job ends, the engine may use its blocks again, in its stream's order."""

        def ended(done: Done) -> None:
            self.synchronize()
            if on_done is not None:
                on_done(done)

        return ended


class EngineGpus:
    """Makes movers for ``FakeRank``."""

    def __init__(self) -> None:
        self.made: list[EngineMover] = []

    def __call__(self, regions: Sequence[U8Array], planes: Sequence[GroupPlanes]) -> EngineMover:
        self.made.append(EngineMover(regions, planes))
        return self.made[-1]

    def check_closed(self) -> None:
        """``EngineMover.check_closed`` of every mover."""
        for mover in self.made:
            mover.check_closed()


def _write_noise(runs: Sequence[tuple[int, int]]) -> None:
    for address, length in runs:
        ctypes.memset(address, NOISE, length)
