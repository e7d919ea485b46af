"""The trial of a GPU: passes where copies are right, notices each way in which they are wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Job, U8Array
from kvass.transfer.cuda import CudaMover
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.runtime import Batch, Event, Fault, Stream
from kvass.transfer.self_check import NO_KERNEL, NO_PINS, SCRATCH_BYTES, self_check
from tests.support.gpu.fake_cuda import FakeCuda
from tests.support.gpu.fake_device import COMPUTE


class FakeScratch:
    """Memory of a fake device; writing it takes the device a while."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        self.region, self._memory = fake.allocate(SCRATCH_BYTES)

    def write(self, data: U8Array) -> None:
        copy = data.copy()
        for _ in range(50):
            self._fake.queue(lambda: None)
        self._fake.queue(lambda: np.copyto(self._memory, copy))

    def read(self) -> U8Array:
        return self._memory.copy()  # as it is: what is over must be there


class Spoiled(FakeCuda):
    """One that does something else than it was told."""

    def __init__(self, spoil: Callable[[Batch], None], way: str = "") -> None:
        super().__init__(7, eager=40, watched=False)
        self._spoil, self._way = spoil, way

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        if not self._way or batch.way == self._way:
            self._spoil(batch)
        return super().copy(stream, batch)


def check(fake: FakeCuda) -> tuple[Any, str]:
    found = found_by(fake)
    assert not fake.registered
    return found


def found_by(fake: FakeCuda) -> tuple[Any, str]:
    scratch = FakeScratch(fake)
    with fake.engine_thread():
        return self_check(fake, scratch)


@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_is_right(seed: int) -> None:
    fake = FakeCuda(seed, eager=40, watched=False)
    assert check(fake) == (KERNEL_BELOW, "")
    assert {(batch.kind, batch.way) for batch in fake.copied} == {
        ("store", "dma"),
        ("load", "dma"),
        ("load", "kernel"),
    }
    assert fake.violations == []


def test_one_that_cannot_pin_is_right_and_never_pins(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeCuda(1, eager=40, watched=False)
    fake.plans.fail["register"] = set(range(100))
    with caplog.at_level(logging.WARNING):
        table, why = check(fake)
    assert table is NO_PINS
    assert "no memory could be pinned" in why
    assert caplog.records == [], "who opens the device says it, once"
    asked = fake.plans.calls["register"]
    region, _ = fake.allocate(4 * 4096)
    planes = GroupPlanes(0, (Plane(0, 4096, 4096),), blocks=4, chunk_blocks=1)
    mover = CudaMover(fake, [region], [planes], kernel_below=NO_PINS)
    fake.copied.clear()
    arena = np.zeros(4096, np.uint8)
    for kind in ("store", "load"):
        mover.submit(Job(kind, (plan_copy(planes, [[1]], [0]),), arena))
    assert mover.drain(10)
    mover.close()
    assert {batch.way for batch in fake.copied} == {"pageable"}
    assert fake.plans.calls["register"] == asked, "it never pins again"


class ElsewhereCuda(FakeCuda):
    """Its kernel runs on another stream: nothing orders it, and our events say nothing of it. The
    first launch compiles, which takes longer than all work that was queued."""

    other: Stream | None = None

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        if batch.way != "kernel":
            return super().copy(stream, batch)
        if self.other is None:
            while self.streams[COMPUTE]:
                self.step()
            opened = super().open_stream("load")
            assert not isinstance(opened, Fault)
            self.other = opened
        return super().copy(self.other, batch)


@pytest.mark.parametrize("seed", range(5))
def test_a_kernel_on_another_stream_is_not_used(seed: int) -> None:
    """It is late: it may write blocks while the next round's store reads them, too."""
    table, why = found_by(ElsewhereCuda(seed, eager=40, watched=False))
    assert table is NO_KERNEL
    assert why.startswith("the kernel: ")
    assert "left wrong bytes in" in why


@pytest.mark.parametrize("seed", range(5))
def test_a_load_whose_end_is_reported_early(seed: int) -> None:
    class Early(FakeCuda):
        """Events lie before the last batch of a load, from the second job on."""

        early: Event | Fault | None = None
        last, loads = "load", 0

        def copy(self, stream: Stream, batch: Batch) -> Fault | None:
            self.loads += batch.kind == "load" and self.last == "store"
            self.last = batch.kind
            if batch.kind == "load" and self.loads > 1:
                self.early = super().mark(stream)
            return super().copy(stream, batch)

        def mark(self, stream: Stream) -> Event | Fault:
            early, self.early = self.early, None
            return early or super().mark(stream)

    table, why = found_by(Early(seed, eager=2, watched=False))
    assert table is None
    assert why == "copies: a load left wrong bytes in device memory"


def shift(batch: Batch) -> None:
    batch.target[0] += np.uint64(8)


def swap(batch: Batch) -> None:
    same = np.flatnonzero(batch.bytes == batch.bytes[0])
    batch.source[same] = batch.source[same[::-1]]


def shorten(batch: Batch) -> None:
    batch.bytes[-1] -= np.uint64(8)


@pytest.mark.parametrize("spoil", [shift, swap, shorten])
@pytest.mark.parametrize("kind", ["store", "load"])
def test_copies_that_go_elsewhere(spoil: Callable[[Batch], None], kind: str) -> None:
    fake = Spoiled(lambda batch: spoil(batch) if batch.kind == kind else None, "dma")
    table, why = check(fake)
    assert table is None
    assert f"a {kind} left wrong bytes in" in why


@pytest.mark.parametrize("spoil", [shift, swap, shorten])
def test_a_kernel_that_is_wrong_is_not_used(spoil: Callable[[Batch], None]) -> None:
    table, why = check(Spoiled(spoil, "kernel"))
    assert table is NO_KERNEL
    assert why.startswith("the kernel: a load left wrong bytes in")


def test_a_kernel_that_cannot_be_launched_is_not_used() -> None:
    class Kernelless(FakeCuda):
        def copy(self, stream: Stream, batch: Batch) -> Fault | None:
            if batch.way == "kernel":
                return Fault("kernel: No module named 'triton'")
            return super().copy(stream, batch)

    table, why = check(Kernelless(2, eager=40, watched=False))
    assert table is NO_KERNEL
    assert "No module named 'triton'" in why


def test_copies_that_wait_for_nothing() -> None:
    class Hasty(FakeCuda):
        def wait(self, stream: Stream, event: Event) -> Fault | None:
            return None

    table, why = check(Hasty(3, eager=40, watched=False))
    assert table is None
    assert "left wrong bytes" in why


def test_a_device_that_refuses() -> None:
    class Refusing(FakeCuda):
        def copy(self, stream: Stream, batch: Batch) -> Fault | None:
            return Fault("batch copy: CUDA error 801")

    table, why = check(Refusing(4, eager=40, watched=False))
    assert table is None
    assert why == "copies: a store failed: batch copy: CUDA error 801"
