"""``DeviceRuntime`` over the fake GPU, call by call, and the operations that torch alone offers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvass.transfer.batch import Batch, Kind, Way
from kvass.transfer.device import DeviceRuntime, Fault, Operations
from kvass.types import PAGE, U64Array
from tests.support.gpu.fake_gpu import KERNEL_TABLES, FakeGpu
from tests.support.gpu.fake_torch import FakeStream, FakeTensor, fake_torch


def words(*values: int) -> U64Array:
    return np.array(values, np.uint64)


class Rig:
    """A device page and a host page, and batches between them."""

    def __init__(self, **more: Any) -> None:
        self.gpu = FakeGpu(1, eager=40, **more)
        self.region, self.there = self.gpu.allocate(PAGE)
        self.here = self.gpu.map(PAGE)
        self.host = self.here.ctypes.data

    def batch(self, kind: Kind, way: Way = "pageable", count: int = 64, at: int = 0) -> Batch:
        ends = words(self.host + at), words(self.region.address + at)
        target, source = ends if kind == "store" else ends[::-1]
        return Batch(kind, way, target, source, words(count), count)

    def give(self, batch: Batch) -> Fault | None:
        stream = self.gpu.open_stream(batch.kind)
        assert not isinstance(stream, Fault)
        return self.gpu.copy(stream, batch)


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_batch_is_the_operations_three_tensors(kind: Kind, unsigned: bool) -> None:
    rig = Rig(unsigned=unsigned)
    rig.there[:64], rig.here[64:128] = 7, 9
    batch = rig.batch(kind, at=0 if kind == "store" else 64)
    assert rig.give(batch) is None
    assert len(batch.keep) == 1, "the driver may read the tensors meanwhile"
    rig.gpu.run()
    assert rig.here[0] == (7 if kind == "store" else 0)
    assert rig.there[64] == (9 if kind == "load" else 0)
    assert rig.gpu.violations == []


def test_every_second_run_of_a_table_is_copied_into_a_tensor_of_its_own() -> None:
    """The operation takes its tensors for contiguous."""
    rig = Rig()
    rig.there[:] = np.arange(PAGE) % 251
    every = np.arange(0, 8, dtype=np.uint64)[::2] * np.uint64(8)
    count = np.full(8, 8, np.uint64)[::2]
    host, device = every + np.uint64(rig.host), every + np.uint64(rig.region.address)
    assert not count.flags.c_contiguous
    assert rig.give(Batch("store", "pageable", host, device, count, 32)) is None
    rig.gpu.run()
    assert rig.here[:24].tolist() == [*range(8), *[0] * 8, *range(16, 24)]
    assert rig.gpu.violations == []


def test_what_the_operation_refuses_is_a_fault() -> None:
    rig = Rig()
    assert rig.give(rig.batch("load", count=0)) == Fault("copy: invalid argument")
    nowhere = Batch("load", "pageable", words(8), words(rig.host), words(8), 8)
    assert rig.give(nowhere) == Fault("copy: invalid argument")


BAD = {
    "src_ptrs must be int64": ("dtype", np.zeros(1, np.int32)),
    "dst_ptrs length must match": ("length", np.zeros(2, np.int64)),
    "must be on CPU": ("device", np.zeros(1, np.int64)),
}


@pytest.mark.parametrize("says", BAD)
def test_the_stand_in_checks_what_vllms_operation_checks(says: str) -> None:
    what, array = BAD[says]
    gpu, good, bad = FakeGpu(1), FakeTensor(np.zeros(1, np.int64)), FakeTensor(array)
    if what == "device":
        bad.device = "cuda:0"
    tensors = (good, bad, good) if what == "length" else (bad, good, good)
    with gpu._other, pytest.raises(RuntimeError, match=says):
        gpu._swap(*tensors, False)


def test_a_stream_that_is_captured_has_no_place_for_a_copy() -> None:
    gpu = FakeGpu(1)
    gpu.compute.capturing = True
    with gpu.engine_thread():
        assert gpu.order() == Fault("the engine's stream is being captured into a graph")
    gpu.compute.capturing = False
    with gpu.engine_thread():
        assert not isinstance(gpu.order(), Fault)


def test_streams_of_loads_have_the_higher_priority() -> None:
    asked: list[int] = []
    gpu = FakeGpu(1)
    module = fake_torch(gpu)

    def stream(device: str, priority: int) -> FakeStream:
        asked.append(priority)
        return FakeStream(gpu)

    module.Stream = stream
    runtime = DeviceRuntime("fake:0", Operations(gpu._swap), module)
    runtime.open_stream("load")
    runtime.open_stream("store")
    assert asked == [-1, 0], "in torch a lower number is a higher priority"


def test_a_platform_that_cannot_pin_says_so() -> None:
    runtime = DeviceRuntime("fake:0", Operations(lambda *_: None), fake_torch(FakeGpu(1)))
    assert runtime.register(0, PAGE) == Fault("not possible on this platform")
    assert runtime.tables is None


def test_a_kernel_waits_for_no_table() -> None:
    """While all tables are in use, the copy engines do its work."""
    rig = Rig()
    rig.gpu.few = 1
    assert rig.gpu.register(rig.host, PAGE) is None
    batches = [rig.batch("load", "kernel", 8, 8 * n) for n in range(KERNEL_TABLES + 1)]
    rig.here[: 8 * len(batches)] = 5
    for batch in batches:
        assert rig.give(batch) is None
    assert rig.gpu.tables is not None
    assert len(rig.gpu.tables.free) == 0
    rig.gpu.run()
    assert (rig.there[: 8 * len(batches)] == 5).all()
    for batch in batches:
        batch.keep.clear()
    assert len(rig.gpu.tables.free) == KERNEL_TABLES
    assert rig.gpu.violations == []


@pytest.mark.parametrize("capturing", [False, True])
def test_a_stream_of_an_older_torch_is_asked_another_way(capturing: bool) -> None:
    """Before torch 2.13 a stream does not say whether it is being captured."""
    torch = SimpleNamespace(
        accelerator=SimpleNamespace(current_stream=lambda device: SimpleNamespace()),
        cuda=SimpleNamespace(
            is_available=lambda: True, is_current_stream_capturing=lambda: capturing
        ),
        Event=lambda device: SimpleNamespace(record=lambda stream: None),
    )
    runtime = DeviceRuntime("fake:0", Operations(lambda *_: None), torch)
    assert isinstance(runtime.order(), Fault) is capturing
