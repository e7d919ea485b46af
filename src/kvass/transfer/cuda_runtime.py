"""The real ``Runtime``: CUDA's driver, by ctypes. **Never run on a GPU yet** (docs/gpu.md).

That the calls are those of NVIDIA's ``cuda.h``: ``tests/transfer/test_cuda_abi.py``.

Laws of this file:

- Only the driver's interface: its errors are results, never left behind for the engine to find in
  the CUDA runtime's "last error".
- No compiled code of ours, and no array copied: the driver reads numpy's memory.
- Whatever is missing is one line for the operator (``open_runtime``), before anything is promised.

- Whichever thread calls in, the driver is asked within ``_beside_captures``: in the primary context
  of the device, which torch uses too, whatever is current on that thread before and after; and no
  call of ours has a part in what an engine captures into graphs, none is forbidden meanwhile, none
  spoils the capture.

torch says which stream the engine computes on; Triton launches the one kernel. Of a stream that is
being captured no order can be had: no event on it will happen.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import Any, Final

from kvass.transfer import cuda_driver
from kvass.transfer.base import U8Array
from kvass.transfer.cuda_copies import SINGLE_RUNS, BatchCopy, give_batch, give_each
from kvass.transfer.cuda_driver import FATAL, error_text, must
from kvass.transfer.cuda_driver import MissingError as MissingError
from kvass.transfer.kernel_tables import TABLE_WORDS, TABLES, Tables
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
"""Of a thread: captures are no concern of its calls, whoever began them."""
_kept: Final[list[object]] = []
"""Scratch pages of trials that were not right: a copy or a kernel that did not end may still write
there, when torch would have given the memory to the engine."""
_log = logging.getLogger(__name__)


class DriverRuntime(Runtime):
    """``driver`` is libcuda. ``compute``: the handle of the calling thread's torch stream;
    ``launch``: runs the kernel for a table of runs on a stream of ours. ``tables``: where those
    are; or why there are none, and then no kernel. ``single``: each run is a call of its own."""

    def __init__(
        self,
        driver: Any,
        device: int,
        compute: Callable[[], int],
        launch: Callable[[int, I64Array], None],
        tables: Tables | str,
        single: bool = False,
    ) -> None:
        """Raises MissingError."""
        self._driver, self._compute, self._launch = driver, compute, launch
        self._tables = tables
        self._no_priorities = False
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
            self.batch_runs = SINGLE_RUNS
        got = driver.cuDevicePrimaryCtxRetain(byref(self._context), handle)
        must(driver, "the device's context", got)

    def _fault(self, what: str, result: int) -> Fault | None:
        if not result:
            return None
        return Fault(f"{what}: {error_text(self._driver, result)}", dead=result in FATAL)

    @contextmanager
    def _beside_captures(self) -> Iterator[Fault | None]:
        """For as long as we ask, this thread has the device's context, and a capture mode in which
        its calls are independent of all captures. It may be anybody's: it gets its own back. Yields
        the fault if it cannot have the context; then nothing may be asked."""
        pushed = self._driver.cuCtxPushCurrent_v2(self._context)
        if pushed:
            yield self._fault("context", pushed)
            return
        mode = c_int(_RELAXED)
        changed = not self._driver.cuThreadExchangeStreamCaptureMode(byref(mode))
        try:
            yield None
        finally:
            if changed:
                self._driver.cuThreadExchangeStreamCaptureMode(byref(mode))
            self._driver.cuCtxPopCurrent_v2(byref(c_void_p()))

    # ------------------------------------------------------------ streams and events

    def order(self) -> Event | Fault:
        with self._beside_captures() as fault:
            return fault or self._order()

    def _order(self) -> Event | Fault:
        stream, capturing = self._compute(), c_int()
        asked = self._driver.cuStreamIsCapturing(c_void_p(stream), byref(capturing))
        if fault := self._fault("event", asked):
            return fault
        if capturing.value:
            return Fault("the engine's stream is being captured into a graph")
        return self._mark(stream)

    def mark(self, stream: Stream) -> Event | Fault:
        with self._beside_captures() as fault:
            return fault or self._mark(stream)

    def _mark(self, stream: int) -> Event | Fault:
        event = c_void_p()
        if fault := self._fault("event", self._driver.cuEventCreate(byref(event), _NO_TIMING)):
            return fault
        if fault := self._fault("event", self._driver.cuEventRecord(event, c_void_p(stream))):
            self._driver.cuEventDestroy_v2(event)
            return fault
        return Event(event.value or 0)

    def open_stream(self, kind: Kind) -> Stream | Fault:
        with self._beside_captures() as fault:
            return fault or self._open_stream(kind)

    def _open_stream(self, kind: Kind) -> Stream | Fault:
        priority, stream = self._priority(kind), c_void_p()
        if isinstance(priority, Fault):
            return priority
        made = self._driver.cuStreamCreateWithPriority(byref(stream), _NON_BLOCKING, priority)
        return self._fault("stream", made) or Stream(stream.value or 0)

    def _priority(self, kind: Kind) -> c_int | Fault:
        """The lowest for stores, the highest for loads; the default if the device does not say
        which those are. By ``cuda.h`` a priority has an effect on kernels only, not on copies."""
        low, high = c_int(), c_int()
        asked = self._driver.cuCtxGetStreamPriorityRange(byref(low), byref(high))
        fault = self._fault("priorities of streams", asked)
        if fault is None:
            return low if kind == "store" else high
        if fault.dead:
            return fault
        if not self._no_priorities:
            self._no_priorities = True
            _log.warning(
                "kvass: loads may wait for the engine's kernels on this device: %s", fault.text
            )
        return c_int(0)

    def close_stream(self, stream: Stream) -> None:
        with self._beside_captures() as fault:
            if not fault:
                self._driver.cuStreamDestroy_v2(c_void_p(stream))

    def wait(self, stream: Stream, event: Event) -> Fault | None:
        with self._beside_captures() as fault:
            return fault or self._fault(
                "wait", self._driver.cuStreamWaitEvent(c_void_p(stream), c_void_p(event), 0)
            )

    def done(self, event: Event) -> bool | Fault:
        with self._beside_captures() as fault:
            return fault or self._over(self._driver.cuEventQuery(c_void_p(event)))

    def idle(self, stream: Stream) -> bool | Fault:
        """As ``Runtime.idle``."""
        with self._beside_captures() as fault:
            return fault or self._over(self._driver.cuStreamQuery(c_void_p(stream)))

    def _over(self, result: int) -> bool | Fault:
        return False if result == NOT_READY else self._fault("copy", result) or True

    def forget(self, event: Event) -> None:
        with self._beside_captures() as fault:
            if not fault:
                self._driver.cuEventDestroy_v2(c_void_p(event))

    # ------------------------------------------------------------ host memory

    def register(self, address: int, count: int) -> Fault | None:
        """As ``Runtime.register``. What is not in this process's page tables is faulted in before,
        where no lock of the driver's is held; if that fails, the driver does it.

        ``is_direct`` says that the host's address is the device's, too. The one that
        cuMemHostGetDevicePointer would give is another if some other device that is visible cannot
        do this, and ``cuda.h`` allows to use one of the two only.
        """
        self._madvise(address, count, _MADV_POPULATE_WRITE)
        flags, pin = _PORTABLE | _MAPPED, self._driver.cuMemHostRegister_v2
        with self._beside_captures() as fault:
            return fault or self._fault("pinning", pin(c_void_p(address), c_size_t(count), flags))

    def unregister(self, address: int) -> Fault | None:
        with self._beside_captures() as fault:
            return fault or self._fault(
                "unpinning", self._driver.cuMemHostUnregister(c_void_p(address))
            )

    # ------------------------------------------------------------ copies

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        ways = {"dma": self._dma, "kernel": self._kernel, "pageable": self._pageable}
        with self._beside_captures() as fault:
            return fault or ways[batch.way](stream, batch)

    def _kernel(self, stream: Stream, batch: Batch) -> Fault | None:
        """By DMA, which is as right, while all tables are in use."""
        if isinstance(self._tables, str):
            return Fault(f"kernel: no pinned memory for its tables: {self._tables}")
        table = self._tables.take(batch)
        if table is None:
            return self._dma(stream, batch)
        batch.keep.append(table)  # at once: what raises may have been launched
        try:
            self._launch(stream, table.rows)
        except Exception as error:  # noqa: BLE001 - a boundary: Triton, gcc and ptxas fail anyhow
            text = str(error).strip().partition("\n")[0]
            return Fault(f"kernel: {text or type(error).__name__}")
        return None

    def _dma(self, stream: Stream, batch: Batch) -> Fault | None:
        if self._batch_copy is None:
            return self._pageable(stream, batch)
        return self._fault("batch copy", give_batch(self._batch_copy, stream, batch))

    def _pageable(self, stream: Stream, batch: Batch) -> Fault | None:
        return self._fault("copy", give_each(self._driver, stream, batch))


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

    return DriverRuntime(driver, device, compute, launch, _pinned_tables(device), single)


def _pinned_tables(device: int) -> Tables | str:
    """Made now: the device stops for it. Or why not."""
    import torch

    try:
        with torch.cuda.device(device):
            words = torch.empty((TABLES, TABLE_WORDS), dtype=torch.int64, pin_memory=True)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return Tables(words.numpy())


def open_gpu(device: int, single: bool = False) -> tuple[Runtime, Mapping[Kind, int]]:
    """The runtime of CUDA device ``device``, and below which lengths of runs a kernel moves them.

    The device was tried, by copies of the same mode, on pages of known bytes. Raises MissingError:
    one line that says why it cannot be used, which is also what is said of one that moved them
    wrong.
    """
    runtime = open_runtime(device, single)
    try:
        scratch = TorchScratch(f"cuda:{device}")
        _kept.append(scratch)
        below, wrong = self_check(runtime, scratch)
    except RuntimeError as error:  # torch's, of memory that it has not, too
        text = str(error).partition("\n")[0]
        tried = f"device {device} could not be tried: {text}"
        raise MissingError(_end(runtime, device) or tried) from error
    if ended := _end(runtime, device):
        raise MissingError(ended)
    if below is None:
        raise MissingError(f"device {device} was tried and is not right: {wrong}")
    if not wrong:
        _kept.remove(scratch)
    else:
        _log.warning("kvass: copies on this device are slower than they could be: %s", wrong)
    return runtime, below


def _end(runtime: Runtime, device: int) -> str:
    """What to say if the context did not survive the trial; empty if it did."""
    last = runtime.order()
    if not isinstance(last, Fault):
        runtime.forget(last)
        return ""
    ended = f"device {device} failed for good while it was tried, for the engine too: {last.text}"
    return ended if last.dead else ""


class TorchScratch:
    """``self_check.Scratch`` on torch device ``where``; "cpu" too, for tests."""

    def __init__(self, where: str) -> None:
        import torch

        self._torch: Any = torch
        self._pages = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=where)
        self.region = Region(self._pages.data_ptr(), SCRATCH_BYTES)

    def write(self, data: U8Array) -> None:
        """As ``Scratch.write``."""
        staged = self._torch.from_numpy(data.copy()).to(self._pages.device)
        if not self._pages.is_cuda:
            self._pages.copy_(staged)
            return
        with self._torch.cuda.device(self._pages.device):
            self._torch.cuda._sleep(_BUSY_CYCLES)
            self._pages.copy_(staged)

    def read(self) -> U8Array:
        """As ``Scratch.read``. The stream is one of its own: waiting for the device would give
        copies that were reported too early the time that they lack."""
        if not self._pages.is_cuda:
            return self._bytes()
        beside = self._torch.cuda.Stream(self._pages.device)
        with self._torch.cuda.device(self._pages.device), self._torch.cuda.stream(beside):
            return self._bytes()  # waits for that stream's work, and no other's

    def _bytes(self) -> U8Array:
        found: U8Array = self._pages.cpu().numpy().copy()
        return found
