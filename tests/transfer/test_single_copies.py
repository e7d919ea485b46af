"""Copies one by one, for drivers that cannot take batches: the same bytes, and less that flies.

A driver made of Python moves the bytes, late. That the calls are those of CUDA's ABI:
``test_cuda_abi.py``.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import cuda_runtime
from kvass.transfer.base import Job, U8Array
from kvass.transfer.cuda import CudaMover
from kvass.transfer.cuda_copies import SINGLE_RUNS
from kvass.transfer.cuda_runtime import MissingError, TorchScratch, open_gpu
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.host import HostMover
from kvass.transfer.runtime import Region
from kvass.types import I64Array
from tests.support.gpu.fake_cuda import FakeCuda
from tests.transfer.python_driver import Driver, runtime

Move = tuple[int, int, int]
DOWN, UP, BATCH = "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync"
PLANES = GroupPlanes(
    0, (Plane(0, 512, 512), Plane(512 * 2000, 64, 56), Plane(576 * 2000, 256, 203)), 2000, 30
)
BYTES = 832 * 2000


class Moving(Driver):
    """Moves bytes when it is asked for an event, all that its stream was given before that."""

    def __init__(self, spoil: Callable[[Move], Move] = lambda move: move, **more: int) -> None:
        super().__init__(**more)
        self._spoil = spoil
        self._streams = defaultdict[int, list[Move]](list)
        self._events: dict[int, int] = {}
        self.most = Counter[str]()
        """That was called, and had not moved: what a stream that waits would have held."""

    def __getattr__(self, name: str) -> Any:
        ask = super().__getattr__(name)

        def call(*args: Any) -> int:
            result: int = ask(*args)
            if not result:
                self._do(name, args)
            return result

        return call

    def _do(self, name: str, args: tuple[Any, ...]) -> None:
        if name in (DOWN, UP):
            target, source, count, stream = (arg.value for arg in args)
            self.queue(stream, name, (target, source, count))
        elif name == "cuEventRecord":
            self._events[args[0].value] = args[1].value
        elif name == "cuEventQuery":
            self._run(self._events[args[0].value])

    def _batch(self, *args: Any) -> int:
        columns = [(ctypes.c_uint64 * args[3]).from_address(at)[:] for at in args[:3]]
        for move in zip(*columns, strict=True):
            self.queue(args[8], BATCH, move)
        return super()._batch(*args)

    def queue(self, stream: int, name: str, move: Move) -> None:
        moves = self._streams[stream]
        moves.append(self._spoil(move))
        self.most[name] = max(self.most[name], len(moves))

    def launch(self, stream: int, rows: I64Array) -> None:
        for target, source, count in rows.T.tolist():
            self.queue(stream, "kernel", (target, source, count))

    def _run(self, stream: int) -> None:
        for target, source, count in self._streams.pop(stream, ()):
            ctypes.memmove(target, source, count)


def plans(rng: np.random.Generator, rows: int = 60) -> tuple[CopyPlan, ...]:
    table = rng.permutation(np.arange(1, PLANES.blocks))[: rows * PLANES.chunk_blocks]
    slots = rng.permutation(rows) * PLANES.shard_bytes
    return (plan_copy(PLANES, table.reshape(rows, -1), slots),)


def random_bytes(rng: np.random.Generator, size: int) -> U8Array:
    return rng.integers(0, 256, size, np.uint8)


def random_arena(rng: np.random.Generator) -> U8Array:
    """Memory that can be pinned: whole pages."""
    arena: U8Array = np.frombuffer(mmap.mmap(-1, 60 * PLANES.shard_bytes), np.uint8)
    arena[:] = random_bytes(rng, len(arena))
    return arena


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("kind", ["store", "load"])
def test_the_same_bytes_one_by_one(
    kind: Literal["store", "load"], single: bool, pinned: bool
) -> None:
    """Of 5,000 runs: each a call, and two batches of them at most behind whatever a stream
    waits for."""
    driver = Moving(cuMemHostRegister_v2=0 if pinned else 2)
    one, rng = runtime(driver, driver.launch, single=single), np.random.default_rng(7)
    device, arena = random_bytes(rng, BYTES), random_arena(rng)
    driver.lateness = 0.5
    expected = device.copy(), arena.copy()
    job = plans(rng)
    right = HostMover([expected[0]], [PLANES])
    right.submit(Job(kind, job, expected[1]))
    assert right.drain(60)
    right.close()
    region = Region(device.ctypes.data, BYTES)
    mover = CudaMover(
        *(one, [region], [PLANES]), kernel_below={"load": 60}, threaded=False, quiet=True
    )
    mover.submit(Job(kind, job, arena))
    while not mover.drain(0):
        mover.turn()
    mover.close()
    assert [done.outcome for done in mover.poll()] == ["done"]
    assert np.array_equal(device, expected[0])
    assert np.array_equal(arena, expected[1])
    call = {"store": DOWN, "load": UP}[kind]
    kernel = {"kernel"} if pinned and kind == "load" else set()
    assert set(driver.most) == kernel | {BATCH if pinned and not single else call}
    if single:
        assert SINGLE_RUNS < max(driver.most.values()) <= 2 * SINGLE_RUNS < 1000


def test_without_a_table_a_kernels_runs_are_calls_too() -> None:
    driver = Moving()
    one, rng = runtime(driver, driver.launch, tables=0, single=True), np.random.default_rng(3)
    device, arena = random_bytes(rng, BYTES), random_arena(rng)
    mover = CudaMover(
        *(one, [Region(device.ctypes.data, BYTES)], [PLANES]),
        kernel_below={"load": 1 << 20},
        threaded=False,
    )
    mover.submit(Job("load", plans(rng), arena))
    while not mover.drain(0):
        mover.turn()
    assert [done.outcome for done in mover.poll()] == ["done"]
    mover.close()
    assert set(driver.most) == {UP}


@pytest.mark.parametrize("version", [12000, 12070, 13000])
def test_they_need_no_batch_call(version: int) -> None:
    driver = Driver(version=version, cuGetProcAddress_v2=500)
    assert runtime(driver, single=True).batch_runs == SINGLE_RUNS
    assert "cuGetProcAddress_v2" not in driver.calls
    assert runtime(Driver()).batch_runs == 4096


@pytest.mark.parametrize(
    ("driver", "says"), [(Driver(version=11080), "speaks CUDA 11.8"), (Driver(direct=0), "WSL2")]
)
def test_what_else_they_need_is_one_line(driver: Driver, says: str) -> None:
    with pytest.raises(MissingError, match=says):
        runtime(driver, single=True)


def short(move: Move) -> Move:
    return move[0], move[1], move[2] - 1


@pytest.mark.parametrize("single", [True, False])
def test_the_trial_is_of_the_mode_that_was_chosen(
    single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_runtime, "TorchScratch", lambda where: TorchScratch("cpu"))

    def tried(driver: Moving) -> Any:
        monkeypatch.setattr(
            *(cuda_runtime, "open_runtime"),
            lambda device, single: runtime(driver, driver.launch, 4, single),
        )
        return open_gpu(0, single)[1]

    driver = Moving()
    assert tried(driver) is KERNEL_BELOW
    assert set(driver.most) == {"kernel", *({DOWN, UP} if single else {BATCH})}
    with pytest.raises(MissingError, match="is not right: copies: a store left wrong bytes"):
        tried(Moving(short))


def test_a_mover_gives_no_more_than_its_runtime_takes() -> None:
    """Behind an engine that is busy, on the fake: in batches of that size, two of them."""
    fake = FakeCuda(5, eager=4000)
    fake.batch_runs, fake.most_runs = 70, 140
    region, there = fake.allocate(BYTES)
    rng = np.random.default_rng(5)
    there[:] = random_bytes(rng, BYTES)
    arena = fake.map(60 * PLANES.shard_bytes)
    expected, job = arena.copy(), plans(rng)
    right = HostMover([there.copy()], [PLANES])
    right.submit(Job("store", job, expected))
    assert right.drain(60)
    right.close()
    mover = CudaMover(fake, [region], [PLANES], threaded=False)
    fake.stopped = True
    fake.queue(lambda: None)
    with fake.engine_thread():
        mover.submit(Job("store", job, arena))
    for _ in range(20):
        mover.turn()
    assert [len(batch.bytes) for batch in fake.copied] == [70, 70]
    fake.stopped = False
    while not mover.drain(0):
        mover.turn()
    mover.close()
    assert [done.outcome for done in mover.poll()] == ["done"]
    assert max(len(batch.bytes) for batch in fake.copied) == 70
    assert np.array_equal(arena, expected)
    assert fake.violations == []
