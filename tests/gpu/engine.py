"""An engine without a model over a real daemon, its KV tensors on a device.

The classes are those that the connector uses (``SchedulerClient``, ``WorkerClient``, ``plan_copy``,
``DeviceMover``), called in the order of vLLM 0.32's model runners; nothing waits for the device in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.geometries import geometry as named
from kvass.client.parallel import ParallelStrategy
from kvass.client.worker import WorkerClient
from kvass.messages import Register
from kvass.testing.fake_engine import FakeEngine
from kvass.testing.fake_rank import FakeRank, Transfer
from kvass.transfer.device_mover import DeviceMover
from kvass.types import RankLayout
from tests.gpu.device import Device
from tests.gpu.kv import KvMemory, on
from tests.gpu.rig import NEVER_KERNEL


class DeviceRank(FakeRank):
    """A rank whose KV memory is on a device."""

    def __init__(self, socket: str, terms: Register, kv: KvMemory, mover: DeviceMover) -> None:
        self.rank, self.alive = terms.rank, True
        self.memory = self.kv = kv
        self.mover = mover
        self.client = WorkerClient(socket, terms)
        self.client.start()

    def copy(self, what: Transfer) -> None:
        with self.kv.device.engine():
            super().copy(what)


class DeviceEngine(FakeEngine):
    """An engine of one rank of the geometry ``name`` on ``device``, with ``rows`` rows' blocks.

    Engines of one geometry share a namespace. ``step`` is what a model runner does.
    """

    def __init__(
        self, socket: str, device: Device, name: str, *, rows: int = 12, seed: int = 0, **more: Any
    ) -> None:
        self.device, self.geometry = device, on(device, named(name))
        self._more: dict[str, Any] = {"kernel_below": NEVER_KERNEL, **more}
        chunk = self.geometry.chunk_tokens
        super().__init__(
            socket,
            ParallelStrategy(),
            [RankLayout(self.geometry.groups)],
            chunk_tokens=chunk,
            identity={"model": name, "device": device.where},
            blocks=self.geometry.blocks(rows * chunk),
            seed=seed,
        )
        widths = [group.row_blocks(chunk) for group in self.geometry.groups]
        ids = 1 + np.random.default_rng(seed).permutation(self.blocks - 1)
        ends = np.cumsum([rows * width for width in widths])[:-1]
        self._free = np.split(ids, ends)  # groups share their memory: a block is one group's

    def _new_rank(self, rank: int) -> DeviceRank:
        terms = self.world.at(rank).register(
            self.instance, self.identity, self.chunk_tokens, self.layouts[0]
        )
        kv = KvMemory(self.device, self.geometry, self.blocks)
        runtime = self._more.pop("runtime", self.device.runtime)
        return DeviceRank(
            self.socket, terms, kv, DeviceMover(runtime, [kv.region], kv.planes, **self._more)
        )

    @property
    def kv(self) -> KvMemory:
        """The rank's tensors."""
        (rank,) = self.ranks
        assert isinstance(rank, DeviceRank)
        return rank.kv

    def verify(self) -> int:
        """As ``FakeEngine.verify``, of what moved."""
        right = 0
        for what, _ in self._loaded:
            right += self.kv.verify(what.keys, what.moving)
            self._give_blocks(what.tables)
        self._loaded.clear()
        return right

    def reserve(self, prompt: Sequence[int]) -> Transfer | None:
        """As ``FakeEngine.reserve``, and handed over."""
        return self._handed_over(super().reserve(prompt))

    def match(self, prompt: Sequence[int]) -> Transfer | None:
        """As ``FakeEngine.match``, and handed over. Of a window or a state the last rows move."""
        what = super().match(prompt)
        if what is not None:
            every = range(len(what.keys))
            what.which = tuple(tuple(every[len(every) - len(slots) :]) for slots in what.slots)
        return self._handed_over(what)

    def _handed_over(self, what: Transfer | None) -> Transfer | None:
        assert what is None or self.hand_over(what), "the daemon is gone"
        return what

    def step(self, work: Transfer) -> None:
        """Carry out the step that ``work`` was planned for: new blocks are zeroed, the target and
        the drafter compute, and then the copy is submitted.

        Blocks that nobody holds are rewritten, as by requests that store nothing.
        """
        self.kv.zero()
        self.kv.forward()
        for kernel in self.kv.fills(self._free, 0xDD):
            self.device.queue(kernel)
        self.kv.draft()
        self.copy(work)
