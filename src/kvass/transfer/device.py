"""One GPU as one process uses it: torch's streams and events, and the copy operation of the engine.

vLLM's own offloading moves KV pages by the same calls (``v1/kv_offload/cpu/gpu_worker.py``), on
CUDA, ROCm and XPU. What a platform lacks is not given (:class:`Operations`); nothing here asks for
its name.

The order of copies, compared with vLLM's:

- Both directions wait for the engine's stream: a store for the forward pass, a load for queued work
  that still reads or zeroes its blocks. vLLM lets a stream wait for the engine's stream when it
  submits a transfer. Here another thread queues the copies later, so ``order`` records an event in
  the engine's stream at once, and the copies wait for that event.
- vLLM gives each transfer a stream of its own, which waits for the transfer before. Here each
  direction has one stream, which keeps the same order.
- A load may read its source in any order, because no stream writes to the arena. A store reads in
  the order of its stream. Both are as in vLLM.
- A staged batch is two copies on one stream: into the stage, then out of it. The next batch of that
  stream, which writes to the same stage, comes after both. Neither reads in any order but from the
  arena.

Nothing may be copied while vLLM captures CUDA graphs: queries from another thread would end the
capture. vLLM captures in its warm-up, before it serves (its V1 runner refuses to do so later,
``validate_cudagraph_capturing_enabled``), and the copy thread starts with the first request.

Errors are values (:class:`Fault`). torch raises an error of the device as a RuntimeError and takes
it off the thread, so the engine does not find it in its next call.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, Final, NewType, ParamSpec, TypeVar

import numpy as np

from kvass.errors import KvassError
from kvass.transfer.base import Kind
from kvass.transfer.batch import FEWEST_STAGED, MAX_DESCRIPTORS, Batch, Stage, U64Array
from kvass.types import I64Array

Stream = NewType("Stream", object)
"""A ``torch.Stream``."""
Event = NewType("Event", object)
"""A ``torch.Event``."""

KERNEL_TABLES: Final = 32
"""How many kernels may be in flight, 96 KiB of pinned memory each: as many as both lanes have
batches of their full size. Copies that find none free go by DMA, which is several times slower for
them."""
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14."""


class MissingError(KvassError):
    """This machine cannot do it; the text says why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of the device. Whether earlier calls had their effect is not known. If its context
    is unusable, every later call is a fault, too."""

    text: str


CopyBatch = Callable[[Any, Any, Any, bool], None]
"""``vllm._custom_ops.swap_blocks_batch``: sources, targets and sizes in bytes, each a contiguous
tensor of one dimension on the CPU, and whether the sources may be read in any order. The copies are
queued on the calling thread's current stream."""


@dataclass(frozen=True)
class Operations:
    """What an engine copies and pins with, as far as its platform has it.

    ``copy_short``: a kernel for sources in pinned memory or on the device, in words of 8 bytes.
    ``register`` pins host memory, and returns whether it could; it leaves no error behind.
    ``unsigned``: addresses and sizes are uint64, not int64.
    """

    copy: CopyBatch
    copy_short: CopyBatch | None = None
    register: Callable[[int, int], bool] | None = None
    unregister: Callable[[int], bool] | None = None
    unsigned: bool = False


P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate["DeviceRuntime", P], R]


def _faults(what: str) -> Callable[[Method[P, R]], Method[P, R | Fault]]:
    """Turn the errors that torch raises in a method into faults."""

    def decorate(method: Method[P, R]) -> Method[P, R | Fault]:
        @wraps(method)
        def call(self: DeviceRuntime, /, *args: P.args, **more: P.kwargs) -> R | Fault:
            try:
                return method(self, *args, **more)
            except RuntimeError as error:
                return Fault(f"{what}: {first_line(error)}")

        return call

    return decorate


