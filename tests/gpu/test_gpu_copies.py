"""What only a GPU can show: torch, triton and kvass, no vLLM. **Never run yet** (docs/gpu.md).

Law of this file: bytes say where they belong, HostMover on a copy in host memory says what is
right, and each test of an order has a control without it that must go wrong.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvass.arena import memory
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Done, Job, U8Array
from kvass.transfer.cuda import CudaMover
from kvass.transfer.cuda_runtime import DriverRuntime, open_runtime
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.host import HostMover
from kvass.transfer.runtime import Event, Fault, Region


def _gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _gpu(), reason="needs an NVIDIA GPU and torch with CUDA"),
]


@dataclass(frozen=True)
class Geometry:
    """Pages of ``page`` bytes, ``layers`` of them a block; ``outer``: which index is outermost."""

    name: str
    layers: int
    page: int
    outer: str = "layers"
    pad: int = 0
    blocks: int = 130
    chunk: int = 16

    @property
    def planes(self) -> GroupPlanes:
        stride = self.page + self.pad
        if self.outer == "blocks":
            planes = [
                Plane(n * stride, self.layers * stride, self.page) for n in range(self.layers)
            ]
        else:
            planes = [
                Plane(n * self.blocks * stride, stride, self.page) for n in range(self.layers)
            ]
        return GroupPlanes(0, tuple(planes), self.blocks, self.chunk)

    @property
    def bytes(self) -> int:
        return self.layers * self.blocks * (self.page + self.pad)


GEOMETRIES = [
    Geometry("llama-8b", 32, 64 << 10),
    Geometry("llama-8b, blocks outermost", 32, 64 << 10, "blocks"),
    Geometry("70b-tp8", 80, 8 << 10, "blocks"),
    Geometry("deepseek-v3 mla", 61, 18 << 10),
    Geometry("gpt-oss", 12, 32 << 10),
    Geometry("qwen3-next, padded", 4, 1088 << 10, "blocks", 4096, 20, 1),
    Geometry("deepseek-v4, odd pages", 8, 37440, "blocks", 8),
    Geometry("odd", 3, 1001, "layers", 7),
]


class Rig:
    """KV pages on the device, an arena, a mover; ``oracle``: the same pages on the host."""

    def __init__(self, geometry: Geometry, runtime: DriverRuntime, **more: Any) -> None:
        import torch

        self.planes = planes = geometry.planes
        rng = np.random.default_rng(5)
        self.before: U8Array = rng.integers(0, 256, geometry.bytes, np.uint8)
        self.pages: Any = torch.from_numpy(self.before.copy()).cuda()
        region = Region(self.pages.data_ptr(), geometry.bytes)
        ids = rng.permutation(np.arange(1, geometry.blocks))
        rows = len(ids) // geometry.chunk
        table = ids[: rows * geometry.chunk].reshape(rows, geometry.chunk)
        slots = np.arange(rows) * planes.shard_bytes
        self.plan: CopyPlan = plan_copy(planes, table, slots)
        self.shared = memory.create(rows * planes.shard_bytes)
        self.mover = CudaMover(runtime, [region], [planes], **more)

    def submit(self, kind: Any) -> None:
        self.mover.submit(Job(kind, (self.plan,), self.shared.buffer))

    def move(self, kind: Any) -> Done:
        self.submit(kind)
        return self.end()

    def end(self) -> Done:
        assert self.mover.drain(60)
        (done,) = self.mover.poll()
        return done

    def right(self, pages: U8Array) -> U8Array:
        """The arena after a store of ``pages``."""
        arena = np.zeros(self.shared.size, np.uint8)
        oracle = HostMover([pages.copy()], [self.planes])
        oracle.submit(Job("store", (self.plan,), arena))
        assert oracle.drain(60)
        oracle.close()
        return arena

    def close(self) -> None:
        self.mover.close()
        self.shared.close()


@pytest.fixture(scope="module")
def runtime() -> DriverRuntime:
    return open_runtime(0)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: g.name)
@pytest.mark.parametrize("way", ["dma", "kernel", "pageable"])
def test_every_byte_there_and_back(geometry: Geometry, way: str, runtime: DriverRuntime) -> None:
    import torch

    below = {"store": 1 << 40, "load": 1 << 40} if way == "kernel" else {"store": 0, "load": 0}
    chosen: Any = Refusing(runtime) if way == "pageable" else runtime
    rig = Rig(geometry, chosen, kernel_below=below)
    try:
        assert rig.move("store").ok
        assert np.array_equal(rig.shared.buffer, rig.right(rig.before))
        rig.pages.zero_()
        assert rig.move("load").ok
        torch.cuda.synchronize()
        assert np.array_equal(rig.right(rig.pages.cpu().numpy()), rig.shared.buffer)
    finally:
        rig.close()


class Refusing:
    """A runtime that cannot pin."""

    def __init__(self, runtime: DriverRuntime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def register(self, address: int, count: int) -> Fault:
        return Fault("refused by the test")


class Hasty(Refusing):
    """The control: a runtime whose copies wait for nothing."""

    def register(self, address: int, count: int) -> Any:
        return self._runtime.register(address, count)

    def order(self) -> Event | Fault:
        import torch

        with torch.cuda.stream(torch.cuda.Stream()):
            return self._runtime.order()


def keep_busy() -> None:
    """Give the engine's stream a second of work."""
    import torch

    torch.cuda._sleep(2_000_000_000)


@pytest.mark.parametrize("hasty", [False, True])
def test_a_store_waits_for_the_forward_pass(hasty: bool, runtime: DriverRuntime) -> None:
    chosen: Any = Hasty(runtime) if hasty else runtime
    rig = Rig(GEOMETRIES[0], chosen)
    try:
        assert rig.move("store").ok  # pins
        keep_busy()
        rig.pages.fill_(77)
        assert rig.move("store").ok
        right = np.array_equal(rig.shared.buffer, rig.right(np.full_like(rig.before, 77)))
        assert right is not hasty
    finally:
        rig.close()


@pytest.mark.parametrize("hasty", [False, True])
def test_a_load_waits_for_blocks_that_are_zeroed(hasty: bool, runtime: DriverRuntime) -> None:
    import torch

    chosen: Any = Hasty(runtime) if hasty else runtime
    rig = Rig(GEOMETRIES[0], chosen)
    try:
        assert rig.move("store").ok
        keep_busy()
        rig.pages.zero_()
        assert rig.move("load").ok
        torch.cuda.synchronize()
        right = np.array_equal(rig.right(rig.pages.cpu().numpy()), rig.shared.buffer)
        assert right is not hasty
    finally:
        rig.close()


def test_submit_does_not_wait_for_the_device(runtime: DriverRuntime) -> None:
    import torch

    rig = Rig(GEOMETRIES[0], runtime)
    try:
        assert rig.move("store").ok
        keep_busy()
        end = torch.cuda.Event()
        end.record()
        rig.submit("store")
        assert not end.query(), "submit took as long as the work before it"
        assert rig.end().ok
    finally:
        rig.close()


def test_the_worker_keeps_little_memory_of_the_device(runtime: DriverRuntime) -> None:
    import torch

    rig = Rig(GEOMETRIES[2], runtime, kernel_below=KERNEL_BELOW)
    try:
        assert rig.move("store").ok
        before = torch.cuda.mem_get_info()[0]
        for kind in ("load", "store", "load"):
            assert rig.move(kind).ok
        assert before - torch.cuda.mem_get_info()[0] <= 16 << 20
    finally:
        rig.close()
