"""The real runtime and the mover, on a driver of C that moves bytes (``stub_cuda.c``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.cli.doctor import driver
from kvass.cli.doctor.driver import DriverReport, ask_driver
from kvass.transfer.base import U8Array
from kvass.transfer.cuda_driver import Device, Survey
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.transfer.runtime import Kind
from kvass.transfer.self_check import NO_PINS, SCRATCH_BYTES, self_check
from tests.transfer.stub_driver import Failing, Left, Stub, arena_of
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


def test_doctor_asks_the_driver_that_the_loader_finds(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, by the name ``libcuda.so.1``."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled.parent))
    device = Device("NVIDIA Stub", (139 << 30) + 4096, direct=True, locks=True)
    assert ask_driver(devices=True) == DriverReport(Survey(13000, (device,), batches=True))
    assert ask_driver(devices=False) == DriverReport(Survey(13000))


def all_attributes(value: int) -> Callable[..., int]:
    def ask(found: Any, which: int, handle: Any) -> int:
        found._obj.value = value
        return 0

    return ask


def test_doctor_asks_a_driver_without_a_context(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device("NVIDIA Stub", (139 << 30) + 4096, direct=True, locks=True)
    for version, instead, expected in (
        (13000, {}, Survey(13000, (device,), batches=True)),
        (12040, {}, Survey(12040, (device,))),
        (
            *(13000, {"cuDeviceGetAttribute": all_attributes(0)}),
            Survey(13000, (replace(device, direct=False),), batches=True),
        ),
        (
            *(13000, {"cuDeviceGetAttribute": all_attributes(1)}),
            Survey(13000, (replace(device, locks=False),), batches=True),
        ),
        (
            13000,
            {"cuInit": 7777},
            Survey(13000, trouble="no CUDA driver that works: CUDA error 7777"),
        ),
    ):
        stub.set("stub_version", version)
        found = Failing(stub, **instead)
        monkeypatch.setattr(driver, "load_driver", lambda found=found: found)
        begin = stub.count
        assert driver.ask(devices=True) == DriverReport(expected)
        asked = {call.name for call in stub.calls(begin)}
        assert ("cuGetProcAddress_v2" in asked) is expected.batches, "what CUDA 11 does not have"
        begin = stub.count
        assert driver.ask(devices=False) == DriverReport(Survey(version))
        assert [call.name for call in stub.calls(begin)] == ["cuDriverGetVersion"]
    safe = ("cuInit", "cuDriverGetVersion", "cuDevice", "cuGet")
    assert all(call.name.startswith(safe) for call in stub.calls())
    assert not [call for call in stub.calls() if "Ctx" in call.name]
