"""What the GPU mover needs of a GPU: ``cuda_runtime.py`` has it; tests have a hostile fake.

Handles and addresses are integers. Errors are values (:class:`Fault`), and none is left behind for
the engine's next call to find. No call waits for work on the device, except ``pageable`` copies.

Order is CUDA's: work on one stream happens one after the other, streams among themselves in any
order, copies of one batch in any order and in parts. An event marks a place in a stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, NewType, Protocol

from kvass.transfer.base import Kind as Kind
from kvass.types import U64Array as U64Array

Stream = NewType("Stream", int)
Event = NewType("Event", int)

Way = Literal["dma", "kernel", "pageable"]
"""``dma``: copy engines, host memory registered. ``kernel``: a kernel reads or writes registered
host memory. ``pageable``: host memory that is not registered; may block."""

MAX_DESCRIPTORS: Final = 4096
"""Of one batch: beyond, the driver's own cost per descriptor rises."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error. ``dead``: the context is unusable. Nothing asked of it from now on is known to
    happen, and what was asked before may or may not have."""

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
    """One device, from one process. Used by any thread.

    ``batch_runs``: the most copies of a batch. Two such batches may be in flight on a stream: given
    more, the driver may block the caller until the engine's work is done.
    """

    batch_runs: int = MAX_DESCRIPTORS

    def order(self) -> Event | Fault:
        """A new event after all that the calling thread's compute stream was given so far."""

    def open_stream(self, kind: Kind) -> Stream | Fault:
        """A new stream for copies of ``kind``. The kernel of loads goes before the engine's."""

    def close_stream(self, stream: Stream) -> Fault | None:
        """Give the stream back; nothing runs on it."""

    def wait(self, stream: Stream, event: Event) -> Fault | None:
        """What is given to ``stream`` from now on happens after ``event``."""

    def mark(self, stream: Stream) -> Event | Fault:
        """A new event after all that ``stream`` was given so far."""

    def done(self, event: Event) -> bool | Fault:
        """Whether ``event`` was reached: what lies before it has happened, for all to see."""

    def idle(self, stream: Stream) -> bool | Fault:
        """Whether all that ``stream`` was given has happened, for all to see."""

    def forget(self, event: Event) -> Fault | None:
        """Destroy the event. Waits that were asked for keep their meaning."""

    def register(self, address: int, count: int) -> Fault | None:
        """Pin ``count`` bytes of host memory, which the device then knows by the same address."""

    def unregister(self, address: int) -> Fault | None:
        """Undo ``register``. No copy may be using the memory."""

    def copy(self, stream: Stream, batch: Batch) -> Fault | None:
        """Give ``stream`` a batch of at most ``batch_runs`` copies.

        Each lies in one registration (but for ``pageable``). The source of a ``load`` may be read
        from now on, whatever the stream waits for. After a fault any part may have been given.
        """
