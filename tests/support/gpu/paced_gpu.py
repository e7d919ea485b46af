"""A GPU that moves nothing, in the time that an H200 takes (``timed_gpu``): what the host's threads
cost beside it can be measured.

Giving it a batch lets go of the GIL for as long as the driver takes, as a call of torch's
operations does. Nothing else of it does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvass.layout.describe import GroupPlanes
from kvass.transfer.batch import Batch, Kind, Region, Stagings
from kvass.transfer.device import DeviceRuntime, Event, Operations, Stream
from tests.support.gpu.timed_gpu import CALL_S, COPY_BYTES_S, COPY_S, GIVEN_S


@dataclass
class _Stream:
    """``free_s``: when all that it was given is over."""

    free_s: float = 0.0


class PacedGpu(DeviceRuntime):
    """See above. ``calls``: how many batches it was given."""

    def __init__(self) -> None:
        super().__init__("fake:0", Operations(_never), None)
        self.calls = 0

    def enter_thread(self) -> None:
        """There is one device."""

    def order(self) -> Event:
        return Event(0.0)

    def open_stream(self, kind: Kind) -> Stream:
        return Stream(_Stream())

    def wait(self, stream: Stream, event: Event) -> None:
        """Nothing of the engine's runs."""

    def mark(self, stream: Stream) -> Event:
        return Event(_of(stream).free_s)

    def done(self, event: Event) -> bool:
        at: Any = event
        return bool(time.monotonic() >= at)

    def idle(self, stream: Stream) -> bool:
        return time.monotonic() >= _of(stream).free_s

    def register(self, address: int, count: int) -> None:
        """All memory is pinned."""

    def unregister(self, address: int) -> None:
        """Nor is this any work."""

    def copy(self, stream: Stream, batch: Batch) -> None:
        self.calls += 1
        number = len(batch.bytes)
        time.sleep(CALL_S + GIVEN_S * number)
        one = _of(stream)
        copying_s = COPY_S * number + batch.total / COPY_BYTES_S
        one.free_s = max(one.free_s, time.monotonic()) + copying_s


class PacedDevice:
    """Of ``bench.gpu.device.Device`` what ``measure_gil`` uses."""

    def __init__(self) -> None:
        self.runtime = PacedGpu()

    def need(self, count: int) -> None:
        assert count > 0

    def allocate(self, count: int) -> Region:
        return Region(1 << 40, count, "fake:0")

    def free(self, region: Region) -> None:
        """It has no memory."""

    def stagings(self, region: Region, planes: Sequence[GroupPlanes]) -> Stagings:
        return {}


def _of(stream: Stream) -> _Stream:
    assert isinstance(stream, _Stream)
    return stream


def _never(*_: object) -> None:
    raise AssertionError("it copies nothing")
