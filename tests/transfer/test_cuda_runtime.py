"""The driver's runtime without a driver: what it says of machines that cannot, and of errors.

That the calls are those of CUDA's ABI: ``test_cuda_abi.py``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import cuda_copies, cuda_driver, cuda_runtime
from kvass.transfer.base import Job
from kvass.transfer.cuda import CudaMover
from kvass.transfer.cuda_runtime import DriverRuntime, MissingError
from kvass.transfer.kernel_tables import Table, Tables
from kvass.transfer.runtime import Batch, Event, Fault, Region, Stream
from kvass.types import I64Array
from tests.transfer.python_driver import OURS, THEIRS, Driver, kernel_batch, runtime
from tests.transfer.stub_driver import headers


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (
            Driver(version=12070),
            "speaks CUDA 12.7; kvass needs 12.8 or later, 12.0 with kvass.gpu_copies set to single",
        ),
        (Driver(direct=0), "WSL2"),
        (Driver(cuInit=100), "no CUDA driver that works: CUDA error 100"),
        (Driver(cuGetProcAddress_v2=500), "has no cuMemcpyBatchAsync; none is .* single"),
        (Driver(cuDeviceGet=101), "no device 0"),
    ],
)
def test_a_machine_that_cannot_is_one_line(driver: Driver, says: str) -> None:
    with pytest.raises(MissingError, match=says):
        runtime(driver)


def test_torch_without_a_device_is_one_line() -> None:
    with pytest.raises(MissingError, match="no CUDA device"):
        cuda_runtime.open_runtime(0)


@pytest.mark.parametrize(("kind", "order"), [("store", 1), ("load", 3)])
def test_a_batch_is_given_as_it_is(kind: Any, order: int) -> None:
    driver = Driver()
    a, b, n = (np.array(x, np.uint64) for x in ([1, 2], [3, 4], [5, 6]))
    assert runtime(driver).copy(Stream(9), Batch(kind, "dma", a, b, n, 11)) is None
    (args,) = driver.batches
    assert args[:4] == (a.ctypes.data, b.ctypes.data, n.ctypes.data, 2)
    assert args[6] == 1
    assert args[8] == 9
    assert ctypes.sizeof(cuda_copies.Attributes) == 24
    assert driver.orders == [order]


@pytest.mark.parametrize(
    ("result", "dead"),
    [(719, True), (700, True), (721, True), (810, True), (712, False), (1, False), (906, False)],
)
def test_errors_are_values_and_some_are_the_end(result: int, dead: bool) -> None:
    driver = Driver(cuMemcpyBatchAsync=result, cuEventQuery=result)
    one = np.ones(1, np.uint64)
    fault = runtime(driver).copy(Stream(9), Batch("store", "dma", one, one, one, 1))
    assert isinstance(fault, Fault)
    assert fault.dead is dead
    assert f"CUDA error {result}" in fault.text
    assert runtime(driver).done(Event(1)) == Fault(fault.text.replace("batch copy", "copy"), dead)


def test_what_ends_a_process_by_cudas_own_words_is_fatal() -> None:
    """As its header says of each error; where it says nothing of that, and we cannot go on, too."""
    header = (headers() / "cuda.h").read_text()
    listed = header.split("typedef enum cudaError_enum")[1].split("} CUresult;")[0]
    errors = re.findall(r"/\*\*(.*?)\*/\s*CUDA_ERROR_\w+\s*=\s*(\d+)", listed, re.DOTALL)
    says = {int(number): " ".join(text.replace("*", " ").split()) for text, number in errors}
    assert len(says) > 90
    ends = ("inconsistent state", "process must be terminated", "cannot be used anymore")
    ending = {number for number, text in says.items() if any(words in text for words in ends)}
    assert {226, 700, 710, 719, 721, 810, 911} <= ending
    assert ending <= cuda_driver.FATAL
    beyond = {4, 46, 201, 214, 220, 709, 805, 806, 807, 999}
    assert (says.keys() - ending) & cuda_driver.FATAL == beyond


def test_an_event_that_is_not_reached_is_no_error() -> None:
    assert runtime(Driver(cuEventQuery=600)).done(Event(1)) is False
    assert runtime(Driver()).done(Event(1)) is True


def test_a_stream_is_idle_once_nothing_of_it_runs() -> None:
    assert runtime(Driver(cuStreamQuery=600)).idle(Stream(9)) is False
    assert runtime(Driver()).idle(Stream(9)) is True
    fault = runtime(Driver(cuStreamQuery=719)).idle(Stream(9))
    assert isinstance(fault, Fault)
    assert fault.dead


def test_memory_is_faulted_in_before_the_driver_pins_it() -> None:
    """The driver would do it with its locks held."""
    descriptor, size = os.memfd_create("arena"), 64 * mmap.PAGESIZE
    os.ftruncate(descriptor, size)
    arena = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    os.close(descriptor)
    begins, there = f"\n{arena.ctypes.data:x}-", []

    class Looking(Driver):
        def __getattr__(self, name: str) -> Any:
            if name == "cuMemHostRegister_v2":
                mapping = Path("/proc/self/smaps").read_text().split(begins)[1]
                (line,) = re.findall(r"Rss: +(\d+) kB", mapping.split("VmFlags")[0])
                there.append(int(line) << 10)
            return super().__getattr__(name)

    address = arena.ctypes.data + 16 * mmap.PAGESIZE
    assert runtime(Looking()).register(address, size // 2) is None
    assert there == [size // 2]


def test_slow_copies_are_a_call_per_run_until_one_fails() -> None:
    driver, three = Driver(cuMemcpyDtoHAsync_v2=1), np.ones(3, np.uint64)
    one = runtime(driver)
    assert one.copy(Stream(9), Batch("load", "pageable", three, three, three, 3)) is None
    assert driver.calls.count("cuMemcpyHtoDAsync_v2") == 3
    assert one.copy(Stream(9), Batch("store", "pageable", three, three, three, 3)) is not None
    assert driver.calls.count("cuMemcpyDtoHAsync_v2") == 1


def test_a_batch_keeps_the_table_that_its_kernel_reads() -> None:
    seen: list[I64Array] = []
    one, batch = runtime(Driver(), lambda _, rows: seen.append(rows)), kernel_batch(3)
    assert one.copy(Stream(9), batch) is None
    (rows,) = seen
    assert rows.tolist() == [[8, 16, 24], [800, 808, 816], [1600, 1608, 1616]]
    assert rows.ctypes.data % 16 == 0, "another address would need another variant of the kernel"
    (kept,) = batch.keep
    assert isinstance(kept, Table)
    assert kept.rows is rows


def test_while_all_tables_are_in_use_short_runs_go_by_dma() -> None:
    driver = Driver()
    one, first, second = runtime(driver), kernel_batch(), kernel_batch()
    assert one.copy(Stream(9), first) is None
    assert one.copy(Stream(9), second) is None
    assert [args[3] for args in driver.batches] == [1]
    assert second.keep == []
    first.keep.clear()
    third = kernel_batch()
    assert one.copy(Stream(9), third) is None
    assert len(driver.batches) == len(third.keep) == 1


def test_without_pinned_memory_for_tables_there_is_no_kernel() -> None:
    """The trial finds that out, once."""
    one = DriverRuntime(Driver(), 0, lambda: 55, lambda stream, rows: None, "out of memory")
    fault = one.copy(Stream(9), kernel_batch())
    assert fault == Fault("kernel: no pinned memory for its tables: out of memory")


def test_without_triton_a_job_fails_not_the_thread() -> None:
    def launch(stream: int, rows: I64Array) -> None:
        raise ModuleNotFoundError("No module named 'triton'")

    batch = kernel_batch()
    fault = runtime(Driver(), launch).copy(Stream(9), batch)
    assert fault == Fault("kernel: No module named 'triton'")
    assert batch.keep, "what raises may have been launched: its table is in use"


@pytest.mark.parametrize(
    "error",
    [
        subprocess.CalledProcessError(1, ["gcc"]),
        OSError("no ptxas"),
        ValueError("Cannot access global variable"),
        type("CompilationError", (Exception,), {})("at 1:0\nmore"),
    ],
)
def test_whatever_a_launch_raises_is_a_fault(error: Exception) -> None:
    def launch(stream: int, rows: I64Array) -> None:
        raise error

    fault = runtime(Driver(), launch).copy(Stream(9), kernel_batch())
    assert fault == Fault(f"kernel: {str(error).splitlines()[0]}")


def test_of_a_stream_that_is_being_captured_there_is_no_order() -> None:
    """An event recorded there would be part of the graph, and so would all that waits for it."""
    driver = Driver()
    one = runtime(driver)
    assert not isinstance(one.order(), Fault)
    driver.capturing = 1
    driver.calls.clear()
    assert one.order() == Fault("the engine's stream is being captured into a graph")
    assert "cuEventRecord" not in driver.calls


HARMLESS = {
    *("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuThreadExchangeStreamCaptureMode"),
}


def everything(one: DriverRuntime) -> list[object]:
    """All that a runtime can be asked, and what it says."""
    event, stream = one.order(), one.open_stream("load")
    said: list[object] = [event, stream]
    event, stream = Event(1), Stream(2)
    said += [one.mark(stream), one.wait(stream, event), one.done(event), one.idle(stream)]
    said += [one.register(4096, 4096), one.unregister(4096)]
    batch = kernel_batch()
    for way in ("dma", "pageable", "kernel"):
        batch.way = way
        said.append(one.copy(stream, batch))
    batch.keep.clear()
    one.forget(event)
    one.close_stream(stream)
    return said


ALL = 13
"""Questions in ``everything``."""


@pytest.mark.parametrize("before", [[], [THEIRS], [THEIRS, OURS], [OURS, THEIRS]])
def test_every_call_is_made_in_the_devices_context_and_the_thread_gets_its_own_back(
    before: list[int],
) -> None:
    driver = Driver()
    launched_in: list[int] = []
    one = runtime(driver, lambda *_: launched_in.append(driver.stack[-1]))
    driver.stack[:] = before
    assert not [said for said in everything(one) if isinstance(said, Fault)]
    assert launched_in == [OURS]
    assert driver.contexts == {threading.get_ident(): before}


def test_whatever_a_launch_leaves_current_is_no_later_calls_context() -> None:
    """Triton and torch switch devices: they set the thread's current context."""
    driver = Driver()

    def launch(stream: int, rows: I64Array) -> None:
        driver.stack[-1] = THEIRS

    one = runtime(driver, launch)
    assert one.copy(Stream(9), kernel_batch()) is None
    assert driver.stack == []
    assert not isinstance(one.mark(Stream(9)), Fault)


