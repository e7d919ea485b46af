"""The memory and the streams of a GPU that is as unkind as CUDA allows (``fake_cuda``).

Laws of this file:

- Nothing happens when it is asked for. Streams are queues; each ``step`` does one piece of one of
  them, chosen by a seeded generator, so that any order CUDA allows occurs. A copy tears: its runs
  are cut and done in any order.
- What moves wrong bytes while a real device would say nothing is noted in ``violations``.

"Device memory" is made by ``allocate``, host memory whose unmapping is watched by ``map``. ``kill``
makes the context dead; what was queued goes on happening for a while, or not.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import numpy as np

from kvass.transfer.base import U8Array
from kvass.transfer.runtime import Event, Region, Stream
from kvass.types import I64Array

COMPUTE = Stream(7)
"""The engine's stream."""


@dataclass(eq=False)
class Piece:
    """A part of a copy. ``read``: the bytes, if the source was read already."""

    target: int
    source: int
    count: int
    load: bool
    pinned: bool
    read: bytes | None = None
    run: tuple[int, int, int] = (0, 0, 0)
    told: I64Array | None = None
    """Where a kernel reads ``run``, when it comes to it."""

    @property
    def host(self) -> int:
        return self.source if self.load else self.target

    def touches(self, lo: int, hi: int) -> bool:
        return any(at < hi and lo < at + self.count for at in (self.target, self.source))


@dataclass(eq=False)
class Copy:
    pieces: list[Piece]
    runs: int


@dataclass(eq=False)
class Mark:
    event: Event


@dataclass(eq=False)
class Wait:
    event: Event


@dataclass(eq=False)
class Kernel:
    work: Callable[[], None]


Op = Copy | Mark | Wait | Kernel


class FakeDevice:
    """See above. Unless ``watched``, host memory may be any, and its unmapping goes unnoticed."""

    def __init__(self, seed: int, watched: bool = True) -> None:
        self._watched = watched
        self.rng = random.Random(seed)
        self.violations: list[str] = []
        self.registered: dict[int, int] = {}
        self.streams: dict[Stream, deque[Op]] = {COMPUTE: deque()}
        self.dead = False
        self.byte_s = 0.0
        """For so long after it has copied a byte the device copies no other."""
        self._next_s = 0.0
        self._events: dict[Event, bool] = {}
        self._mapped: dict[int, int] = {}
        self._device: list[tuple[int, int]] = []
        self._keep: list[object] = []
        self._lock = threading.RLock()

    # ------------------------------------------------------------ memory

    def allocate(self, count: int) -> tuple[Region, U8Array]:
        """Device memory, and how to look at it."""
        memory = np.zeros(count, np.uint8)
        return self.adopt(memory), memory

    def adopt(self, memory: U8Array) -> Region:
        """Memory that is the device's from now on."""
        self._keep.append(memory)
        self._device.append((memory.ctypes.data, memory.nbytes))
        return Region(memory.ctypes.data, memory.nbytes)

    def map(self, count: int) -> U8Array:
        """An arena: its unmapping is noticed."""
        backing = _Mapping(-1, count)
        array = np.frombuffer(backing, np.uint8)
        address = array.ctypes.data
        self._mapped[address] = count
        weakref.finalize(backing, self._unmapped, address, count)
        return array

    @property
    def mapped(self) -> int:
        """How many arenas are mapped."""
        return len(self._mapped)

    def _unmapped(self, address: int, count: int) -> None:
        with self._lock:
            self._mapped.pop(address, None)
            pinned = any(meet(at, n, address, count) for at, n in self.registered.items())
            if pinned and not self.dead:
                self.violations.append("an arena was unmapped while registered")
            if self.busy(address, count):
                self.violations.append("an arena was unmapped under a copy")
                for ops in self.streams.values():
                    ops.clear()

    # ------------------------------------------------------------ the device

    def queue(self, work: Callable[[], None]) -> None:
        """Give the engine's stream a kernel."""
        with self._lock:
            self.streams[COMPUTE].append(Kernel(work))

    def busy(self, address: int, count: int) -> bool:
        """Whether a copy may still touch these bytes."""
        with self._lock:
            return any(
                piece.touches(address, address + count)
                for ops in self.streams.values()
                for op in ops
                if isinstance(op, Copy)
                for piece in op.pieces
            )

    def step(self) -> bool:
        """Do one piece of work; False if there is none that can be done."""
        with self._lock:
            while True:
                ready = [s for s, ops in self.streams.items() if ops and self._ready(ops[0])]
                if not ready:
                    return False
                ops = self.streams[self.rng.choice(ready)]
                if self._do(ops[0]):
                    ops.popleft()
                return True

    def run(self) -> None:
        """Do all the work that can be done."""
        while self.step():
            pass

    def _ready(self, op: Op) -> bool:
        if isinstance(op, Copy) and op.pieces:
            return not self.byte_s or monotonic() >= self._next_s
        return not isinstance(op, Wait) or self._events.get(op.event, True)

    def _do(self, op: Op) -> bool:
        """A piece of ``op``; whether it is over."""
        if isinstance(op, Mark):
            self._events[op.event] = True
        elif isinstance(op, Kernel):
            op.work()
        elif isinstance(op, Copy):
            if op.pieces:
                self._move(op.pieces.pop(self.rng.randrange(len(op.pieces))))
            return not op.pieces
        return True

    def _move(self, piece: Piece) -> None:
        if piece.pinned and self._window(piece.host, piece.count) is None:
            self.violations.append("host memory was unregistered under a copy")
            return
        if piece.told is not None and tuple(piece.told.tolist()) != piece.run:
            self.violations.append("a kernel's table was written anew while it ran")
        got = piece.read or ctypes.string_at(piece.source, piece.count)
        ctypes.memmove(piece.target, got, piece.count)
        self._next_s = monotonic() + self.byte_s * piece.count

    def kill(self, steps: int = 0) -> None:
        """The context dies after ``steps`` more pieces of work."""
        for _ in range(steps):
            self.step()
        self.dead = True

    def _window(self, address: int, count: int) -> int | None:
        """The registration in which these bytes lie, all of them."""
        for at, n in self.registered.items():
            if holds(at, n, address, count):
                return at
        return None


class _Mapping(mmap.mmap):
    """A mapping that can be watched."""


def meet(at: int, n: int, other: int, m: int) -> bool:
    return at < other + m and other < at + n


def holds(at: int, n: int, other: int, m: int) -> bool:
    return at <= other and other + m <= at + n
