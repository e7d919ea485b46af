"""The trial of a GPU: passes where copies are right, notices each way in which they are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvass.testing.fake_cuda import FakeCuda
from kvass.transfer.base import U8Array
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.runtime import Batch, Event, Fault, Stream
from kvass.transfer.self_check import NO_KERNEL, SCRATCH_BYTES, self_check


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
        self._fake.run()
        return self._memory.copy()


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
    scratch = FakeScratch(fake)
    with fake.engine_thread():
        found = self_check(fake, scratch)
    assert not fake.registered
    return found


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


def test_one_that_cannot_pin_is_right_and_slow() -> None:
    fake = FakeCuda(1, eager=40, watched=False)
    fake.plans.fail["register"] = set(range(100))
    assert check(fake) == (KERNEL_BELOW, "")


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
