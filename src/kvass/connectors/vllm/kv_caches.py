"""The location of the KV pages in vLLM's tensors. A file of vLLM's version (see ``adapt.py``).

Pages are located by the configuration. The tensors must agree with it.

Facts relied on:

- The page of layer ``t.layers[l]`` and block b has ``page_size_bytes`` bytes. In the layer's
  storage it begins at ``t.offset + l*t.layer_stride + b*t.block_stride``.
- A page is one piece of memory, except in two of vLLM's six layouts. With heads outside of blocks
  (LHBNC) a page has one piece per head. A piece is as long as the block stride, and the pieces are
  evenly spaced in the layer's memory. With layers inside of heads (BHLNC) only a block of all
  layers of a tensor is one piece.
- All layers of a tensor have pages of equal size and belong to one group.
- A worker's ``KVCacheConfig`` names only the layers of its own pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvass.connectors.vllm.groups import page_formats, page_values, read_groups
from kvass.engine.memory import KVMemory, Regions, Values
from kvass.errors import UsageError
from kvass.layout.describe import GroupPlanes, Part, describe_group, join_layers
from kvass.types import GroupLayout, RankLayout


def read_memory(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    chunk_tokens: int,
    groups: Sequence[GroupLayout],
) -> KVMemory:
    """The pages of all layers in ``kv_caches``, the tensors by layer name. ``groups`` are those of
    ``EngineSetup``.

    Raises :class:`UsageError` if the configuration and the tensors contradict each other, and
    ``Unsupported`` for a group that kvass does not support.
    """
    tensor_of = {name: t for t in kv_cache_config.kv_cache_tensors for name in t.layers}
    formats, known_values = page_formats(kv_cache_config), page_values(kv_cache_config)
    regions = Regions()
    blocks_of = tuple(group.block_tokens for group in groups)
    layouts, planes, values = [], [], []
    for number, group in enumerate(read_groups(kv_cache_config, blocks_of, set(tensor_of))):
        page_bytes = dict(zip(group.layers, group.page_bytes, strict=True))
        tensors = {id(tensor_of[name]): tensor_of[name] for name in page_bytes}
        parts = [
            part
            for tensor in tensors.values()
            for part in _parts(tensor, page_bytes, formats, kv_caches, regions)
        ]
        layout, bases, strides, region_ids = join_layers(group, parts)
        blocks = kv_cache_config.num_blocks
        planes.append(
            describe_group(number, layout, chunk_tokens, blocks, bases, strides, region_ids)
        )
        layouts.append(layout)
        values.append(_values_of(planes[-1], tensors.values(), page_bytes, known_values, regions))
    return KVMemory(
        layout=RankLayout(tuple(layouts)),
        planes=tuple(planes),
        regions=tuple(regions.arrays),
        owners=tuple(regions.owners),
        gpu=tuple(regions.gpu),
        values=tuple(values),
    )


def _parts(
    tensor: Any,
    page_bytes: Mapping[str, int],
    formats: Mapping[str, str],
    kv_caches: Mapping[str, Any],
    regions: Regions,
) -> list[Part]:
    """The parts of ``tensor``: what lies in one piece in every block.

    That is the page of one layer, a piece of such a page, or the pages of all layers of the tensor.
    A part's name contains the ``formats`` of its pages (``groups.page_formats``). Raises
    ``UsageError``.
    """
    layers, stride, step = tensor.layers, tensor.block_stride, tensor.layer_stride
    region_ids = [
        regions.add(name, _tensor(kv_caches[name]), tensor.offset + index * step)
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
        return [Part("+".join(names), tensor.offset, stride, page * len(layers), region_ids[0])]
    return [
        Part(
            name if pieces == 1 else f"{name}#{piece}",
            tensor.offset + index * step + piece * (step // pieces),
            stride,
            page // pieces,
            region_ids[index],
        )
        for index, name in enumerate(names)
        for piece in range(pieces)
    ]


def _values_of(
    planes: GroupPlanes,
    tensors: Iterable[Any],
    page_bytes: Mapping[str, int],
    values: Mapping[str, tuple[Values, ...]],
    regions: Regions,
) -> tuple[tuple[Values, ...], ...]:
    every = [
        (regions.of(name), *each)
        for tensor in tensors
        for index, name in enumerate(tensor.layers)
        for each in _placed(tensor, index, page_bytes.get(name, 0), values[name])
    ]
    return tuple(
        tuple(
            (dtype, begin - plane.base, size)
            for region, dtype, begin, size in every
            if region == plane.region
            and plane.base <= begin
            and begin + size <= plane.base + plane.run
        )
        for plane in planes.planes
    )


def _placed(
    tensor: Any, index: int, page: int, values: Sequence[Values]
) -> Iterable[tuple[str, int, int]]:
    """Where ``values`` of layer ``index`` are in block 0: dtype, first byte of the storage, bytes.
    In a page of several pieces all values have one dtype."""
    stride, step = tensor.block_stride, tensor.layer_stride
    begin, pieces = tensor.offset + index * step, -(-page // stride)
    if len(tensor.layers) > 1 and 0 < step < page:  # heads outside of layers, inside of blocks
        if index == 0:
            yield values[0][0], tensor.offset, page * len(tensor.layers)
    elif pieces > 1:
        for piece in range(pieces):
            yield values[0][0], begin + piece * (step // pieces), page // pieces
    else:
        for dtype, at, size in values:
            yield dtype, begin + at, size


def _tensor(cache: Any) -> Any:
    """The tensor at which a layer's pages begin. A layer's cache is one tensor or several, and the
    first of them begins the page."""
    return cache[0] if isinstance(cache, list | tuple) else cache
