"""Where vLLM keeps the pages of its layers, as bytes. A file of vLLM's version (see ``adapt.py``).

Law of this file: pages are found from the configuration, and the tensors must agree.

Facts relied on (0.32): the page of layer ``t.layers[l]``, block b, is at
``t.offset + l*t.layer_stride + b*t.block_stride`` in the layer's storage, ``page_size_bytes`` long.
A worker's ``KVCacheConfig`` names its own layers only: those of its pipeline stage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvass.connectors.vllm.groups import read_groups
from kvass.errors import UsageError
from kvass.layout.describe import GroupPlanes, describe_group
from kvass.transfer.base import U8Array
from kvass.transfer.runtime import Region
from kvass.types import GroupLayout, RankLayout


@dataclass(frozen=True)
class Memory:
    """The engine's KV pages as bytes. ``owners`` keep the memory of ``regions`` alive.

    Memory of a GPU is in ``gpu`` instead of ``regions``: nothing here may look into it.
    """

    layout: RankLayout
    planes: tuple[GroupPlanes, ...]
    regions: tuple[U8Array, ...]
    owners: tuple[object, ...]
    gpu: tuple[Region, ...] = ()


def read_memory(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    chunk_tokens: int,
    groups: Sequence[GroupLayout],
) -> Memory:
    """Find every layer's pages in ``kv_caches`` (layer name -> tensor), from the config alone.

    ``groups`` as in ``engine.Setup``: their layers are not this rank's, all else is.
    Raises :class:`UsageError` if config and tensors contradict each other, and ``Unsupported``.
    """
    placed = {
        name: (tensor, index)
        for tensor in kv_cache_config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }
    regions = _Regions()
    blocks_of = tuple(group.block_tokens for group in groups)
    layouts = read_groups(kv_cache_config, blocks_of, set(placed))
    planes = []
    for number, layout in enumerate(layouts):
        bases, strides, where = [], [], []
        for name in layout.layers:
            tensor, index = placed[name]
            bases.append(tensor.offset + index * tensor.layer_stride)
            strides.append(tensor.block_stride)
            where.append(regions.add(name, kv_caches[name], bases[-1]))
        blocks = kv_cache_config.num_blocks
        planes.append(describe_group(number, layout, chunk_tokens, blocks, bases, strides, where))
    arrays, owners, gpu = regions.arrays, regions.owners, regions.gpu
    return Memory(RankLayout(layouts), tuple(planes), tuple(arrays), tuple(owners), tuple(gpu))


class _Regions:
    """The distinct storages under a set of tensors, as byte arrays."""

    def __init__(self) -> None:
        self.arrays: list[U8Array] = []
        self.gpu: list[Region] = []
        self.owners: list[object] = []
        self._known: dict[int, int] = {}

    def add(self, layer: str, cache: Any, base: int) -> int:
        """The region of ``cache``, whose first block must begin at byte ``base`` of it."""
        tensor = cache[0] if isinstance(cache, list | tuple) else cache
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        if tensor.data_ptr() - start != base:
            raise UsageError(
                f"layer {layer}: block 0 lies at byte {tensor.data_ptr() - start} of its storage, "
                f"the KV cache config says {base}"
            )
        if start not in self._known:
            self._known[start] = len(self.owners)
            if tensor.device.type == "cuda":
                self.gpu.append(Region(start, size, tensor.device.index))
            else:
                memory = (ctypes.c_uint8 * size).from_address(start)
                self.arrays.append(np.ctypeslib.as_array(memory))
            self.owners.append(storage)
            if self.gpu and self.arrays:
                raise UsageError(f"layer {layer}: KV caches on a GPU and on the CPU in one worker")
        return self._known[start]
