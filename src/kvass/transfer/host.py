"""The mover for KV pages in host memory: numpy on one background thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Done, Job, Mover, U8Array


class HostMover(Mover):
    """Copies between ``regions`` (uint8 arrays of shape ``(bytes,)``) and arena slots.

    ``groups`` describe the planes inside the regions; a job's plans name them by ``group`` id. The
    thread starts with the first job. Raises UsageError if a plane leaves its region.
    """

    def __init__(
        self,
        regions: Sequence[U8Array],
        groups: Sequence[GroupPlanes],
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        raise NotImplementedError

    def submit(self, job: Job) -> None:
        raise NotImplementedError

    def poll(self) -> list[Done]:
        raise NotImplementedError

    def drain(self, timeout_s: float) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
