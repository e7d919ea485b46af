"""A mover between the KV tensors of one geometry and an arena, with no daemon.

Law of this file: a program looks at bytes after a job's end only, and at all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.geometries import geometry as named
from kvass.arena import memory
from kvass.testing.pages import WrongPageError
from kvass.transfer.base import Done, Job
from kvass.transfer.batch import Kind
from kvass.transfer.device_mover import DeviceMover
from tests.gpu.device import Device
from tests.gpu.kv import KvMemory, keys_of, on, wrong_row

PATIENCE_S = 60.0
NEVER_KERNEL: dict[Kind, int] = {"store": 0, "load": 0}
ALWAYS_KERNEL: dict[Kind, int] = {"store": 0, "load": 1 << 40}


class Rig:
    """``rows`` rows of every group. Blocks are in two disjoint tables, ``tables[0]`` and ``[1]``;
    ``arena`` is another's to give, else our own. ``more`` is for the mover."""

    def __init__(
        self,
        device: Device,
        name: str,
        rows: int = 3,
        arena: memory.Arena | None = None,
        **more: Any,
    ) -> None:
        self.device, self.rows = device, rows
        self.geometry = geometry = on(device, named(name))
        tokens = rows * geometry.chunk_tokens
        self.kv = KvMemory(device, geometry, geometry.blocks(tokens, 2))
        self.tables = geometry.tables(tokens, 2, np.random.default_rng(3))
        self.keys = keys_of(name, rows)
        self.arena = arena or memory.create(geometry.arena_bytes(tokens))
        self.plans = [geometry.plans(self.kv.planes, table) for table in self.tables]
        runtime = more.pop("runtime", device.runtime)
        more.setdefault("kernel_below", NEVER_KERNEL)
        self.mover = DeviceMover(runtime, [self.kv.region], self.kv.planes, **more)

    # ------------------------------------------------------------ the engine

    def compute(self, table: int = 0, keys: list[bytes] | None = None) -> None:
        """Queue the kernels that write the rows."""
        for kernel in self.kv.writes(keys or self.keys, self.tables[table]):
            self.device.queue(kernel)

    def fill(self, value: int, table: int = 0) -> None:
        """Queue the kernels that fill the blocks with one byte."""
        for kernel in self.kv.fills(self.tables[table], value):
            self.device.queue(kernel)

    # ------------------------------------------------------------ copies

    def submit(self, kind: Kind, table: int = 0) -> None:
        """As the connector's hook does."""
        with self.device.engine():
            self.mover.submit(Job(kind, self.plans[table], self.arena.buffer))

    def end(self) -> Done:
        """Of the one job that runs."""
        assert self.mover.drain(PATIENCE_S)
        (done,) = self.mover.poll()
        return done

    def move(self, kind: Kind, table: int = 0) -> Done:
        """A job, from its submission to its end."""
        self.submit(kind, table)
        return self.end()

    def given_time(self) -> None:
        """Have copies that wait for nothing end; no others can, while the engine is held."""
        self.mover.drain(0.3)
        self.device.let_go()

    # ------------------------------------------------------------ what is right

    def stored(self, keys: list[bytes] | None = None) -> bool:
        """Whether the arena holds the rows."""
        return not wrong_row(self.arena.buffer, self.plans[0], keys or self.keys)

    def loaded(self, table: int = 0, keys: list[bytes] | None = None) -> bool:
        """Whether the blocks hold the rows."""
        try:
            return self.kv.verify(keys or self.keys, self.tables[table]) > 0
        except WrongPageError:
            return False

    def close(self) -> None:
        """The mover first."""
        self.device.let_go()
        self.mover.close()
        self.arena.close()


@contextmanager
def rigged(device: Device, name: str, rows: int = 3, **more: Any) -> Iterator[Rig]:
    """A rig, and its end."""
    rig = Rig(device, name, rows, **more)
    try:
        yield rig
    finally:
        rig.close()