class DeviceRuntime:
    """``device`` is torch's name of it. ``torch``: the module; tests have a fake one. Any thread
    may call it, and no call waits for work on the device, except copies of pageable memory.

    ``batch_runs``: the most copies of a batch. Two such batches may be in flight on a stream. With
    more, the driver may block the caller until the engine's work is done. Fewer copies than
    ``fewest_staged`` do not go through a stage.
    """

    batch_runs: int = MAX_DESCRIPTORS
    kernel_tables: int = KERNEL_TABLES
    fewest_staged: int = FEWEST_STAGED

    def __init__(self, device: str, operations: Operations, torch: Any) -> None:
        self._device, self._operations, self._torch = device, operations, torch
        self.tables = Tables(torch, self.kernel_tables) if operations.copy_short else None

    @_faults("device")
    def enter_thread(self) -> None:
        """Make this device the calling thread's current one. A thread begins with device 0, and
        pinning memory or leaving a stream would make a context there."""
        index = self._torch.device(self._device).index
        if index is not None:
            self._torch.accelerator.set_device_index(index)

    # ------------------------------------------------------------ streams and events

    @_faults("event")
    def order(self) -> Event | Fault:
        """A new event after all work that is queued on the calling thread's current stream. A
        stream that is being captured has none: an event there would be a part of the graph."""
        stream = self._torch.accelerator.current_stream(self._device)
        if self._captures(stream):
            return Fault("the engine's stream is being captured into a graph")
        return self._record(stream)

    def _captures(self, stream: Any) -> bool:
        """Whether ``stream``, the calling thread's current one, is being captured."""
        if hasattr(stream, "is_capturing"):
            return bool(stream.is_capturing())
        cuda = self._torch.cuda  # before torch 2.13
        return bool(cuda.is_available() and cuda.is_current_stream_capturing())

    @_faults("stream")
    def open_stream(self, kind: Kind) -> Stream:
        """A new stream for copies of ``kind``. Kernels of loads have a higher priority than the
        engine's."""
        priority = -1 if kind == "load" else 0
        return Stream(self._torch.Stream(self._device, priority=priority))

    @_faults("wait")
    def wait(self, stream: Stream, event: Event) -> None:
        """Let all later work of ``stream`` happen after ``event``."""
        _any(stream).wait_event(event)

    @_faults("event")
    def mark(self, stream: Stream) -> Event:
        """A new event after all work that is queued on ``stream``."""
        return self._record(stream)

    def _record(self, stream: Any) -> Event:
        event = self._torch.Event(self._device)
        event.record(stream)
        return Event(event)

    @_faults("copy")
    def done(self, event: Event) -> bool:
        """Whether ``event`` was reached: the work before it is done, and its result is visible to
        all."""
        return bool(_any(event).query())

    @_faults("copy")
    def idle(self, stream: Stream) -> bool:
        """Whether all work of ``stream`` is done, and its result is visible to all."""
        return bool(_any(stream).query())

    # ------------------------------------------------------------ host memory

    def register(self, address: int, count: int) -> Fault | None:
        """Pin ``count`` bytes of host memory, which the device then knows by the same address. What
        is not in this process's page tables is faulted in before, while no lock of the driver is
        held."""
        if self._operations.register is None:
            return Fault("not possible on this platform")
        _madvise(address, count, _MADV_POPULATE_WRITE)
        pinned = self._operations.register(address, count)
        return None if pinned else Fault("the driver refused it")

    def unregister(self, address: int) -> Fault | None:
        """Undo ``register``. No copy may be using the memory."""
        assert self._operations.unregister is not None
        return None if self._operations.unregister(address) else Fault("the driver refused it")

    # ------------------------------------------------------------ copies

    @_faults("stage")
    def open_stage(self, count: int) -> Stage:
        """``count`` bytes of the device's memory, for batches that go through them."""
        memory = self._torch.empty(count, dtype=self._torch.uint8, device=self._device)
        return Stage(memory.data_ptr(), count, memory)

    @_faults("copy")
    def copy(self, stream: Stream, batch: Batch) -> None:
        """Queue a batch of at most ``batch_runs`` copies on ``stream``.

        Each copy lies in one registration (except ``pageable``). The source of a ``load`` may be
        read from now on, even if the stream still waits. After a fault any part of the batch may
        have been queued. What the kernel could do goes by DMA while no table is free. Of a
        ``staged`` batch ``stage`` is that of ``stream``.
        """
        columns = batch.source, batch.target, batch.bytes
        table, loads = self._table(batch), batch.kind == "load"
        with _any(stream):
            if table is None:
                self._copy(batch, columns, loads)
            elif batch.way == "kernel":
                assert loads
                self._copy_short(table, columns, True)
            else:
                short, long = staged(batch)
                if loads:
                    self._copy(batch, long, True)
                self._copy_short(table, short, False)
                if not loads:
                    self._copy(batch, long, False)

    def _table(self, batch: Batch) -> Table | None:
        """A table for the batch's kernel; None if it goes without one."""
        fewest = {"kernel": 1, "staged": self.fewest_staged}.get(batch.way)
        if fewest is None or len(batch.bytes) < fewest or self.tables is None:
            return None
        table = self.tables.take()
        if table is not None:
            batch.keep.append(table)  # at once: what raises may have been launched
        return table

    def _copy(self, batch: Batch, columns: Columns, any_order: bool) -> None:
        source, target, count = (self._tensor(column) for column in columns)
        batch.keep.append((source, target, count))
        self._operations.copy(source, target, count, any_order)

    def _copy_short(self, table: Table, columns: Columns, any_order: bool) -> None:
        assert self._operations.copy_short is not None
        source, target, count = table.fill(columns)
        self._operations.copy_short(source, target, count, any_order)

    def _tensor(self, column: Any) -> Any:
        if self._operations.unsigned:
            return self._torch.from_numpy(np.ascontiguousarray(column))
        return self._torch.from_numpy(np.ascontiguousarray(column).view(np.int64))


