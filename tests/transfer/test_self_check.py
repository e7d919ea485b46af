"""The trial of a GPU: passes where copies are right, notices each way in which they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Job
from kvass.transfer.batch import Batch
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.device import Event, Fault, Stream
from kvass.transfer.device_mover import DeviceMover
from kvass.transfer.self_check import NO_KERNEL, NO_PINS, self_check
from tests.support.gpu.fake_gpu import FakeGpu
from tests.support.gpu.fake_scratch import FakeScratch


class Device(FakeGpu):
    """One that has time to be right."""

    def __init__(self, seed: int = 1, eager: int = 40) -> None:
        super().__init__(seed, eager, watched=False)


def check(fake: FakeGpu) -> tuple[Any, str]:
    scratch = FakeScratch(fake)
    with fake.engine_thread():
        return self_check(fake, scratch)


@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_is_right(seed: int) -> None:
    fake = Device(seed)
    assert check(fake) == (KERNEL_BELOW, "")
    assert {(batch.kind, batch.way) for batch in fake.copied} == {
        ("store", "dma"),
        ("load", "dma"),
        ("load", "kernel"),
    }
    assert fake.violations == []
    assert not fake.registered


def test_one_that_cannot_pin_is_right_and_never_pins(caplog: pytest.LogCaptureFixture) -> None:
    fake = Device()
    fake.plans.fail["register"] = set(range(100))
    assert check(fake) == (NO_PINS, "")
    (line,) = caplog.records
    assert "could not pin a part of the arena" in line.getMessage()
    asked = fake.plans.calls["register"]
    region, _ = fake.allocate(4 * 4096)
    planes = GroupPlanes(0, (Plane(0, 4096, 4096),), blocks=4, chunk_blocks=1)
    mover = DeviceMover(fake, [region], [planes], kernel_below=NO_PINS)
    fake.copied.clear()
    arena = np.zeros(4096, np.uint8)
    for kind in ("store", "load"):
        mover.submit(Job(kind, (plan_copy(planes, [[1]], [0]),), arena))
    assert mover.drain(10)
    mover.close()
    assert {batch.way for batch in fake.copied} == {"pageable"}
    assert fake.plans.calls["register"] == asked, "it never pins again"


# ---------------------------------------------------------------- wrong bytes


class Spoiled(Device):
    """One that does something else than it was told."""

    def __init__(self, spoil: Callable[[Batch], None], kind: str, way: str) -> None:
        super().__init__(7)
        self._spoil, self._which = spoil, (kind, way)

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        if (batch.kind, batch.way) == self._which:
            self._spoil(batch)
        return super().copy(stream, batch)


def shift(batch: Batch) -> None:
    batch.target[0] += np.uint64(8)


def swap(batch: Batch) -> None:
    same = np.flatnonzero(batch.bytes == batch.bytes[0])
    batch.source[same] = batch.source[same[::-1]]


def shorten(batch: Batch) -> None:
    batch.bytes[-1] -= np.uint64(8)


@pytest.mark.parametrize("spoil", [shift, swap, shorten])
@pytest.mark.parametrize(
    ("kind", "way", "table", "says"),
    [
        ("store", "dma", None, "copies: a store left wrong bytes in"),
        ("load", "dma", None, "copies: a load left wrong bytes in"),
        ("load", "kernel", NO_KERNEL, "the kernel: a load left wrong bytes in"),
    ],
)
def test_copies_that_go_elsewhere(
    spoil: Callable[[Batch], None], kind: str, way: str, table: Any, says: str
) -> None:
    fake = Spoiled(spoil, kind, way)
    found, why = check(fake)
    assert found is table
    assert why.startswith(says)
    assert not fake.registered


# ---------------------------------------------------------------- wrong order, and refusals


class ElsewhereCuda(Device):
    """Its kernel runs on another stream: nothing orders it, and our events say nothing of it. The
    first launch compiles, which takes longer than all work that was queued."""

    other: Stream | None = None

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        if batch.way != "kernel":
            return super().copy(stream, batch)
        if self.other is None:
            while self.streams[self.compute]:
                self.step()
            opened = super().open_stream("load")
            assert not isinstance(opened, Fault)
            self.other = opened
        return super().copy(self.other, batch)


class Early(Device):
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


class Hasty(Device):
    """Its copies wait for nothing."""

    def wait(self, stream: Stream, event: Event) -> Fault | None:
        return None


class Kernelless(Device):
    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        if batch.way == "kernel":
            return Fault("kernel: No module named 'triton'")
        return super().copy(stream, batch)


class Refusing(Device):
    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        return Fault("batch copy: CUDA error 801")


@pytest.mark.parametrize(
    ("fake", "table", "says"),
    [
        # It is late: it may write blocks while the next round's store reads them, too.
        *((ElsewhereCuda(seed), NO_KERNEL, "left wrong bytes in") for seed in range(5)),
        *(
            (Early(s, 2), None, "copies: a load left wrong bytes in device memory")
            for s in range(5)
        ),
        (Hasty(3), None, "left wrong bytes"),
        (Kernelless(2), NO_KERNEL, "the kernel: a load failed: kernel: No module named 'triton'"),
        (Refusing(4), None, "copies: a store failed: batch copy: CUDA error 801"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_device_that_is_wrong(fake: FakeGpu, table: Any, says: str) -> None:
    found, why = check(fake)
    assert found is table
    assert says in why
