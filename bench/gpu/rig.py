"""A model's pages on a device, an arena and a mover, which every measurement of a GPU uses.

Law of this file: a copy counts only if it ended well, and no two that run at once share a byte that
either of them writes.
"""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from bench.geometries import Geometry
from bench.gpu.device import Device
from kvass.cli.bench.rig import PATIENCE_S, shared_memory, wait_for
from kvass.errors import Unavailable
from kvass.layout.copy_plan import CopyPlan
from kvass.transfer.base import Done, Job
from kvass.transfer.batch import Kind, Stagings
from kvass.transfer.device_mover import BATCH_BYTES, DeviceMover

Plans = tuple[CopyPlan, ...]
HALVES: Final = (0, 1)


class Rig:
    """One prompt of ``tokens`` tokens, in a block table to store from and one to load into; an
    arena, in shared memory as the daemon's is, with room for it twice: its *halves*.

    ``stagings``: stages for its mover; None: those that an engine would choose. ``batch_bytes``: as
    for ``DeviceMover``."""

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        tokens: int,
        stagings: Stagings | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self.device, self.geometry = device, geometry
        blocks = geometry.blocks(tokens, 2)
        self.planes = geometry.planes(blocks)
        self.source, self.target = geometry.tables(tokens, 2, np.random.default_rng(0))
        self.rows = geometry.rows(tokens)
        self._row = geometry.arena_bytes(geometry.chunk_tokens)
        half = self.rows * self._row
        self.stores = [geometry.plans(self.planes, self.source, n * half) for n in HALVES]
        self.loads = [geometry.plans(self.planes, self.target, n * half) for n in HALVES]
        self.bytes = sum(plan.bytes for plan in self.stores[0])
        self.region = device.allocate(geometry.region_bytes(blocks))
        self.arena = shared_memory(2 * half)
        if stagings is None:
            stagings = device.stagings(self.region, self.planes)
        self.mover = DeviceMover(
            device.runtime, [self.region], self.planes, batch_bytes=batch_bytes, stagings=stagings
        )

    def close(self) -> None:
        """Copies first, then memory."""
        self.mover.close()
        self.arena.close()
        self.device.free(self.region)

    def fill(self, seed: int) -> None:
        """Other bytes in every page than last time."""
        self.device.fill(self.region, seed)

    def spoil(self) -> None:
        """Nothing right in the pages that are loaded into."""
        self.device.clear(self.region, self.planes, self.target)

    def same(self) -> bool:
        """Whether every page loaded is the page stored."""
        return self.device.same(self.region, self.planes, self.source, self.target)

    def chunk(self, row: int) -> Plans:
        """A plan for one chunk of the prompt, to store it alone."""
        table = [ids[row : row + 1] for ids in self.source]
        return self.geometry.plans(self.planes, table, row * self._row)

    def part(self, nth: int, of: int) -> Plans:
        """A plan for every ``of``-th chunk: what the parts store lies apart."""
        table = [ids[nth::of] for ids in self.source]
        return self.geometry.plans(self.planes, table, nth * -(-self.rows // of) * self._row)

    def submit(self, kind: Kind, plans: Plans) -> None:
        """Give the mover a job."""
        self.mover.submit(Job(kind, plans, self.arena.buffer))

    def end(self) -> None:
        """Wait for all jobs; raises Unavailable unless all ended well."""
        ended = self.mover.drain(PATIENCE_S)
        check(self.mover.poll(), ended)

    def move(self, *jobs: tuple[Kind, Plans]) -> None:
        """Jobs at once, from the first ``submit`` to the last one's end."""
        for kind, plans in jobs:
            self.submit(kind, plans)
        self.end()


def check(done: list[Done], ended: bool = True) -> None:
    """Raise Unavailable unless all of ``done`` went well."""
    for one in done:
        if not one.ok:
            raise Unavailable(f"a {one.job.kind} ended {one.outcome}: {one.error}")
    if not ended:
        raise Unavailable(f"the device did not end its copies within {PATIENCE_S:.0f} s")


class Stores(threading.Thread):
    """Stores as fast as the device takes them, from a thread of their own: two jobs in turn, each
    given anew when it is over, so that the stream never runs dry."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(name="kvass-bench-stores", daemon=True)
        self.bytes = 0
        """Stored so far, whole jobs."""
        self._rig = rig
        self._plans = [plans for n in HALVES if (plans := rig.part(n, len(HALVES)))[0].rows]
        self._free = [threading.Event() for _ in self._plans]
        self._ending = threading.Event()
        self._failed = False

    def run(self) -> None:
        for free in self._free:
            free.set()
        while not self._ending.is_set() and not self._failed:
            for plans, free in zip(self._plans, self._free, strict=True):
                if not free.wait(PATIENCE_S):
                    return
                free.clear()
                self._give(plans, free)

    def _give(self, plans: Plans, free: threading.Event) -> None:
        def over(done: Done) -> None:
            self.bytes += done.job.bytes
            self._failed = self._failed or not done.ok
            free.set()

        self._rig.mover.submit(Job("store", plans, self._rig.arena.buffer, on_done=over))

    def wait_flowing(self) -> None:
        """Until the first job is over. Raises Unavailable if that never happens."""
        wait_for(lambda: self.bytes > 0 or not self.is_alive(), "the first store")

    def end(self) -> None:
        """Store no more. Raises Unavailable if anything went wrong."""
        self._ending.set()
        self.join()
        self._rig.end()
