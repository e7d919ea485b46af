"""The driver's runtime without a driver: what it says of machines that cannot, and of errors.

What a real driver makes of these calls only a GPU can show (docs/gpu.md).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvass.transfer import cuda_runtime
from kvass.transfer.cuda_runtime import DriverRuntime, MissingError
from kvass.transfer.runtime import Batch, Event, Fault, Stream


class Driver:
    """Answers every call with ``results[name]``, or success; notes what was asked."""

    def __init__(self, version: int = 13000, direct: int = 1, **results: int) -> None:
        self.version, self.direct, self.results = version, direct, results
        self.calls: list[str] = []
        self.batches: list[tuple[Any, ...]] = []
        self.orders: list[int] = []
        self.capturing = 0
        self.modes: list[tuple[int, int]] = []
        self.batch = cuda_runtime._BatchCopy(self._batch)

    def _batch(self, *args: Any) -> int:
        self.batches.append(args)
        self.orders.append(cuda_runtime._Attributes.from_address(args[4]).order)
        return self.results.get("cuMemcpyBatchAsync", 0)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuDriverGetVersion":
                args[0]._obj.value = self.version
            elif name == "cuDeviceGetAttribute":
                args[0]._obj.value = self.direct
            elif name == "cuGetProcAddress_v2":
                args[1]._obj.value = ctypes.cast(self.batch, ctypes.c_void_p).value
            elif name == "cuStreamIsCapturing":
                args[1]._obj.value = self.capturing
            elif name == "cuThreadExchangeStreamCaptureMode":
                self.modes.append((threading.get_ident(), args[0]._obj.value))
            elif name in ("cuEventCreate", "cuStreamCreateWithPriority"):
                args[0]._obj.value = 4096 + len(self.calls)
            elif name == "cuMemHostGetDevicePointer_v2":
                args[0]._obj.value = args[1].value
            return self.results.get(name, 0)

        return call


def runtime(driver: Driver) -> DriverRuntime:
    return DriverRuntime(driver, 0, lambda: 55, lambda stream, batch: "kept")


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (Driver(version=12070), "speaks CUDA 12.7; kvass needs 12.8"),
        (Driver(direct=0), "WSL2"),
        (Driver(cuInit=100), "no CUDA driver that works: CUDA error 100"),
        (Driver(cuGetProcAddress_v2=500), "has no cuMemcpyBatchAsync"),
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
    assert ctypes.sizeof(cuda_runtime._Attributes) == 24
    assert driver.orders == [order]


@pytest.mark.parametrize(("result", "dead"), [(719, True), (700, True), (712, False), (1, False)])
def test_errors_are_values_and_some_are_the_end(result: int, dead: bool) -> None:
    driver = Driver(cuMemcpyBatchAsync=result, cuEventQuery=result)
    one = np.ones(1, np.uint64)
    fault = runtime(driver).copy(Stream(9), Batch("store", "dma", one, one, one, 1))
    assert isinstance(fault, Fault)
    assert fault.dead is dead
    assert f"CUDA error {result}" in fault.text
    assert runtime(driver).done(Event(1)) == Fault(fault.text.replace("batch copy", "copy"), dead)


def test_an_event_that_is_not_reached_is_no_error() -> None:
    assert runtime(Driver(cuEventQuery=600)).done(Event(1)) is False
    assert runtime(Driver()).done(Event(1)) is True


def test_what_cannot_be_mapped_is_not_left_registered() -> None:
    driver = Driver(cuMemHostGetDevicePointer_v2=1)
    assert isinstance(runtime(driver).register(4096, 4096), Fault)
    assert driver.calls.index("cuMemHostRegister_v2") < driver.calls.index("cuMemHostUnregister")


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
    assert runtime(Looking()).register(address, size // 2) == address
    assert there == [size // 2]


def test_slow_copies_are_a_call_per_run_until_one_fails() -> None:
    driver, three = Driver(cuMemcpyDtoHAsync_v2=1), np.ones(3, np.uint64)
    one = runtime(driver)
    assert one.copy(Stream(9), Batch("load", "pageable", three, three, three, 3)) is None
    assert driver.calls.count("cuMemcpyHtoDAsync_v2") == 3
    assert one.copy(Stream(9), Batch("store", "pageable", three, three, three, 3)) is not None
    assert driver.calls.count("cuMemcpyDtoHAsync_v2") == 1


def test_a_batch_keeps_what_its_kernel_reads() -> None:
    one = np.ones(1, np.uint64)
    batch = Batch("load", "kernel", one, one, one, 1)
    assert runtime(Driver()).copy(Stream(9), batch) is None
    assert batch.keep == ["kept"]


def test_without_triton_a_job_fails_not_the_thread() -> None:
    def launch(stream: int, batch: Batch) -> object:
        raise ModuleNotFoundError("No module named 'triton'")

    one = np.ones(1, np.uint64)
    fault = DriverRuntime(Driver(), 0, lambda: 55, launch).copy(
        Stream(9), Batch("load", "kernel", one, one, one, 1)
    )
    assert fault == Fault("kernel: No module named 'triton'")


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
    def launch(stream: int, batch: Batch) -> object:
        raise error

    one = np.ones(1, np.uint64)
    fault = DriverRuntime(Driver(), 0, lambda: 55, launch).copy(
        Stream(9), Batch("load", "kernel", one, one, one, 1)
    )
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


def test_only_a_movers_own_thread_is_made_free_of_captures() -> None:
    """Asking an event, and pinning, spoil a capture of any other thread's otherwise."""
    driver = Driver()
    one = runtime(driver)
    event = one.order()
    assert not isinstance(event, Fault)
    one.forget(event)
    one.unregister(4096)
    assert driver.modes == []

    def work() -> None:
        one.done(event)
        one.open_stream("load")
        one.mark(Stream(9))

    for _ in range(2):
        other = threading.Thread(target=work)
        other.start()
        other.join()
    assert [mode for _, mode in driver.modes] == [2, 2], "once for each thread"
