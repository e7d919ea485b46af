"""Batches of copies between the arena and the memory of a device, as the mover makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kvass.transfer.base import Kind as Kind
from kvass.types import I64Array
from kvass.types import U64Array as U64Array

Way = Literal["dma", "kernel", "staged", "pageable"]
"""How a batch is copied. ``dma``: by copy engines, with registered host memory. ``kernel``: by a
kernel that reads registered host memory. ``staged``: by a kernel between the pages and a buffer on
the device, and by copy engines between that and registered host memory. ``pageable``: with host
memory that is not registered; the call may block."""

MAX_DESCRIPTORS: Final = 4096
"""The most copies of one batch. With more, the driver's cost per copy rises; ROCm takes 8,192."""
FEWEST_STAGED: Final = 16
"""Fewer copies are not staged: vLLM's kernel leaves them to copy engines (``MIN_N``)."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A byte range of device memory, and torch's name of the device."""

    address: int
    bytes: int
    device: str = "cuda:0"


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A buffer in device memory that batches pass through. All of them are copied on one stream, so
    that each finds the one before it gone. ``owner`` keeps the memory."""

    address: int
    bytes: int
    owner: object = None


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Runs that on average are shorter than ``below`` go through ``stages``, which are alike. Each
    stage belongs to a stream: while one is filled, another is emptied."""

    below: int
    stages: tuple[Stage, ...]


Stagings = Mapping[Kind, Staging]
"""By kind of job. A kind that is not there has no stages."""


@dataclass(slots=True, eq=False)
class Batch:
    """Copies of ``bytes[i]`` bytes from ``source[i]`` to ``target[i]``, ``total`` bytes in all.

    ``firsts``, only of a ``staged`` batch: the copies that begin a piece of host memory, which ends
    where the next one begins. Such a batch passes through ``stage``, that of its stream. ``keep``
    holds what the device reads meanwhile; the mover clears it when the batch is over.
    """

    kind: Kind
    way: Way
    target: U64Array
    source: U64Array
    bytes: U64Array
    total: int
    firsts: I64Array | None = None
    stage: Stage | None = None
    keep: list[object] = field(default_factory=list)
