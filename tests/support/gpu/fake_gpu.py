"""A fake GPU under the real ``DeviceRuntime``: the worst behaviour that CUDA allows.

- Work happens later, in pieces and in any order (``fake_device``). A source that may be read in any
  order may already be read when the copy is submitted.
- What the engine's copy operation refuses raises RuntimeError, as torch does. Where a device would
  silently move wrong bytes, it is noted in ``violations``.

The operations check what vLLM's ``csrc/libtorch_stable/cache_kernels.cu`` checks of its arguments,
and what it takes for granted: contiguous tensors, a stream that is not the engine's, addresses of
this device, whole registrations. The kernel's are those of ``swap_blocks_triton.py``.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from kvass.transfer.batch import Batch
from kvass.transfer.device import DeviceRuntime, Event, Fault, Operations, Stream
from tests.support.gpu.fake_device import Copy, FakeDevice, Mark, Piece, Wait, holds, meet
from tests.support.gpu.fake_torch import Current, FakeEvent, FakeStream, FakeTensor, fake_torch

DEAD: Final = "unspecified launch failure"
PIECES: Final = 3
KERNEL_TABLES: Final = 3
"""Fewer than a real one has, so that they run out."""


@dataclass(eq=False)
class Plans:
    """Planned failures: by a call's name, which calls of it fail, counted from 0."""

    fail: dict[str, set[int]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def fails(self, name: str) -> bool:
        n = self.calls.get(name, 0)
        self.calls[name] = n + 1
        return n in self.fail.get(name, ())


class FakeGpu(FakeDevice, DeviceRuntime):
    """See above. ``eager``: each query of an event lets the device do up to so many pieces of work.
    ``unsigned``: as for ``Operations``."""

    kernel_tables = KERNEL_TABLES
    pieces = PIECES
    """Into how many a run is torn, at most."""

    def __init__(
        self, seed: int, eager: int = 4, watched: bool = True, unsigned: bool = False
    ) -> None:
        FakeDevice.__init__(self, seed, watched)
        self._threads = Current()
        self.plans = Plans()
        self.copied: list[Batch] = []
        self.devices: list[int] = []
        """The devices that threads made their current one."""
        self.stopped = False
        """The device hangs: nothing happens by itself."""
        self.few = 16
        """vLLM's kernel leaves fewer copies to the copy engines (``MIN_N``)."""
        self._eager = eager
        self.compute: FakeStream = FakeStream(self)
        self._other = FakeStream(self)
        """The current stream of all threads but the engine's."""
        kernel = None if unsigned else self._kernel
        operations = Operations(self._swap, kernel, self._pin, self._unpin, unsigned)
        DeviceRuntime.__init__(self, "fake:0", operations, fake_torch(self))

    # ------------------------------------------------------------ threads

    @contextmanager
    def engine_thread(self) -> Iterator[None]:
        """Calls within this context count as the engine thread's."""
        was, self._threads.engine = self._threads.engine, True
        try:
            yield
        finally:
            self._threads.engine = was

    @property
    def current(self) -> list[FakeStream]:
        """The streams that this thread has entered."""
        return self._threads.streams

    def current_stream(self) -> FakeStream:
        if self.current:
            return self.current[-1]
        return self.compute if self._threads.engine else self._other

    # ------------------------------------------------------------ torch's streams and events

    def may(self, name: str) -> None:
        """Raise if this call is to fail."""
        if self._threads.engine and name not in ("order", "open_stage"):
            self.violations.append(f"{name} on the engine's thread")
        if self.dead:
            raise RuntimeError(DEAD)
        if self.plans.fails(f"{name} raises"):
            raise ValueError(f"{name} raises, as planned")
        if self.plans.fails(name):
            raise RuntimeError(f"{name} failed, as planned")

    def add_stream(self, stream: FakeStream) -> None:
        self.streams[stream] = deque()

    def record(self, stream: FakeStream, event: FakeEvent) -> None:
        ours = stream not in (self.compute, self._other)
        self.may("mark" if ours else "order")
        with self._lock:
            self._events[event] = False
            self.streams[stream].append(Mark(event))

    def wait_on(self, stream: FakeStream, event: FakeEvent) -> None:
        self._known(event)
        self.may("wait")
        with self._lock:
            self.streams[stream].append(Wait(event))

    def query_event(self, event: FakeEvent) -> bool:
        self._known(event)
        self.may("done")
        with self._lock:
            self._work()
            return self._events[event]

    def query_stream(self, stream: FakeStream) -> bool:
        self.may("idle")
        with self._lock:
            self._work()
            return not self.streams[stream]

    def _work(self) -> None:
        for _ in range(0 if self.stopped else self.rng.randint(0, self._eager)):
            self.step()

    def _known(self, event: FakeEvent) -> None:
        if event not in self._events:
            self.violations.append("an event that was never recorded")

    # ------------------------------------------------------------ pinning

    def _pin(self, address: int, count: int) -> bool:
        self.may_pin("register")
        with self._lock:
            known = any(meet(at, n, address, count) for at, n in self.registered.items())
            exists = any(holds(at, n, address, count) for at, n in self._mapped.items())
            if self.plans.fails("register") or known or (self._watched and not exists):
                return False
            self.registered[address] = count
        return True

    def _unpin(self, address: int) -> bool:
        self.may_pin("unregister")
        with self._lock:
            if self.plans.fails("unregister") or address not in self.registered:
                return False
            if self.busy(address, self.registered[address]):
                self.violations.append("host memory was unregistered under a copy")
            del self.registered[address]
        return True

    def may_pin(self, name: str) -> None:
        """As ``may``, for calls that answer False where they fail."""
        if self._threads.engine:
            self.violations.append(f"{name} on the engine's thread")
        if self.plans.fails(f"{name} raises"):
            raise ValueError(f"{name} raises, as planned")

    # ------------------------------------------------------------ copies

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        if not 0 < len(batch.bytes) <= self.batch_runs:
            self.violations.append(f"{len(batch.bytes)} descriptors")
        host = batch.source if batch.kind == "load" else batch.target
        runs = zip(host.tolist(), batch.bytes.tolist(), strict=True)
        pinned = [self._window(at, count) is not None for at, count in runs]
        if batch.way != "pageable" and not all(pinned):
            self.violations.append("host memory was taken for registered, in one piece")
        waits = any(not self._ready(op) for op in self.streams[stream])
        if waits and not all(pinned):
            self.violations.append("a call that may block was made while its stream waits")
        fault = super().copy(stream, batch)
        self.copied.append(batch)
        return fault

    def _swap(self, sources: Any, targets: Any, sizes: Any, any_order: bool) -> None:
        """vLLM's ``swap_blocks_batch``."""
        whole = self._checked(sources, targets, sizes)
        if not all(self._host(run) for run in whole):
            raise RuntimeError("invalid argument: copy engines copy to the host and from it")
        self._give([self._pieces(run, any_order, None) for run in whole], len(whole))

    def _kernel(self, sources: Any, targets: Any, sizes: Any, any_order: bool) -> None:
        """vLLM's kernel. It reads its table when it runs."""
        runs = self._checked(sources, targets, sizes)
        if len(runs) < self.few:
            self._swap(sources, targets, sizes, any_order)
            return
        if not all(tensor.pinned for tensor in (sources, targets, sizes)):
            self.violations.append("a kernel's table is not pinned")
        for target, source, count in runs:
            if (target | source | count) % 8:
                self.violations.append("a kernel copies words, and was given parts of words")
            if not self._is_device(target, count):
                self.violations.append("a kernel writes where it may not")
            if not self._is_device(source, count) and self._window(source, count) is None:
                raise RuntimeError("illegal memory access: a kernel read memory that is not pinned")
        columns = targets.array, sources.array, sizes.array

        def told(index: int) -> Callable[[], tuple[int, ...]]:
            return lambda: tuple(int(column[index]) for column in columns)

        # What a kernel reads on the device is what is there when it runs.
        early = [not self._is_device(source, count) for _, source, count in runs]
        pieces = [self._pieces(run, early[i], told(i)) for i, run in enumerate(runs)]
        self._give(pieces, early.count(True))

    def _checked(self, sources: Any, targets: Any, sizes: Any) -> list[tuple[int, int, int]]:
        """``(target, source, bytes)`` of each copy. Raises what the operation raises."""
        wanted = np.uint64 if self._operations.unsigned else np.int64
        for name, tensor in (("src_ptrs", sources), ("dst_ptrs", targets), ("sizes", sizes)):
            if not isinstance(tensor, FakeTensor) or tensor.device != "cpu":
                raise RuntimeError(f"{name} must be on CPU")
            if tensor.dtype != wanted:
                raise RuntimeError(f"{name} must be {wanted.__name__}")
            if tensor.array.ndim != 1 or len(tensor) != len(sources):
                raise RuntimeError(f"{name} length must match src_ptrs")
            if not tensor.is_contiguous():  # the operation reads on
                self.violations.append(f"{name} is not contiguous")
        if not self.current or self.current[-1] in (self.compute, self._other):
            self.violations.append("copies were given to a stream that is not the mover's")
        columns = targets.array, sources.array, sizes.array
        runs = [*zip(*(column.tolist() for column in columns), strict=True)]
        for target, source, count in runs:
            there = [self._is_device(at, count) for at in (target, source)]
            if count <= 0 or not any(there):
                raise RuntimeError("invalid argument")
            host = self._host((target, source, count))
            if host and self._window(host, count) is None and self._is_partly_pinned(host, count):
                self.violations.append("host memory of two registrations in one copy")
                raise RuntimeError("invalid argument")
        return runs

    def _host(self, run: tuple[int, int, int]) -> int:
        """The address of the run in host memory; 0 if both of its ends are on the device."""
        target, source, count = run
        ends = [at for at in (target, source) if not self._is_device(at, count)]
        return ends[0] if ends else 0

    def _give(self, pieces: list[list[Piece]], runs: int) -> None:
        """Queue a batch of so many descriptors. A batch that is to fail may be queued in part."""
        stream, flat = self.current[-1], [piece for run in pieces for piece in run]
        failure = ""
        try:
            self.may("copy")
        except RuntimeError as error:
            if self.dead:
                raise
            failure = str(error)
            some = self.rng.randint(0, len(flat)) if self.rng.random() < 0.7 else 0
            flat = flat[:some]
        with self._lock:
            self._would_keep(stream, runs)
            self.streams[stream].append(Copy(flat, runs))
        if failure:
            raise RuntimeError(failure)

    def _would_keep(self, stream: FakeStream, runs: int) -> None:
        """Note a batch for which the driver would block its caller, with locks held, until earlier
        work is done. A single batch never blocks, whatever its size."""
        flying = [op.runs for op in self.streams[stream] if isinstance(op, Copy)]
        if flying and sum(flying) + runs > 2 * self.batch_runs:
            self.violations.append("too many descriptors were given to a stream at once")

    def _pieces(
        self,
        run: tuple[int, int, int],
        any_order: bool,
        told: Callable[[], tuple[int, ...]] | None,
    ) -> list[Piece]:
        target, source, count = run
        cuts = sorted({0, count, *(self.rng.randrange(count) for _ in range(self.pieces - 1))})
        load, pieces = self._is_device(target, count), []
        pinned = self._window(source if load else target, count) is not None
        for lo, hi in pairwise(cuts):
            piece = Piece(target + lo, source + lo, hi - lo, load, pinned, None, run, told)
            if any_order and self.rng.random() < 0.3:
                piece.read = ctypes.string_at(piece.source, piece.count)
            pieces.append(piece)
        return pieces

    def _is_device(self, address: int, count: int) -> bool:
        return any(holds(at, n, address, count) for at, n in self._device_memory)

    def _is_partly_pinned(self, address: int, count: int) -> bool:
        return any(meet(at, n, address, count) for at, n in self.registered.items())


__all__ = ["Event", "FakeGpu", "Fault", "Stream"]
