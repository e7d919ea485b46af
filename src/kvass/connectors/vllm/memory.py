"""Where vLLM keeps the pages of its layers, as bytes. A file of vLLM's version (see ``adapt.py``).

Law of this file: pages are found from the configuration, and the tensors must agree.

Facts relied on (0.32): the page of layer ``t.layers[l]``, block b, begins at
``t.offset + l*t.layer_stride + b*t.block_stride`` in the layer's storage and is ``page_size_bytes``
long, in one piece but for two of vLLM's six layouts: with heads outside of blocks (LHBNC) a page
has a piece per head, a block stride long and evenly spaced in the layer's stretch; with layers
inside of heads (BHLNC) only a block of all of a tensor's layers is in one piece. A tensor's layers
have equal pages and one group. A worker's ``KVCacheConfig`` names its own layers only: those of its
pipeline stage.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvass.connectors.vllm.groups import page_formats, read_groups
from kvass.errors import UsageError
from kvass.layout.describe import GroupPlanes, Part, describe_group, join_layers
from kvass.transfer.base import U8Array
from kvass.transfer.cuda_driver import MissingError
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

    def device(self) -> int | None:
        """The GPU that has all pages; None: the CPU has. Raises MissingError if neither: of such
        ``regions`` and ``gpu`` no mover can be made."""
        devices = sorted({region.device for region in self.gpu})
        where = [f"GPU {device}" for device in devices] + ["the CPU"] * bool(self.regions)
        if len(where) > 1:
            raise MissingError(f"KV caches on several devices in one worker: {', '.join(where)}")
        return devices[0] if devices else None


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
    placed = {name: t for t in kv_cache_config.kv_cache_tensors for name in t.layers}
    formats = page_formats(kv_cache_config)
    regions = _Regions()
    blocks_of = tuple(group.block_tokens for group in groups)
    layouts, planes = [], []
    for number, group in enumerate(read_groups(kv_cache_config, blocks_of, set(placed))):
        each = dict(zip(group.layers, group.page_bytes, strict=True))
        tensors = {id(placed[name]): placed[name] for name in each}
        parts = [
            part for t in tensors.values() for part in _parts(t, each, formats, kv_caches, regions)
        ]
        layout, *where = join_layers(group, parts)
        blocks = kv_cache_config.num_blocks
        planes.append(describe_group(number, layout, chunk_tokens, blocks, *where))
        layouts.append(layout)
    arrays, owners, gpu = regions.arrays, regions.owners, regions.gpu
    return Memory(
        RankLayout(tuple(layouts)), tuple(planes), tuple(arrays), tuple(owners), tuple(gpu)
    )


def _parts(
    tensor: Any,
    page_bytes: Mapping[str, int],
    formats: Mapping[str, str],
    kv_caches: Mapping[str, Any],
    regions: _Regions,
) -> list[Part]:
    """The layers of ``tensor`` as what lies in one piece in every block, by names that hold the
    ``formats`` of their pages (``groups.page_formats``). Raises UsageError."""
    layers, stride, step = tensor.layers, tensor.block_stride, tensor.layer_stride
    where = [
        regions.add(name, kv_caches[name], tensor.offset + index * step)
        for index, name in enumerate(layers)
    ]
    pages = {page_bytes.get(name, 0) for name in layers}
    page = max(pages)
    inside = len(layers) > 1 and 0 < step < page  # heads outside of layers, inside of blocks
    pieces = -(-page // stride)
    wrong = page % step or stride < page * len(layers) if inside else page % pieces or step % pieces
    if len(pages) > 1 or wrong:
        raise UsageError(
            f"layers {', '.join(layers)}: pages of {sorted(pages)} bytes do not fit into blocks "
            f"{stride} bytes apart, layers {step}"
        )
    names = [f"{name}@{formats[name]}" for name in layers]
    if inside:
        return [Part("+".join(names), tensor.offset, stride, page * len(layers), where[0])]
    return [
        Part(
            name if pieces == 1 else f"{name}#{piece}",
            tensor.offset + index * step + piece * (step // pieces),
            stride,
            page // pieces,
            where[index],
        )
        for index, name in enumerate(names)
        for piece in range(pieces)
    ]


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
        return self._known[start]
