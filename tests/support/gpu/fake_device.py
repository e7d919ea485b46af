"""Memory and streams of a fake GPU (``fake_gpu``).

- Nothing happens when it is submitted. Streams are queues; each ``step`` does one piece of one of
  them, chosen by a seeded generator, so that every order CUDA allows occurs. Copies are torn: their
  runs are cut, and the pieces done in any order.
- Where a real device would silently move wrong bytes, it is noted in ``violations``.

``allocate`` makes device memory, ``map`` host memory whose unmapping is watched. ``kill`` ends the
context; queued work may go on for a while.
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
from typing import Any

import numpy as np

from kvass.transfer.base import U8Array
from kvass.transfer.batch import Region


@dataclass(eq=False)
class Piece:
    """A piece of a copy. ``read``: the bytes, if the source was already read."""

    target: int
    source: int
    count: int
    load: bool
    pinned: bool
    read: bytes | None = None
    run: tuple[int, int, int] = (0, 0, 0)
    told: Callable[[], tuple[int, ...]] | None = None
    """What a kernel's table says of ``run`` when it runs."""

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
    event: object


@dataclass(eq=False)
class Wait:
    event: object


@dataclass(eq=False)
class Kernel:
    work: Callable[[], None]


Op = Copy | Mark | Wait | Kernel


class FakeDevice:
    """See above. Unless ``watched``, any host memory may be used and unmapped."""

    def __init__(self, seed: int, watched: bool = True) -> None:
        self._watched = watched
        self.rng = random.Random(seed)
        self.violations: list[str] = []
        self.registered: dict[int, int] = {}
        self.streams: dict[object, deque[Op]] = {}
        self.compute: Any = None
        """The engine's stream."""
        self.dead = False
        self.byte_s = 0.0
        """Seconds that copying a byte takes."""
        self._next_s = 0.0
        self._events: dict[object, bool] = {}
        self._mapped: dict[int, int] = {}
        self._device_memory: list[tuple[int, int]] = []
        self._keep: list[object] = []
        self._lock = threading.RLock()

    # ------------------------------------------------------------ memory

    def allocate(self, count: int) -> tuple[Region, U8Array]:
        """Device memory, and an array over it."""
        memory = np.zeros(count, np.uint8)
        return self.adopt(memory), memory

    def adopt(self, memory: U8Array) -> Region:
        """Treat ``memory`` as device memory from now on."""
        self._keep.append(memory)
        self._device_memory.append((memory.ctypes.data, memory.nbytes))
        return Region(memory.ctypes.data, memory.nbytes)

    def map(self, count: int) -> U8Array:
        """An arena; its unmapping is noticed."""
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
        """Submit a kernel to the engine's stream."""
        with self._lock:
            self.streams[self.compute].append(Kernel(work))

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
        """Do one piece of work; False if none can be done."""
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
        """Do a piece of ``op``; whether it is finished."""
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
        if piece.told is not None and piece.told() != piece.run:
            self.violations.append("a kernel's table was overwritten while it ran")
        got = piece.read or ctypes.string_at(piece.source, piece.count)
        ctypes.memmove(piece.target, got, piece.count)
        self._next_s = monotonic() + self.byte_s * piece.count

    def kill(self, steps: int = 0) -> None:
        """The context dies after ``steps`` more pieces of work."""
        for _ in range(steps):
            self.step()
        self.dead = True

    def _window(self, address: int, count: int) -> int | None:
        """The address of the registration that contains all these bytes."""
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
