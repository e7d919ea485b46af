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
from kvass.transfer.batch import Batch, Region
from kvass.transfer.device import DeviceRuntime, Event, Fault, Operations, Stream
from kvass.transfer.torch_operations import TensorCopies, torch_pinning
from tests.support.gpu.fake_device import Op
from tests.support.gpu.fake_gpu import FakeGpu

Kernel = Callable[[], None]

HELD_CYCLES = 2_000_000_000
"""How long a real stream is held: about a second."""


class Gpu:
    """CUDA device 0, by torch, with vLLM's copy operation where vLLM is installed. The engine's
    stream is one of torch's own, as vLLM's is."""

    where, real = "cuda:0", True
    """``where``: as torch calls it."""

    def __init__(self) -> None:
        self._copies = TensorCopies(torch, ())
        operations = Operations(self._copies, None, *torch_pinning(self.where))
        if importlib.util.find_spec("vllm") is not None:
            from kvass.connectors.vllm.operations import vllm_operations

            operations = vllm_operations([torch.empty(1, device=self.where).untyped_storage()])
        self.runtime = DeviceRuntime(self.where, operations, torch)
        self.stream: Any = torch.cuda.Stream(0)

    def region(self, storage: Any) -> Region:
        """What a mover is told of ``storage``, a tensor of bytes."""
        torch.cuda.synchronize()  # it was made on another stream
        self._copies.add(storage.untyped_storage())
        return Region(storage.data_ptr(), storage.numel(), self.where)

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


class HeldGpu(FakeGpu):
    """A fake whose engine's stream can be held, and captured into a graph."""

    held = False
    graph: list[Kernel] | None = None

    def _ready(self, op: Op) -> bool:
        ops = self.streams[self.compute]
        return super()._ready(op) and not (self.held and ops and ops[0] is op)


class Fake:
    """A fake GPU on the CPU's memory, hostile as ever."""

    where, real = "cpu", False

    def __init__(self) -> None:
        self.fake = HeldGpu(0, eager=400, watched=False)
        self.runtime: DeviceRuntime = self.fake

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
        return not self.fake.streams[self.fake.compute]

    def read(self, make: Callable[[], Any]) -> U8Array:
        assert not self.fake.held, "whoever reads would wait for ever"
        while not self.idle():
            self.fake.step()
        read: U8Array = make().numpy().copy()
        return read

    @contextmanager
    def capture(self) -> Iterator[Kernel]:
        self.fake.graph = graph = list[Kernel]()
        self.fake.compute.capturing = True

        def replay() -> None:
            for kernel in graph:
                self.fake.queue(kernel)

        try:
            yield replay
        finally:
            self.fake.graph = None
            self.fake.compute.capturing = False

    def check(self) -> None:
        self.fake.run()
        assert self.fake.violations == []
        assert not self.fake.registered


Device = Gpu | Fake


def has_gpu() -> bool:
    """Whether there is a device."""
    return bool(torch.cuda.is_available())


@cache
def _gpu() -> Gpu:
    return Gpu()


def open_device(name: str) -> Device:
    """``cuda``: the GPU, one for all; ``fake``: a new fake."""
    return _gpu() if name == "cuda" else Fake()


# ------------------------------------------------------------ runtimes with a flaw


class Flawed:
    """A runtime like another, but for what a subclass says."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class Hasty(Flawed):
    """The control of races: its copies wait for nothing. (Another thread's stream has no work.)"""

    def order(self) -> Event | Fault:
        with ThreadPoolExecutor(1) as other:
            event: Event | Fault = other.submit(self._runtime.order).result()
        return event


class Refusing(Flawed):
    """Cannot pin: the ``nth`` window that is asked for (from 0), or none at all."""

    def __init__(self, runtime: Any, nth: int | None = None) -> None:
        super().__init__(runtime)
        self._nth, self.asked = nth, 0

    def register(self, address: int, count: int) -> Fault | None:
        self.asked += 1
        if self._nth in (None, self.asked - 1):
            return Fault("refused by the test")
        fault: Fault | None = self._runtime.register(address, count)
        return fault


class Counting(Flawed):
    """Notes how batches went."""

    def __init__(self, runtime: Any) -> None:
        super().__init__(runtime)
        self.descriptors = np.zeros(0, np.int64)
        self.ways = set[str]()

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        self.descriptors = np.append(self.descriptors, len(batch.bytes))
        self.ways.add(batch.way)
        fault: Fault | None = self._runtime.copy(stream, batch)
        return fault