@pytest.mark.parametrize(("result", "dead"), [(201, True), (1, False)])
def test_without_the_devices_context_nothing_is_asked(result: int, dead: bool) -> None:
    driver = Driver(cuCtxPushCurrent_v2=result)
    one = runtime(driver)
    driver.stack[:] = [THEIRS]
    driver.calls.clear()
    faults = everything(one)
    assert faults == [Fault(f"context: CUDA error {result}", dead)] * (ALL - 2)
    assert set(driver.calls) == {"cuCtxPushCurrent_v2", "cuGetErrorString"}
    assert driver.calls.count("cuCtxPushCurrent_v2") == ALL
    assert driver.stack == [THEIRS]


@pytest.mark.parametrize("fails", [{}, {"cuEventRecord": 1}])
def test_no_call_on_any_thread_has_a_part_in_captures(fails: dict[str, int]) -> None:
    """Asking an event, pinning, unpinning spoil another thread's capture otherwise. The thread may
    be anybody's who lets go of an arena or closes a mover: it gets its own mode back."""
    driver = Driver()
    launched: list[int] = []
    one = runtime(driver, lambda *_: launched.append(driver.modes[threading.get_ident()]))
    driver.made_in.clear()
    everything(one)
    driver.results = fails
    one.mark(Stream(9))
    one.register(4096, 4096)
    assert launched == [2]
    names = driver.made_in.keys() - HARMLESS
    assert len(names) >= 14
    assert {name: driver.made_in[name] for name in names} == {name: {2} for name in names}
    assert driver.modes == {threading.get_ident(): 0}, "as it was"

    def work() -> None:
        driver.modes[threading.get_ident()] = 1
        everything(one)
        after.append(driver.modes[threading.get_ident()])

    after: list[int] = []
    driver.results = {}
    other = threading.Thread(target=work)
    other.start()
    other.join()
    assert after == [1]
    assert all(driver.made_in[name] == {2} for name in names)


