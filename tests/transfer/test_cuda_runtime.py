"""The driver's runtime on the stub: contexts and captures, errors, machines that cannot.

That the calls are those of CUDA's ABI: ``test_cuda_abi.py``.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer import cuda_driver, cuda_runtime
from kvass.transfer.base import Job
from kvass.transfer.cuda_copies import SINGLE_RUNS
from kvass.transfer.cuda_runtime import MissingError
from kvass.transfer.runtime import Batch, Fault, Stream
from kvass.types import I64Array
from tests.support.gpu.stepped_mover import SteppedMover
from tests.transfer.stub_driver import Failing, Left, Stub, arena_of, column, headers

# ---------------------------------------------------------------- machines that cannot


def not_direct(found: Any, which: int, handle: Any) -> int:
    found._obj.value = 0
    return 0


@pytest.mark.parametrize(
    ("version", "single", "instead", "says"),
    [
        (
            *(12070, False, {}),
            "speaks CUDA 12.7; kvass needs 12.8 or later, 12.0 with kvass.gpu_copies set to single",
        ),
        (13000, False, {"cuDeviceGetAttribute": not_direct}, "WSL2"),
        (13000, False, {"cuInit": 100}, "no CUDA driver that works: CUDA error 100"),
        (
            13000,
            False,
            {"cuGetProcAddress_v2": 500},
            "has no cuMemcpyBatchAsync; none is .* single",
        ),
        (13000, False, {"cuDeviceGet": 101}, "no device 0"),
        (11080, True, {}, "speaks CUDA 11.8"),
        (13000, True, {"cuDeviceGetAttribute": not_direct}, "WSL2"),
    ],
)
def test_a_machine_that_cannot_is_one_line(
    stub: Stub, version: int, single: bool, instead: dict[str, Any], says: str
) -> None:
    stub.set("stub_version", version)
    with pytest.raises(MissingError, match=says):
        stub.runtime(Failing(stub, **instead), single)


@pytest.mark.parametrize("version", [12000, 12070, 13000])
def test_single_copies_need_no_batch_call(stub: Stub, version: int) -> None:
    stub.set("stub_version", version)
    assert stub.runtime(Failing(stub, cuGetProcAddress_v2=500), True).batch_runs == SINGLE_RUNS
    assert 2 * SINGLE_RUNS < 1000, "calls that a stream takes"


def test_torch_without_a_device_is_one_line() -> None:
    with pytest.raises(MissingError, match="no CUDA device"):
        cuda_runtime.open_runtime(0)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("result", "dead"),
    [(719, True), (700, True), (721, True), (810, True), (712, False), (1, False), (906, False)],
)
def test_errors_are_values_and_some_are_the_end(stub: Stub, result: int, dead: bool) -> None:
    one = stub.runtime(Failing(stub, cuStreamQuery=result, cuMemcpyDtoHAsync_v2=result), True)
    fault = one.idle(Stream(9))
    assert isinstance(fault, Fault)
    assert f"CUDA error {result}" in fault.text
    assert fault.dead is dead
    eight = column(8)
    assert one.copy(Stream(9), Batch("store", "dma", eight, eight, eight, 8)) == fault


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


def test_single_copies_end_with_the_first_that_fails(stub: Stub) -> None:
    asked: list[Any] = []

    def refuse(*call: Any) -> int:
        asked.append(call)
        return 1

    one = stub.runtime(Failing(stub, cuMemcpyDtoHAsync_v2=refuse))
    three = column(8, 8, 8)
    assert one.copy(Stream(9), Batch("store", "pageable", three, three, three, 24)) is not None
    assert len(asked) == 1


# ---------------------------------------------------------------- contexts and memory


@pytest.mark.parametrize(("result", "dead"), [(201, True), (1, False)])
def test_without_the_devices_context_nothing_is_asked(stub: Stub, result: int, dead: bool) -> None:
    one, begin = stub.runtime(Failing(stub, cuCtxPushCurrent_v2=result)), stub.count
    batch = Batch("load", "pageable", column(8), column(8), column(8), 8)
    asked = (one.order(), one.open_stream("load"), one.idle(Stream(9)), one.copy(Stream(9), batch))
    assert [isinstance(said, Fault) and said.dead is dead for said in asked] == [True] * 4
    assert {call.name for call in stub.calls(begin)} == {"cuGetErrorString"}


def test_memory_is_faulted_in_before_the_driver_pins_it(stub: Stub) -> None:
    """The driver would do it with its locks held."""
    descriptor, size = os.memfd_create("arena"), 64 * mmap.PAGESIZE
    os.ftruncate(descriptor, size)
    arena = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    os.close(descriptor)
    there: list[int] = []

    def looking(*_: Any) -> int:
        mapping = Path("/proc/self/smaps").read_text().split(f"\n{arena.ctypes.data:x}-")[1]
        (line,) = re.findall(r"Rss: +(\d+) kB", mapping.split("VmFlags")[0])
        there.append(int(line) << 10)
        return 0

    one = stub.runtime(Failing(stub, cuMemHostRegister_v2=looking))
    assert one.register(arena.ctypes.data + 16 * mmap.PAGESIZE, size // 2) is None
    assert there == [size // 2]


# ---------------------------------------------------------------- the kernel's tables


def kernel_batch(runs: int = 1) -> Batch:
    target, source, count = (np.arange(n, n + runs, dtype=np.uint64) * 8 for n in (1, 100, 200))
    return Batch("load", "kernel", target, source, count, int(count.sum()))


def test_a_batch_keeps_the_table_that_its_kernel_reads(stub: Stub) -> None:
    seen: list[tuple[I64Array, tuple[int, int]]] = []
    batch = kernel_batch(3)
    one = stub.runtime(launch=lambda _, rows: seen.append((rows, stub.thread)))
    assert one.copy(Stream(9), batch) is None
    ((rows, thread),) = seen
    assert thread == (1, 2), "it is launched in the device's context, and in no capture"
    assert rows.tolist() == [[8, 16, 24], [800, 808, 816], [1600, 1608, 1616]]
    assert rows.ctypes.data % 16 == 0, "another address would need another variant of the kernel"
    (kept,) = batch.keep
    assert kept.rows is rows  # type: ignore[attr-defined]


@pytest.mark.parametrize("single", [False, True])
def test_while_all_tables_are_in_use_short_runs_go_by_dma(stub: Stub, single: bool) -> None:
    sent: list[Any] = []

    def take(*call: Any) -> int:
        sent.append(call)
        return 0

    driver = Failing(stub, cuMemcpyHtoDAsync_v2=take)
    one: Any = stub.runtime(driver, single, tables=1, launch=lambda *_: None)
    if not single:
        one._batch_copy = take
    first, second, third = kernel_batch(), kernel_batch(), kernel_batch()
    assert one.copy(Stream(9), first) is None
    assert one.copy(Stream(9), second) is None
    assert len(sent) == 1
    assert second.keep == []
    first.keep.clear()
    assert one.copy(Stream(9), third) is None
    assert len(sent) == len(third.keep) == 1


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'triton'"),
        subprocess.CalledProcessError(1, ["gcc"]),
        OSError("no ptxas"),
        type("CompilationError", (Exception,), {})("at 1:0\nmore"),
    ],
)
def test_whatever_a_launch_raises_is_a_fault(stub: Stub, error: Exception) -> None:
    def launch(stream: int, rows: I64Array) -> None:
        raise error

    batch = kernel_batch()
    fault = stub.runtime(launch=launch).copy(Stream(9), batch)
    assert fault == Fault(f"kernel: {str(error).splitlines()[0]}")
    assert batch.keep, "what raises may have been launched: its table is in use"


# ---------------------------------------------------------------- opening, by torch


class Torch:
    """Torch's part, replaced: what it allocates of pinned memory, and the runs of its kernel."""

    def __init__(self, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated: list[Any] = []
        self.runs: list[tuple[int, int]] = []
        self.error: Exception | None = None
        self._empty = torch.empty
        cuda = SimpleNamespace(
            is_available=lambda: True,
            current_stream=lambda device: SimpleNamespace(cuda_stream=0),
            device=lambda device: nullcontext(),
            stream=lambda stream: nullcontext(),
            ExternalStream=lambda stream, device: stream,
        )
        kernels: Any = ModuleType("kvass.transfer.cuda_kernels")
        kernels.copy_runs = lambda table: self.runs.append((table.data_ptr(), table.nbytes))
        monkeypatch.setattr(torch, "cuda", cuda)
        monkeypatch.setattr(torch, "empty", self._allocate)
        monkeypatch.setattr(torch.Tensor, "pin_memory", None)
        monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
        monkeypatch.setattr(cuda_driver, "load_driver", lambda: stub.library)

    def _allocate(self, *args: Any, pin_memory: bool = False, **more: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.allocated.append(self._empty(*args, **more))
        return self.allocated[-1]


def test_without_pinned_memory_for_tables_a_device_is_not_used(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    Torch(stub, monkeypatch).error = RuntimeError("CUDA error: out of memory\nmore")
    with pytest.raises(MissingError, match=r"no pinned memory on device 0: .*: out of memory$"):
        cuda_runtime.open_runtime(0)


def test_in_a_long_run_nothing_is_allocated_after_opening(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a driver or torch allocates of pinned memory stops the device."""
    asked = Torch(stub, monkeypatch)
    region, _ = stub.allocate(64 * 4096)
    one = cuda_runtime.open_runtime(0)
    (words,) = asked.allocated
    assert words.nbytes <= 4 << 20
    planes = GroupPlanes(0, (Plane(0, 64, 64),), blocks=4096, chunk_blocks=16)
    mover = SteppedMover(one, [region], [planes])
    arena, rng, begin = arena_of(1 << 20), np.random.default_rng(0), stub.count
    for _ in range(500):
        table = rng.permutation(np.arange(1, 4096))[:64].reshape(4, 16)
        mover.submit(Job("load", (plan_copy(planes, table, [0, 4096, 8192, 12288]),), arena))
        mover._turn()
    mover.settle()
    mover.close()
    assert {done.outcome for done in mover.poll()} == {"done"}
    assert len(asked.allocated) == 1
    assert len(asked.runs) == 500
    first, end = words.data_ptr(), words.data_ptr() + words.nbytes
    assert all(first <= at and at + size <= end for at, size in asked.runs)
    names = [call.name for call in stub.calls(begin)]
    assert not [name for name in names if "Alloc" in name]
    assert names.count("cuStreamCreateWithPriority") == names.count("cuMemHostRegister_v2") == 1
    assert stub.left == Left(allocations=1)
    assert len(one._tables.free) == 32
    stub.free(region)
