"""The real runtime and the mover, on a driver of C that moves bytes (``stub_cuda.c``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.cli.doctor.driver import DriverReport, ask_driver
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.base import Job, U8Array
from kvass.transfer.cuda_driver import Device, Survey
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.runtime import Kind
from kvass.transfer.self_check import NO_PINS, SCRATCH_BYTES, self_check
from tests.support.gpu.stepped_mover import SteppedMover
from tests.transfer.stub_driver import PAGE, Left, Stub, arena_of
from tests.transfer.test_bytes import Case, assert_equal, cases, copy, model, move_on_gpu


@pytest.mark.parametrize("mode", ["batch", "single", "unpinned"])
def test_the_real_runtime_moves_what_a_loop_would(
    mode: str, compiled: Path, tmp_path: Path
) -> None:
    """In the cases of ``test_bytes.py``; after each one nothing is left."""
    stub = Stub(compiled, tmp_path)
    below = NO_PINS if mode == "unpinned" else KERNEL_BELOW

    @settings(max_examples=50)
    @given(case=cases(), kind=st.sampled_from(["store", "load"]))
    def example(case: Case, kind: Kind) -> None:
        expected = copy(case)
        model(expected, kind)
        one, arena = stub.runtime(single=mode == "single"), arena_of(len(case.arena))
        for region in move_on_gpu(case, kind, stub, one, arena, kernel_below=below):
            stub.free(region)
        assert_equal(case, expected)
        assert stub.left == Left()
        assert stub.thread == (0, 0)

    example()
    names = {call.name for call in stub.calls()}
    assert ("cuMemHostRegister_v2" in names) is (mode != "unpinned")
    one_by_one = {"cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"}
    copies = {name for name in names if name.startswith("cuMemcpy")}
    assert copies == ({"cuMemcpyBatchAsync"} if mode == "batch" else one_by_one)


class StubScratch:
    """``self_check.Scratch`` in the stub's memory."""

    def __init__(self, stub: Stub) -> None:
        self.region, self._memory = stub.allocate(SCRATCH_BYTES)

    def write(self, data: U8Array) -> None:
        self._memory[:] = data

    def read(self) -> U8Array:
        return self._memory.copy()


@pytest.mark.parametrize("single", [False, True])
def test_the_trial_passes_and_pins_nothing_for_good(single: bool, stub: Stub) -> None:
    """Its copies are a thread's."""
    scratch = StubScratch(stub)
    assert self_check(stub.runtime(single=single), scratch) == (KERNEL_BELOW, "")
    stub.free(scratch.region)
    said = [call for call in stub.calls() if not call.result]
    pinned = [call.values[0] for call in said if call.name == "cuMemHostRegister_v2"]
    assert pinned == [call.values[0] for call in said if call.name == "cuMemHostUnregister"]
    assert pinned


def test_windows_that_cannot_be_pinned_are_copied_and_not_unpinned(stub: Stub) -> None:
    """Somebody else pinned the second of three. What we pinned, and no more, is unpinned."""
    planes = GroupPlanes(0, (Plane(0, PAGE, PAGE),), blocks=13, chunk_blocks=12)
    region, memory = stub.allocate(13 * PAGE)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.nbytes, np.uint8)
    arena, window = arena_of(12 * PAGE), 4 * PAGE
    theirs = stub.runtime()
    assert theirs.register(arena.ctypes.data + window, window) is None
    mover = SteppedMover(stub.runtime(), [region], [planes], window=window)
    mover.submit(Job("store", (plan_copy(planes, [list(range(1, 13))], [0]),), arena))
    mover.settle()
    assert mover.ways == {"dma", "pageable"}
    assert stub.left.pinned == 3
    mover.close()
    assert [done.outcome for done in mover.poll()] == ["done"]
    assert np.array_equal(arena, memory[PAGE:])
    assert stub.left.pinned == 1
    assert theirs.unregister(arena.ctypes.data + window) is None
    stub.free(region)


def test_doctor_asks_the_driver_that_the_loader_finds(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, by the name ``libcuda.so.1``."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled.parent))
    device = Device("NVIDIA Stub", (139 << 30) + 4096, direct=True, locks=True)
    assert ask_driver(devices=True) == DriverReport(Survey(13000, (device,), batches=True))
    assert ask_driver(devices=False) == DriverReport(Survey(13000))
