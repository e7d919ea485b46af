"""Batches of copies between the arena and the memory of a device, as the mover makes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from kvass.transfer.base import Kind as Kind
from kvass.types import U64Array as U64Array

Way = Literal["dma", "kernel", "pageable"]
"""How a batch is copied. ``dma``: by copy engines, with registered host memory. ``kernel``: by a
kernel that reads registered host memory. ``pageable``: with host memory that is not registered; the
call may block."""

MAX_DESCRIPTORS: Final = 4096
"""The most copies of one batch. With more, the driver's cost per copy rises; ROCm takes 8,192."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A byte range of device memory, and torch's name of the device."""

    address: int
    bytes: int
    device: str = "cuda:0"


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