def test_a_driver_that_exchanges_no_modes_is_not_given_another_back() -> None:
    driver = Driver(cuThreadExchangeStreamCaptureMode=1)
    everything(runtime(driver))
    assert driver.calls.count("cuThreadExchangeStreamCaptureMode") == ALL, "once each"


def test_stores_yield_to_all_and_loads_to_none() -> None:
    driver = Driver()
    one = runtime(driver)
    one.open_stream("store")
    one.open_stream("load")
    assert driver.priorities == [0, -5]


def test_a_device_that_tells_no_priorities_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """And the default for both: not what the driver has left in the answer."""
    driver = Driver(cuCtxGetStreamPriorityRange=1)
    one = runtime(driver)
    for kind in ("store", "load", "store"):
        assert not isinstance(one.open_stream(kind), Fault)
    assert driver.priorities == [0, 0, 0]
    (line,) = caplog.records
    assert line.getMessage() == (
        "kvass: loads may wait for the engine's kernels on this device: "
        "priorities of streams: CUDA error 1"
    )


def test_a_dead_device_opens_no_stream() -> None:
    driver = Driver(cuCtxGetStreamPriorityRange=719)
    fault = runtime(driver).open_stream("store")
    assert isinstance(fault, Fault)
    assert fault.dead
    assert driver.priorities == []


