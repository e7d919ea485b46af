"""A fake GPU whose work takes time by a model, for what is chosen by speed.

The model is of one H200 (docs/benchmarks.md, docs/decisions/016): one pinned copy, the driver's
batches and the kernel that reads host memory are as measured there, with the mover's thread. How
fast the kernel copies on the device alone was never measured: ``DEVICE_BYTES_S`` is a guess, twelve
programs that wait for memory. Each direction has one copy engine. Kernels of different streams run
side by side, because each takes a tenth of the device. Nothing waits for the engine's own work.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any, Final, NamedTuple

from kvass.transfer.device import DeviceRuntime, Event, Fault
from tests.support.gpu.fake_gpu import FakeGpu

COPY_BYTES_S: Final = 54e9
COPY_S: Final = 0.25e-6
"""A run, for a copy engine."""
GIVEN_S: Final = 0.9e-6
"""A run of the driver's batch, for the thread that gives it."""
CALL_S: Final = 20e-6
"""A batch, for that thread."""
HOST_BYTES_S: Final = 37e9
HOST_S: Final = 0.12e-6
"""A run, for a kernel that reads host memory."""
DEVICE_BYTES_S: Final = 100e9


class Work(NamedTuple):
    """What ``stream`` has ``engine`` do for ``seconds``, not before ``ready_s``."""

    stream: object
    engine: object
    ready_s: float
    seconds: float


class TimedGpu(FakeGpu):
    """See above."""

    kernel_tables = DeviceRuntime.kernel_tables
    pieces = 1

    def __init__(self, seed: int = 1, device_bytes_s: float = DEVICE_BYTES_S) -> None:
        super().__init__(seed, eager=4000, watched=False)
        self._device_bytes_s = device_bytes_s
        self._began_s = self._thread_s = 0.0
        self._orders: list[Work] = []
        """Since a job began."""
        self.runs: Counter[str] = Counter()
        """How many copies each engine was given."""

    def clock(self) -> float:
        """When all is over that was given so far. Whose turn it is on an engine is decided as on a
        device: who is ready first."""
        queues: dict[object, deque[Work]] = {}
        for work in list(self._orders):
            queues.setdefault(work.stream, deque()).append(work)
        free_s = defaultdict[object, float](float)

        def begin_s(stream: object) -> float:
            work = queues[stream][0]
            return max(work.ready_s, free_s[stream], free_s[work.engine])

        while queues:
            stream = min(queues, key=begin_s)
            end_s, work = begin_s(stream), queues[stream].popleft()
            free_s[stream] = free_s[work.engine] = end_s + work.seconds
            if not queues[stream]:
                del queues[stream]
        return max([self._began_s, *free_s.values()])

    def order(self) -> Event | Fault:
        """A job begins when what was before is over."""
        self._began_s = self._thread_s = self.clock()
        self._orders.clear()
        return super().order()

    def _swap(self, sources: Any, targets: Any, sizes: Any, any_order: bool) -> None:
        super()._swap(sources, targets, sizes, any_order)
        number, total = len(sizes), int(sizes.numpy().sum())
        engine = "in" if self._is_device(int(targets.numpy()[0]), 1) else "out"
        self._take(engine, number, GIVEN_S * number, COPY_S * number + total / COPY_BYTES_S)

    def _kernel(self, sources: Any, targets: Any, sizes: Any, any_order: bool) -> None:
        super()._kernel(sources, targets, sizes, any_order)
        number, total = len(sizes), int(sizes.numpy().sum())
        if self._is_device(int(sources.numpy()[0]), 1):
            self._take("kernel", number, 0, total / self._device_bytes_s)
        else:
            self._take("kernel", number, 0, HOST_S * number + total / HOST_BYTES_S)

    def _take(self, engine: str, number: int, giving_s: float, copying_s: float) -> None:
        self.runs[engine] += number
        self._thread_s += CALL_S + giving_s
        stream = self.current[-1]
        on = stream if engine == "kernel" else engine
        self._orders.append(Work(stream, on, self._thread_s, copying_s))
