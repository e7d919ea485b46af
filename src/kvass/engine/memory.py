"""The KV pages of a rank as bytes, and the choice of the mover that copies them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvass.errors import UsageError
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Mover, U8Array
from kvass.transfer.batch import Region
from kvass.transfer.device import MissingError
from kvass.transfer.device_mover import NO_STAGES, DeviceMover
from kvass.transfer.host import HostMover
from kvass.transfer.open_device import (
    FindOperations,
    TorchScratch,
    no_operations,
    open_device,
    open_untested,
)
from kvass.transfer.self_check import NO_PINS
from kvass.transfer.staging import choose_stagings
from kvass.types import RankLayout

Values = tuple[str, int, int]
"""Values in a page: the name of their torch dtype, their first byte and their number of bytes. The
other bytes of a page are padding."""


@dataclass(frozen=True)
class KVMemory:
    """The KV pages of one rank as bytes. They are in ``regions`` of host memory, or in ``gpu``
    memory, which code on the host must not access. ``owners`` keep the memory alive.
    ``values[g][p]``: the values in a page of plane ``p`` of group ``g``; empty if not known."""

    layout: RankLayout
    planes: tuple[GroupPlanes, ...]
    regions: tuple[U8Array, ...]
    owners: tuple[object, ...]
    gpu: tuple[Region, ...] = ()
    values: tuple[tuple[tuple[Values, ...], ...], ...] = ()

    @property
    def cache_bytes(self) -> int:
        """The size of the memory that holds the pages."""
        return sum(len(a) for a in self.regions) + sum(r.bytes for r in self.gpu)


class Regions:
    """The distinct storages of a set of torch tensors, as byte arrays or GPU regions."""

    def __init__(self) -> None:
        self.arrays: list[U8Array] = []
        self.gpu: list[Region] = []
        self.owners: list[object] = []
        self._known: dict[int, int] = {}
        self._of: dict[str, int] = {}

    def of(self, layer: str) -> int:
        """The index of the storage of ``layer``, whose tensor was added."""
        return self._of[layer]

    def add(self, layer: str, tensor: Any, base: int) -> int:
        """Add the storage of a tensor, and return its index. Raises :class:`UsageError` unless the
        tensor begins at byte ``base`` of its storage."""
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if tensor.data_ptr() - start != base:
            raise UsageError(
                f"layer {layer}: block 0 lies at byte {tensor.data_ptr() - start} of its storage, "
                f"the KV cache config says {base}"
            )
        if start not in self._known:
            self._known[start] = len(self.owners)
            if tensor.device.type != "cpu":
                self.gpu.append(Region(start, size, str(tensor.device)))
            else:
                memory = (ctypes.c_uint8 * size).from_address(start)
                self.arrays.append(np.ctypeslib.as_array(memory))
            self.owners.append(storage)
        self._of[layer] = self._known[start]
        return self._known[start]


def scratch_like(memory: KVMemory, planes: tuple[GroupPlanes, ...], size: int) -> KVMemory:
    """``size`` bytes of new memory on the device of ``memory``, with ``planes`` in region 0."""
    if not memory.gpu:
        return KVMemory(memory.layout, planes, (np.zeros(size, np.uint8),), ())
    owner: Any = memory.owners[0]
    storage = type(owner)(size, device=owner.device)
    region = Region(storage.data_ptr(), size, memory.gpu[0].device)
    return KVMemory(memory.layout, planes, (), (storage,), (region,))


MakeMover = Callable[[KVMemory, bool], Mover]
"""As ``open_mover``, for an engine whose copy operation is known."""


def open_mover(
    memory: KVMemory,
    pins: bool = True,
    find: FindOperations = no_operations,
    stages: bool = False,
) -> Mover:
    """The mover for these pages. ``pins``: whether it may pin arenas. A device pins memory once, so
    only one mover of a process may, and that one tests the device and measures it. ``find``: how
    the engine copies on a GPU. ``stages``: whether short pages may go through stages. Raises
    MissingError if the GPU cannot be used, or if the pages are on several devices, which no mover
    supports."""
    devices = sorted({region.device for region in memory.gpu})
    where = devices + ["cpu"] * bool(memory.regions)
    if len(where) > 1:
        raise MissingError(f"KV caches on several devices in one worker: {', '.join(where)}")
    if not devices:
        return HostMover(memory.regions, memory.planes)
    if pins:
        runtime, below = open_device(devices[0], find, memory.owners)
        pages = runtime, memory.gpu, memory.planes
        scratch = partial(TorchScratch, devices[0])
        stagings = choose_stagings(*pages, below, scratch) if stages else NO_STAGES
        return DeviceMover(*pages, kernel_below=below, stagings=stagings)
    runtime = open_untested(devices[0], find, memory.owners)
    return DeviceMover(runtime, memory.gpu, memory.planes, kernel_below=NO_PINS)
