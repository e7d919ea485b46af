"""A GPU to be measured that is none: a fake GPU copies, torch's CPU tensors are the memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import numpy as np

from bench.gpu.device import Device, Plain
from bench.gpu.torch_device import TorchMemory
from kvass.layout.describe import GroupPlanes
from kvass.transfer.batch import Kind, Region, Stage, Staging, Stagings
from kvass.transfer.device import Event, Fault
from kvass.types import I64Array
from tests.support.gpu.fake_device import Piece
from tests.support.gpu.fake_gpu import FakeGpu

COMPUTE_S = 0.02


class Spoiling(FakeGpu):
    """Flips a bit of the ``wrong``-th piece of ``kind`` that it copies; -1: of none."""

    def __init__(self, kind: Kind = "load", wrong: int = -1) -> None:
        super().__init__(0, eager=400, watched=False)
        self._kind, self._wrong = kind, wrong

    def order(self) -> Event | Fault:
        with self.engine_thread():
            return super().order()

    def _move(self, piece: Piece) -> None:
        super()._move(piece)
        chosen = piece.load == (self._kind == "load")
        if chosen and self._wrong == 0:
            ctypes.c_uint8.from_address(piece.target).value ^= 1
        self._wrong -= chosen


class FakeDevice(TorchMemory, Device):
    """See above. ``freed``: regions that were given back."""

    def __init__(self, fake: FakeGpu | None = None) -> None:
        super().__init__("cpu")
        self.fake = self.runtime = fake or Spoiling()
        self.freed: list[Region] = []
        self.made: list[Region] = []

    def facts(self) -> dict[str, str]:
        return {"gpu": "none"}

    def need(self, count: int) -> None:
        assert count > 0

    def allocate(self, count: int) -> Region:
        region = super().allocate(count)
        self.fake.adopt(self._tensors[region.address].numpy())
        self.made.append(region)
        return region

    def free(self, region: Region) -> None:
        super().free(region)
        self.freed.append(region)

    def plain(self, count: int) -> Plain:
        return _Plain(count)

    def stagings(self, region: Region, planes: Sequence[GroupPlanes]) -> Stagings:
        """Small stages for stores: what is measured on a fake says nothing."""
        stages = [self.fake.open_stage(1 << 20) for _ in range(2)]
        return {"store": Staging(1 << 40, tuple(x for x in stages if isinstance(x, Stage)))}

    def kernel_s(self, sources: I64Array, targets: I64Array, sizes: I64Array) -> float | None:
        for source, target, count in zip(sources, targets, sizes, strict=True):
            ctypes.memmove(int(target), int(source), int(count))
        return COMPUTE_S

    def host_kernel_s(
        self, sources: I64Array, offsets: I64Array, sizes: I64Array, total: int
    ) -> float | None:
        host = np.empty(total, np.uint8)
        return self.kernel_s(sources, host.ctypes.data + offsets, sizes)

    def compute(self, products: int) -> float:
        time.sleep(COMPUTE_S)
        return COMPUTE_S * products

    def check(self) -> None:
        """All is given back, and nothing was asked that CUDA forbids."""
        assert self.fake.violations == []
        assert not self.fake.registered
        assert set(self.freed) == set(self.made)
        assert not self._tensors


class _Plain(Plain):
    """Host memory both ways."""

    def __init__(self, count: int) -> None:
        self._memory = np.zeros((2, count), np.uint8)

    def move(self, *kinds: Kind) -> None:
        for _ in kinds:
            self._memory[0] = self._memory[1]
