"""Where a program of these tests runs: on a GPU, or on a fake of one.

A program cannot tell which, but by how long things take. Both have torch tensors for memory and the
same kernels (torch's own operations); on the fake they run late, on the CPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvass.transfer.base import U8Array
from kvass.transfer.cuda_runtime import open_runtime
from kvass.transfer.runtime import Batch, Event, Fault, Region, Runtime, Stream
from tests.support.gpu.fake_cuda import FakeCuda
from tests.support.gpu.fake_device import COMPUTE, Op

Kernel = Callable[[], None]

HELD_CYCLES = 2_000_000_000
"""How long a real stream is held: about a second."""


class Gpu:
    """CUDA device 0, by torch. The engine's stream is one of torch's own, as vLLM's is."""

    where, real = "cuda:0", True
    """``where``: as torch calls it."""

    def __init__(self) -> None:
        self.runtime: Runtime = open_runtime(0)
        self.stream: Any = torch.cuda.Stream(0)

    def region(self, storage: Any) -> Region:
        """What a mover is told of ``storage``, a tensor of bytes."""
        torch.cuda.synchronize()  # it was made on another stream
        return Region(storage.data_ptr(), storage.numel(), 0)

    def up(self, array: npt.NDArray[Any]) -> Any:
        """A tensor of it in the device's memory; waits for no work."""
        with self.engine():
            return torch.from_numpy(array.copy()).pin_memory().to(self.where, non_blocking=True)

    def queue(self, kernel: Kernel) -> None:
        """Give the engine's stream a kernel (or, while capturing, the graph)."""
        with self.engine():
            kernel()

    @contextmanager
    def engine(self) -> Iterator[None]:
        """What is asked within is asked on the engine's thread."""
        with torch.cuda.stream(self.stream):
            yield

    def hold(self) -> None:
        """The engine's stream does nothing from now on, until ``let_go`` or for a second."""
        with self.engine():
            torch.cuda._sleep(HELD_CYCLES)

    def let_go(self) -> None:
        """Undo ``hold``, where that is possible: here it ends by itself."""

    def idle(self) -> bool:
        """Whether the engine's stream has done all it was given."""
        return bool(self.stream.query())

    def read(self, make: Callable[[], Any]) -> U8Array:
        """The tensor's bytes, made when the engine's stream has done all it was given."""
        with self.engine():
            read: U8Array = make().cpu().numpy()
        return read

    @contextmanager
    def capture(self) -> Iterator[Kernel]:
        """Kernels queued within become a graph, which it gives: a call replays it."""
        graph = torch.cuda.CUDAGraph()
        with self.engine():  # torch.cuda.graph would wait for our copies first
            graph.capture_begin(capture_error_mode="global")
            try:
                yield lambda: self.queue(graph.replay)
            finally:
                graph.capture_end()

    def check(self) -> None:
        """Movers are closed: nothing went wrong, and nothing is left."""
        torch.cuda.synchronize()


class HeldCuda(FakeCuda):
    """A fake whose engine's stream can be held, and captured into a graph."""

    held = False
    graph: list[Kernel] | None = None

    def order(self) -> Event | Fault:
        if self.graph is not None:
            return Fault("the engine's stream is being captured")
        return super().order()

    def _ready(self, op: Op) -> bool:
        ops = self.streams[COMPUTE]
        return super()._ready(op) and not (self.held and ops and ops[0] is op)


class Fake:
    """A fake of CUDA on the CPU's memory, hostile as ever."""

    where, real = "cpu", False

    def __init__(self) -> None:
        self.fake = HeldCuda(0, eager=400, watched=False)
        self.runtime: Runtime = self.fake

    def region(self, storage: Any) -> Region:
        return self.fake.adopt(storage.numpy())

    def up(self, array: npt.NDArray[Any]) -> Any:
        return torch.from_numpy(array.copy())

    def queue(self, kernel: Kernel) -> None:
        if self.fake.graph is not None:
            self.fake.graph.append(kernel)
        else:
            self.fake.queue(kernel)

    def engine(self) -> Any:
        return self.fake.engine_thread()

    def hold(self) -> None:
        self.fake.held = True

    def let_go(self) -> None:
        self.fake.held = False

    def idle(self) -> bool:
        return not self.fake.streams[COMPUTE]

    def read(self, make: Callable[[], Any]) -> U8Array:
        assert not self.fake.held, "whoever reads would wait for ever"
        while not self.idle():
            self.fake.step()
        read: U8Array = make().numpy().copy()
        return read

    @contextmanager
    def capture(self) -> Iterator[Kernel]:
        self.fake.graph = graph = list[Kernel]()

        def replay() -> None:
            for kernel in graph:
                self.fake.queue(kernel)

        try:
            yield replay
        finally:
            self.fake.graph = None

    def check(self) -> None:
        self.fake.run()
        assert self.fake.violations == []
        assert not self.fake.registered
        assert not self.fake.live_events


Device = Gpu | Fake


def has_gpu() -> bool:
    """Whether there is a device, and what the kernels need."""
    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


@cache
def _gpu() -> Gpu:
    return Gpu()


def open_device(name: str) -> Device:
    """``cuda``: the GPU, one for all; ``fake``: a new fake."""
    return _gpu() if name == "cuda" else Fake()


# ------------------------------------------------------------ runtimes with a flaw


class Flawed:
    """A runtime like another, but for what a subclass says."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class Hasty(Flawed):
    """The control of races: its copies wait for nothing. (Another thread's stream has no work.)"""

    def order(self) -> Event | Fault:
        with ThreadPoolExecutor(1) as other:
            return other.submit(self._runtime.order).result()


class Refusing(Flawed):
    """Cannot pin: the ``nth`` window that is asked for (from 0), or none at all."""

    def __init__(self, runtime: Runtime, nth: int | None = None) -> None:
        super().__init__(runtime)
        self._nth, self.asked = nth, 0

    def register(self, address: int, count: int) -> Fault | None:
        self.asked += 1
        if self._nth in (None, self.asked - 1):
            return Fault("refused by the test")
        return self._runtime.register(address, count)


class Counting(Flawed):
    """Notes how batches went."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.descriptors = np.zeros(0, np.int64)
        self.ways = set[str]()

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        self.descriptors = np.append(self.descriptors, len(batch.bytes))
        self.ways.add(batch.way)
        return self._runtime.copy(stream, batch)