def test_in_a_long_run_nothing_is_allocated_after_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a driver or torch allocates of pinned memory stops the device. Torch and Triton are
    replaced; the runtime, its tables and the mover are the real ones."""
    driver, empty, allocated, rows = Driver(), torch.empty, list[Any](), list[tuple[int, int]]()

    def allocate(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
        allocated.append(empty(*args, **more))
        return allocated[-1]

    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_stream=lambda device: SimpleNamespace(cuda_stream=55),
        device=lambda device: nullcontext(),
        stream=lambda stream: nullcontext(),
        ExternalStream=lambda stream, device: stream,
    )
    kernels: Any = ModuleType("kvass.transfer.cuda_kernels")
    kernels.copy_runs = lambda table: rows.append((table.data_ptr(), table.nbytes))
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "pin_memory", None)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: driver)
    one = cuda_runtime.open_runtime(0)
    (words,) = allocated
    assert words.nbytes <= 4 << 20
    planes = GroupPlanes(0, (Plane(0, 64, 64),), blocks=4096, chunk_blocks=16)
    mover = CudaMover(one, [Region(1 << 40, 64 * 4096)], [planes], threaded=False)
    arena = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)
    rng, driver.lateness = np.random.default_rng(0), 0.8
    driver.calls.clear()
    settled = 0
    for _ in range(2000):
        table = rng.integers(1, 4096, (4, 16))
        plan = plan_copy(planes, table.tolist(), [0, 4096, 8192, 12288])
        if plan.distinct:
            mover.submit(Job("load", (plan,), arena))
        for _ in range(3):
            mover.turn()
        settled += len(mover.poll())
    driver.lateness = 0.0
    while not mover.drain(0):
        mover.turn()
    mover.close()
    assert len(allocated) == 1
    assert len(rows) > 1000
    begin, end = words.data_ptr(), words.data_ptr() + words.nbytes
    assert all(begin <= at and at + size <= end for at, size in rows)
    assert not [name for name in driver.calls if "Alloc" in name]
    assert driver.calls.count("cuStreamCreateWithPriority") == 1
    assert driver.calls.count("cuMemHostRegister_v2") == 1
    assert driver.calls.count("cuEventCreate") == driver.calls.count("cuEventDestroy_v2")
    tables = one._tables
    assert isinstance(tables, Tables)
    assert tables.free == len(tables)
