"""The calls to a GPU that the GPU mover needs. ``cuda_runtime.py`` makes them; tests have a fake
GPU.

Handles and addresses are integers. Errors are values (:class:`Fault`), and no error is left for the
engine's next call to find. No call waits for work on the device, except ``pageable`` copies.

The order is that of CUDA. Work on one stream happens in its order, work on different streams in any
order. Copies of one batch happen in any order, and in parts. An event marks a place in a stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NewType, Protocol

from kvass.transfer.base import Kind as Kind
from kvass.types import U64Array as U64Array

Stream = NewType("Stream", int)
Event = NewType("Event", int)

Way = Literal["dma", "kernel", "pageable"]
"""How a batch is copied. ``dma``: by copy engines, with registered host memory. ``kernel``: by a
kernel that reads or writes registered host memory. ``pageable``: with host memory that is not
registered; the call may block."""

MAX_DESCRIPTORS: Final = 4096
"""The most copies of one batch. With more, the driver's cost per copy rises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error of the device. ``dead``: its context is unusable. Whether earlier calls had their
    effect is not known, and later ones may have none."""

    text: str
    dead: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A byte range of device memory, and the device it is on."""

    address: int
    bytes: int
    device: int = 0


@dataclass(slots=True, eq=False)
class Batch:
    """Copies of ``bytes[i]`` bytes from ``source[i]`` to ``target[i]``, ``total`` bytes in all.

    ``keep`` holds what the device reads meanwhile; the mover clears it when the batch is over.
    """

    kind: Kind
    way: Way
    target: U64Array
    source: U64Array
    bytes: U64Array
    total: int
    keep: list[object] = field(default_factory=list)


class Runtime(Protocol):
    """One device, as one process uses it. Any thread may call it.

    ``batch_runs``: the most copies of a batch. Two such batches may be in flight on a stream. With
    more, the driver may block the caller until the engine's work is done.
    """

    batch_runs: int = MAX_DESCRIPTORS

    def order(self) -> Event | Fault:
        """A new event after all work that is queued on the calling thread's compute stream."""

    def open_stream(self, kind: Kind) -> Stream | Fault:
        """A new stream for copies of ``kind``. Kernels of loads have a higher priority than the
        engine's."""

    def close_stream(self, stream: Stream) -> Fault | None:
        """Destroy the stream. No work runs on it."""

    def wait(self, stream: Stream, event: Event) -> Fault | None:
        """Let all later work of ``stream`` happen after ``event``."""

    def mark(self, stream: Stream) -> Event | Fault:
        """A new event after all work that is queued on ``stream``."""

    def done(self, event: Event) -> bool | Fault:
        """Whether ``event`` was reached: the work before it is done, and its result is visible to
        all."""

    def idle(self, stream: Stream) -> bool | Fault:
        """Whether all work of ``stream`` is done, and its result is visible to all."""

    def forget(self, event: Event) -> Fault | None:
        """Destroy the event. Streams that wait for it go on waiting."""

    def register(self, address: int, count: int) -> Fault | None:
        """Pin ``count`` bytes of host memory, which the device then knows by the same address."""

    def unregister(self, address: int) -> Fault | None:
        """Undo ``register``. No copy may be using the memory."""

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        """Queue a batch of at most ``batch_runs`` copies on ``stream``.

        Each copy lies in one registration (except ``pageable``). The source of a ``load`` may be
        read from now on, even if the stream still waits. After a fault any part of the batch may
        have been queued.
        """
