"""A fake CUDA ``Runtime`` on memory of the CPU: the worst behaviour that CUDA allows.

- Work happens later, in pieces and in any order (``fake_device``). The source of a load may already
  be read when it is submitted.
- What CUDA forbids is refused (a :class:`Fault`). Where CUDA would silently move wrong bytes, it is
  noted in ``violations``.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from kvass.transfer.cuda_copies import TABLE_SHAPE, Tables
from kvass.transfer.runtime import Batch, Event, Fault, Kind, Runtime, Stream
from kvass.types import I64Array
from tests.support.gpu.fake_device import COMPUTE, Copy, FakeDevice, Mark, Piece, Wait, holds, meet

DEAD = Fault("unspecified launch failure", dead=True)
PIECES = 3


@dataclass(eq=False)
class Plans:
    """Planned failures: by a call's name, which calls of it fail, counted from 0."""

    fail: dict[str, set[int]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def fails(self, name: str) -> bool:
        n = self.calls.get(name, 0)
        self.calls[name] = n + 1
        return n in self.fail.get(name, ())


class FakeCuda(FakeDevice, Runtime):
    """See above. ``eager``: each ``done`` lets the device do up to so many pieces of work."""

    def __init__(self, seed: int, eager: int = 4, watched: bool = True) -> None:
        super().__init__(seed, watched)
        self.plans = Plans()
        self.copied: list[Batch] = []
        self.tables = Tables(np.zeros((3, TABLE_SHAPE[1]), np.int64))
        self.stopped = False
        """The device hangs: nothing happens by itself."""
        self._eager = eager
        self._forgotten = set[Event]()
        self._numbers = iter(range(100, 1 << 60))
        self._engine = threading.local()

    # ------------------------------------------------------------ Runtime

    @contextmanager
    def engine_thread(self) -> Iterator[None]:
        """Calls within this context count as the engine thread's."""
        was, self._engine.here = self._on_engine, True
        try:
            yield
        finally:
            self._engine.here = was

    @property
    def _on_engine(self) -> bool:
        return getattr(self._engine, "here", False)

    def order(self) -> Event | Fault:
        event = self._mark(COMPUTE, "order")
        if not isinstance(event, Fault) and not self._on_engine:
            with self._lock:  # another thread has another current stream, without work
                self.streams[COMPUTE].pop()
                self._events[event] = True
        return event

    def mark(self, stream: Stream) -> Event | Fault:
        self._copy_thread("mark")
        return self._mark(stream, "mark")

    def open_stream(self, kind: Kind) -> Stream | Fault:
        self._copy_thread("open_stream")
        if fault := self._fault("open_stream"):
            return fault
        stream = Stream(next(self._numbers))
        self.streams[stream] = deque()
        return stream

    def close_stream(self, stream: Stream) -> None:
        self._copy_thread("close_stream")
        if self.streams.pop(stream):
            self.violations.append("a stream was closed with work in it")

    def wait(self, stream: Stream, event: Event) -> Fault | None:
        self._copy_thread("wait")
        self._known(event)
        if fault := self._fault("wait"):
            return fault
        with self._lock:
            self.streams[stream].append(Wait(event))
        return None

    def done(self, event: Event) -> bool | Fault:
        self._copy_thread("done")
        self._known(event)
        if fault := self._fault("done"):
            return fault
        with self._lock:
            for _ in range(0 if self.stopped else self.rng.randint(0, self._eager)):
                self.step()
            return self._events[event]

    def idle(self, stream: Stream) -> bool | Fault:
        self._copy_thread("idle")
        if fault := self._fault("idle"):
            return fault
        with self._lock:
            for _ in range(0 if self.stopped else self.rng.randint(0, self._eager)):
                self.step()
            return not self.streams[stream]

    def forget(self, event: Event) -> None:
        self._known(event)
        self._forgotten.add(event)
        if not self.dead:
            self._fault("forget")

    @property
    def live_events(self) -> int:
        """Events that were not forgotten."""
        return len(self._events) - len(self._forgotten)

    def register(self, address: int, count: int) -> Fault | None:
        self._copy_thread("register")
        if fault := self._fault("register"):
            return fault
        with self._lock:
            if any(meet(at, n, address, count) for at, n in self.registered.items()):
                return Fault("part of the memory is registered already")
            if self._watched and not any(
                holds(at, n, address, count) for at, n in self._mapped.items()
            ):
                return Fault("no such memory")
            self.registered[address] = count
        return None

    def unregister(self, address: int) -> Fault | None:
        self._copy_thread("unregister")
        if fault := self._fault("unregister"):
            return fault
        with self._lock:
            if address not in self.registered:
                return Fault("not registered")
            if self.busy(address, self.registered[address]):
                self.violations.append("host memory was unregistered under a copy")
            del self.registered[address]
        return None

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        self._copy_thread("copy")
        if fault := self._refusal(stream, batch):
            return fault
        pieces = [
            piece
            for run, told in zip(self._runs(batch), self._told(batch), strict=True)
            for piece in self._cut(*run, batch, told)
        ]
        fault = self._fault("copy")
        if fault is not None and self.rng.random() < 0.7:  # a part was submitted all the same
            pieces = pieces[: self.rng.randint(0, len(pieces))]
        elif fault is not None:
            pieces = []
        with self._lock:
            self._would_keep(stream, batch)
            self.streams[stream].append(Copy(pieces, len(batch.bytes)))
            self.copied.append(batch)
        return fault

    # ------------------------------------------------------------ inner

    def _refusal(self, stream: Stream, batch: Batch) -> Fault | None:
        if stream not in self.streams or stream == COMPUTE:
            return Fault("not a stream of yours")
        if not 0 < len(batch.bytes) <= self.batch_runs:
            return Fault(f"{len(batch.bytes)} descriptors")
        if not batch.bytes.all():
            return Fault("an empty run")
        for target, source, count in self._runs(batch):
            host, device = (source, target) if batch.kind == "load" else (target, source)
            if not any(holds(at, n, device, count) for at, n in self._device):
                return Fault("not an address of this device")
            if batch.way != "pageable" and self._window(host, count) is None:
                return Fault("host memory that is not registered, or in two pieces")
            if batch.way == "kernel" and (target | source | count) % 8:
                return Fault("misaligned address")
        return None

    def _would_keep(self, stream: Stream, batch: Batch) -> None:
        """Note a batch for which the driver would block its caller, with locks held, until earlier
        work is done. A single batch never blocks, whatever its size."""
        ops = self.streams[stream]
        flying = [op.runs for op in ops if isinstance(op, Copy)]
        if flying and sum(flying) + len(batch.bytes) > 2 * self.batch_runs:
            self.violations.append("too many descriptors were given to a stream at once")
        waits = any(not self._ready(op) for op in ops)
        if waits and batch.way == "pageable":
            self.violations.append("a call that may block was made while its stream waits")

    def _runs(self, batch: Batch) -> Iterator[tuple[int, int, int]]:
        """``(target, source, bytes)`` of each."""
        return zip(batch.target.tolist(), batch.source.tolist(), batch.bytes.tolist(), strict=True)

    def _told(self, batch: Batch) -> Sequence[I64Array | None]:
        """The table row of each run, if a kernel copies it and a table is free."""
        table = self.tables.take(batch) if batch.way == "kernel" else None
        if table is None:
            return [None] * len(batch.bytes)
        batch.keep.append(table)
        return list(table.rows.T)

    def _cut(
        self, target: int, source: int, count: int, batch: Batch, told: I64Array | None
    ) -> Iterator[Piece]:
        run = (0, 0, 0) if told is None else (int(told[0]), int(told[1]), int(told[2]))
        cuts = sorted({0, count, *(self.rng.randrange(count) for _ in range(PIECES - 1))})
        load = batch.kind == "load"
        for lo, hi in pairwise(cuts):
            pinned = batch.way != "pageable"
            piece = Piece(target + lo, source + lo, hi - lo, load, pinned, None, run, told)
            if load and self.rng.random() < 0.3:
                piece.read = ctypes.string_at(piece.source, piece.count)
            yield piece

    def _mark(self, stream: Stream, name: str) -> Event | Fault:
        if fault := self._fault(name):
            return fault
        event = Event(next(self._numbers))
        with self._lock:
            self._events[event] = False
            self.streams[stream].append(Mark(event))
        return event

    def _known(self, event: Event) -> None:
        if event not in self._events or event in self._forgotten:
            self.violations.append(f"event {event} is not, or not any more")

    def _fault(self, name: str) -> Fault | None:
        if self.dead:
            return DEAD
        if self.plans.fails(f"{name} raises"):
            raise RuntimeError(f"{name} raises, as planned")
        return Fault(f"{name} failed, as planned") if self.plans.fails(name) else None

    def _copy_thread(self, name: str) -> None:
        if self._on_engine:
            self.violations.append(f"{name} on the engine's thread")
