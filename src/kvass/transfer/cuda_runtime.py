"""The real ``Runtime``: CUDA's driver, by ctypes. **Never run on a GPU yet** (docs/gpu.md).

- Only the driver's interface is used: its errors are results, and none is left behind for the
  engine to find in the CUDA runtime's "last error".
- Every call is made in the primary context of the device, which torch uses too, and in the relaxed
  capture mode: no call of ours takes part in what the engine captures into graphs, is forbidden
  meanwhile, or spoils the capture. The thread gets its own context and mode back.

torch says on which stream the engine computes. Triton launches the one kernel. What is missing is
one line for the operator (``open_gpu``).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping
from ctypes import byref, c_int, c_size_t, c_void_p
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from kvass.transfer import cuda_copies, cuda_driver
from kvass.transfer.base import U8Array
from kvass.transfer.cuda_copies import BatchCopy, Tables, give_batch, give_each
from kvass.transfer.cuda_driver import FATAL, error_text, must
from kvass.transfer.cuda_driver import MissingError as MissingError
from kvass.transfer.runtime import Batch, Event, Fault, Kind, Region, Runtime, Stream
from kvass.transfer.self_check import SCRATCH_BYTES, self_check
from kvass.types import I64Array

NOT_READY: Final = 600
_NON_BLOCKING, _NO_TIMING = 1, 2
_PORTABLE, _MAPPED = 1, 2
_MADV_POPULATE_WRITE = 23
"""Linux 5.14."""
_BUSY_CYCLES: Final = 200_000_000
"""Some 100 ms."""
_RELAXED = 2
"""Capture mode of a thread: captures are no concern of its calls, whoever began them."""
_kept: Final[list[object]] = []
"""Scratch pages of trials that were not right: a copy that did not end may still write there, when
torch would have given the memory to the engine."""
_log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate["DriverRuntime", P], R]


def _in_context(method: Method[P, R]) -> Method[P, R | Fault]:
    """Call the method in the device's context and in the relaxed capture mode; without the context
    nothing is asked."""

    @wraps(method)
    def call(self: DriverRuntime, /, *args: P.args, **more: P.kwargs) -> R | Fault:
        driver, mode = self._driver, c_int(_RELAXED)
        if fault := self._fault("context", driver.cuCtxPushCurrent_v2(self._context)):
            return fault
        driver.cuThreadExchangeStreamCaptureMode(byref(mode))
        try:
            return method(self, *args, **more)
        finally:
            driver.cuThreadExchangeStreamCaptureMode(byref(mode))
            driver.cuCtxPopCurrent_v2(byref(c_void_p()))

    return call


class DriverRuntime(Runtime):
    """``driver`` is libcuda. ``compute``: the handle of the calling thread's torch stream.
    ``launch``: runs the kernel for a table of runs on a stream of ours. ``single``: each run is a
    call of its own. Raises MissingError."""

    def __init__(
        self,
        driver: Any,
        device: int,
        compute: Callable[[], int],
        launch: Callable[[int, I64Array], None],
        tables: Tables,
        single: bool = False,
    ) -> None:
        self._driver, self._compute, self._launch = driver, compute, launch
        self._tables = tables
        self._madvise = ctypes.CDLL(None).madvise
        self._madvise.argtypes = (c_void_p, c_size_t, c_int)
        self._context = c_void_p()
        must(driver, "no CUDA driver that works", driver.cuInit(0))
        handle = cuda_driver.get_device(driver, device)
        cuda = cuda_driver.cuda_version(driver)
        batches = not single and cuda >= cuda_driver.LEAST_CUDA
        found = cuda_driver.find_batch_copy(driver) if batches else None
        direct = cuda_driver.is_direct(driver, handle)
        if reason := cuda_driver.obstacle(cuda, direct, found is not None, single):
            raise MissingError(reason)
        self._batch_copy = None if found is None else BatchCopy(found)
        if single:
            self.batch_runs = cuda_copies.SINGLE_RUNS
        got = driver.cuDevicePrimaryCtxRetain(byref(self._context), handle)
        must(driver, "the device's context", got)

    def _fault(self, what: str, result: int) -> Fault | None:
        if not result:
            return None
        return Fault(f"{what}: {error_text(self._driver, result)}", dead=result in FATAL)

    # ------------------------------------------------------------ streams and events

    @_in_context
    def order(self) -> Event | Fault:
        """As ``Runtime.order``. A stream that is being captured has none: an event there would be a
        part of the graph."""
        stream, capturing = self._compute(), c_int()
        asked = self._driver.cuStreamIsCapturing(c_void_p(stream), byref(capturing))
        if fault := self._fault("event", asked):
            return fault
        if capturing.value:
            return Fault("the engine's stream is being captured into a graph")
        return self._record(stream)

    @_in_context
    def mark(self, stream: Stream) -> Event | Fault:
        return self._record(stream)

    def _record(self, stream: int) -> Event | Fault:
        event = c_void_p()
        if fault := self._fault("event", self._driver.cuEventCreate(byref(event), _NO_TIMING)):
            return fault
        if fault := self._fault("event", self._driver.cuEventRecord(event, c_void_p(stream))):
            self._driver.cuEventDestroy_v2(event)
            return fault
        return Event(event.value or 0)

    @_in_context
    def open_stream(self, kind: Kind) -> Stream | Fault:
        """As ``Runtime.open_stream``: stores have the lowest priority, loads the highest. By
        ``cuda.h`` it has an effect on kernels only, not on copies."""
        low, high, stream = c_int(), c_int(), c_void_p()
        asked = self._driver.cuCtxGetStreamPriorityRange(byref(low), byref(high))
        if fault := self._fault("priorities of streams", asked):
            return fault
        priority = low if kind == "store" else high
        made = self._driver.cuStreamCreateWithPriority(byref(stream), _NON_BLOCKING, priority)
        return self._fault("stream", made) or Stream(stream.value or 0)

    @_in_context
    def close_stream(self, stream: Stream) -> Fault | None:
        return self._fault("stream", self._driver.cuStreamDestroy_v2(c_void_p(stream)))

    @_in_context
    def wait(self, stream: Stream, event: Event) -> Fault | None:
        asked = self._driver.cuStreamWaitEvent(c_void_p(stream), c_void_p(event), 0)
        return self._fault("wait", asked)

    @_in_context
    def done(self, event: Event) -> bool | Fault:
        return self._over(self._driver.cuEventQuery(c_void_p(event)))

    @_in_context
    def idle(self, stream: Stream) -> bool | Fault:
        return self._over(self._driver.cuStreamQuery(c_void_p(stream)))

    def _over(self, result: int) -> bool | Fault:
        return False if result == NOT_READY else self._fault("copy", result) or True

    @_in_context
    def forget(self, event: Event) -> Fault | None:
        return self._fault("event", self._driver.cuEventDestroy_v2(c_void_p(event)))

    # ------------------------------------------------------------ host memory

    def register(self, address: int, count: int) -> Fault | None:
        """As ``Runtime.register``. What is not in this process's page tables is faulted in before,
        while no lock of the driver's is held. The device knows the memory by the host's address
        (``is_direct``), so cuMemHostGetDevicePointer is not asked."""
        self._madvise(address, count, _MADV_POPULATE_WRITE)
        return self._register(address, count)

    @_in_context
    def _register(self, address: int, count: int) -> Fault | None:
        flags, pin = _PORTABLE | _MAPPED, self._driver.cuMemHostRegister_v2
        return self._fault("pinning", pin(c_void_p(address), c_size_t(count), flags))

    @_in_context
    def unregister(self, address: int) -> Fault | None:
        return self._fault("unpinning", self._driver.cuMemHostUnregister(c_void_p(address)))

    # ------------------------------------------------------------ copies

    @_in_context
    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        """As ``Runtime.copy``. What the kernel could do goes by DMA while no table is free."""
        table = self._tables.take(batch) if batch.way == "kernel" else None
        if table is not None:
            batch.keep.append(table)  # at once: what raises may have been launched
            return self._kernel(stream, table.rows)
        if batch.way == "pageable" or self._batch_copy is None:
            return self._fault("copy", give_each(self._driver, stream, batch))
        return self._fault("batch copy", give_batch(self._batch_copy, stream, batch))

    def _kernel(self, stream: Stream, rows: I64Array) -> Fault | None:
        try:
            self._launch(stream, rows)
        except Exception as error:  # noqa: BLE001 - a boundary: Triton, gcc and ptxas fail anyhow
            return Fault(f"kernel: {_first_line(error) or type(error).__name__}")
        return None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# ---------------------------------------------------------------- opening


def open_runtime(device: int, single: bool = False) -> DriverRuntime:
    """The runtime of CUDA device ``device``; ``single`` as for ``DriverRuntime``. Raises
    MissingError: one line that says why not."""
    import torch

    if not torch.cuda.is_available():
        raise MissingError("torch finds no CUDA device")
    driver = cuda_driver.load_driver()

    def compute() -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def launch(stream: int, rows: I64Array) -> None:
        from kvass.transfer.cuda_kernels import copy_runs

        ours = torch.cuda.ExternalStream(stream, device=device)
        with torch.cuda.device(device), torch.cuda.stream(ours):
            copy_runs(torch.from_numpy(rows))

    try:
        with torch.cuda.device(device):  # now: the device stops for it
            words = torch.empty(cuda_copies.TABLE_SHAPE, dtype=torch.int64, pin_memory=True)
    except RuntimeError as error:
        raise MissingError(f"no pinned memory on device {device}: {_first_line(error)}") from error
    return DriverRuntime(driver, device, compute, launch, Tables(words.numpy()), single)


def open_gpu(device: int, single: bool = False) -> tuple[Runtime, Mapping[Kind, int]]:
    """The runtime of CUDA device ``device``, and below which lengths of runs a kernel moves them.

    The device was tried, by copies of the same mode, on pages of known bytes. Raises MissingError:
    one line that says why it cannot be used.
    """
    runtime = open_runtime(device, single)
    below, wrong = None, ""
    try:
        scratch = TorchScratch(f"cuda:{device}")
        _kept.append(scratch)
        below, wrong = self_check(runtime, scratch)
    except RuntimeError as error:  # torch's, of memory that it has not, too
        wrong = _first_line(error)
    last = runtime.order()
    if isinstance(last, Fault) and last.dead:
        raise MissingError(
            f"device {device} failed for good while it was tried, for the engine too: {last.text}"
        )
    if not isinstance(last, Fault):
        runtime.forget(last)
    if below is None:
        raise MissingError(f"device {device} failed its trial: {wrong}")
    if wrong:
        _log.warning("kvass: copies on this device are slower than they could be: %s", wrong)
    else:
        _kept.remove(scratch)
    return runtime, below


class TorchScratch:
    """``self_check.Scratch`` on the CUDA device that torch calls ``where``."""

    def __init__(self, where: str) -> None:
        import torch

        self._torch: Any = torch
        self._pages = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=where)
        self.region = Region(self._pages.data_ptr(), SCRATCH_BYTES)

    def write(self, data: U8Array) -> None:
        staged = self._torch.from_numpy(data.copy()).to(self._pages.device)
        with self._torch.cuda.device(self._pages.device):
            self._torch.cuda._sleep(_BUSY_CYCLES)
            self._pages.copy_(staged)

    def read(self) -> U8Array:
        """As ``Scratch.read``. The stream is one of its own: waiting for the device would give
        copies that were reported too early the time that they lack."""
        beside = self._torch.cuda.Stream(self._pages.device)
        with self._torch.cuda.device(self._pages.device), self._torch.cuda.stream(beside):
            found: U8Array = self._pages.cpu().numpy().copy()  # waits for that stream's work only
        return found