Columns = tuple[U64Array, U64Array, U64Array]
"""The sources, targets and sizes of copies."""


def staged(batch: Batch) -> tuple[Columns, Columns]:
    """The copies of a staged batch between pages and stage, and those between stage and arena. In
    the stage all of them lie back to back."""
    assert batch.stage is not None
    assert batch.firsts is not None
    there = np.cumsum(batch.bytes) - batch.bytes + np.uint64(batch.stage.address)
    pieces, first = np.add.reduceat(batch.bytes, batch.firsts), batch.firsts
    if batch.kind == "store":
        long = there[first], batch.target[first], pieces
        return (batch.source, there, batch.bytes), long
    return (there, batch.target, batch.bytes), (batch.source[first], there[first], pieces)


def _any(handle: object) -> Any:
    """A stream or an event with torch's methods."""
    return handle


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


# ---------------------------------------------------------------- the kernel's tables


class Table:
    """Pinned memory for the sources, targets and sizes of one batch. A kernel reads it when it
    starts, so it is free again when nobody holds it."""

    def __init__(self, words: Any, free: deque[Any]) -> None:
        self._words, self._free = words, free

    def fill(self, columns: Columns) -> list[Any]:
        """Tensors with these columns."""
        count = len(columns[0])
        rows: I64Array = self._words.numpy()
        for row, column in zip(rows, columns, strict=True):
            row[:count] = column.view(np.int64)
        return [row[:count] for row in self._words]

    def __del__(self) -> None:
        self._free.append(self._words)


class Tables:
    """All tables. They are taken on any thread and let go of on any. Raises RuntimeError if there
    is no pinned memory. It is allocated now, because the device stops for it."""

    def __init__(self, torch: Any, count: int) -> None:
        shape = (count, 3, MAX_DESCRIPTORS)
        self.free: deque[Any] = deque(torch.empty(shape, dtype=torch.int64, pin_memory=True))

    def take(self) -> Table | None:
        """A table; None if all are in use."""
        try:
            return Table(self.free.popleft(), self.free)
        except IndexError:
            return None
