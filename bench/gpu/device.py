"""The interface to a GPU that the measurements use, so that tests can run them on a fake one.

Nothing here imports torch; ``torch_device`` has the real device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import U8Array
from kvass.transfer.batch import Kind, Region, Stagings
from kvass.transfer.device import DeviceRuntime
from kvass.types import I64Array

Table = Sequence[I64Array]
"""Of each group, in the order of its planes: block ids of shape ``(rows, chunk_blocks)``."""


class Plain(Protocol):
    """What a mover is measured against: pinned memory that the device's library allocated, and
    device memory of the same size."""

    def move(self, *kinds: Kind) -> None:
        """One contiguous copy of all bytes for each of ``kinds``, at once; done on return."""
        ...


class Device(Protocol):
    """One GPU. Unless something else is said, a call returns when the device has done it."""

    runtime: DeviceRuntime

    def facts(self) -> dict[str, str]:
        """What it is, by the figures' names."""
        ...

    def need(self, count: int) -> None:
        """Raise ConfigError unless so many bytes are free."""
        ...

    def allocate(self, count: int) -> Region:
        """Device memory."""
        ...

    def free(self, region: Region) -> None:
        """Free what ``allocate`` gave."""
        ...

    def fill(self, region: Region, seed: int) -> None:
        """Random bytes, others for another ``seed``."""
        ...

    def read(self, region: Region) -> U8Array:
        """A copy of it in host memory."""
        ...

    def clear(self, region: Region, planes: Sequence[GroupPlanes], table: Table) -> None:
        """Zero the pages of a block table."""
        ...

    def same(
        self, region: Region, planes: Sequence[GroupPlanes], left: Table, right: Table
    ) -> bool:
        """Whether the pages of two block tables are equal, byte for byte."""
        ...

    def stagings(self, region: Region, planes: Sequence[GroupPlanes]) -> Stagings:
        """The stages that an engine with these pages would choose."""
        ...

    def kernel_s(self, sources: I64Array, targets: I64Array, sizes: I64Array) -> float | None:
        """How many seconds the engine's kernel takes to copy on the device; None: it has none."""
        ...

    def host_kernel_s(
        self, sources: I64Array, offsets: I64Array, sizes: I64Array, total: int
    ) -> float | None:
        """The same, into ``total`` bytes of pinned memory of the host."""
        ...

    def index_select_s(self, region: Region, group: GroupPlanes, ids: I64Array) -> float:
        """How many seconds ``torch.index_select`` takes to gather these blocks, layer by layer."""
        ...

    def plain(self, count: int) -> Plain:
        """The counterpart for ``count`` bytes."""
        ...

    def compute(self, products: int) -> float:
        """Multiply large bf16 matrices so many times, on a stream that nothing else is on; how many
        seconds the device took."""
        ...
