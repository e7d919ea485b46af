"""Where vLLM keeps the pages of its layers, as bytes. A file of vLLM's version (see ``adapt.py``).

Pages are found from the configuration, and the tensors must agree with it.

Facts relied on: the page of layer ``t.layers[l]``, block b, begins at
``t.offset + l*t.layer_stride + b*t.block_stride`` in the layer's storage and is ``page_size_bytes``
long, in one piece but for two of vLLM's six layouts: with heads outside of blocks (LHBNC) a page
has a piece per head, a block stride long and evenly spaced in the layer's stretch; with layers
inside of heads (BHLNC) only a block of all of a tensor's layers is in one piece. A tensor's layers
have equal pages and one group. A worker's ``KVCacheConfig`` names its own layers only: those of its
pipeline stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvass.connectors.vllm.groups import page_formats, read_groups
from kvass.engine.memory import KVMemory, Regions
from kvass.errors import UsageError
from kvass.layout.describe import Part, describe_group, join_layers
from kvass.types import GroupLayout, RankLayout


def read_memory(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    chunk_tokens: int,
    groups: Sequence[GroupLayout],
) -> KVMemory:
    """Find every layer's pages in ``kv_caches`` (layer name -> tensor). ``groups`` as in
    ``EngineSetup``. Raises :class:`UsageError` if config and tensors contradict each other, and
    ``Unsupported``."""
    placed = {name: t for t in kv_cache_config.kv_cache_tensors for name in t.layers}
    formats = page_formats(kv_cache_config)
    regions = Regions()
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
    return KVMemory(
        RankLayout(tuple(layouts)), tuple(planes), tuple(arrays), tuple(owners), tuple(gpu)
    )


def _parts(
    tensor: Any,
    page_bytes: Mapping[str, int],
    formats: Mapping[str, str],
    kv_caches: Mapping[str, Any],
    regions: Regions,
) -> list[Part]:
    """The layers of ``tensor`` as what lies in one piece in every block, by names that hold the
    ``formats`` of their pages (``groups.page_formats``). Raises UsageError."""
    layers, stride, step = tensor.layers, tensor.block_stride, tensor.layer_stride
    where = [
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


def _tensor(cache: Any) -> Any:
    """A layer's cache is a tensor, or several of which the first begins the page."""
    return cache[0] if isinstance(cache, list | tuple) else cache
