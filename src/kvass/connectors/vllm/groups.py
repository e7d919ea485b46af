"""The conversion of vLLM's KV cache groups to layer groups.

A file of vLLM's version (see ``adapt.py``).

A cache spec is recognized by the name of its class. A class that ``SPECS`` does not list is
unsupported, even if it derives from a listed one, because its pages may mean something else.

Facts relied on:

- Two groups have separate spaces of block ids, even if their specs are equal.
- A layer's spec may differ from its group's only inside ``UniformTypeKVCacheSpecs``.
- vLLM keeps ``extra_retained_tokens`` beyond a sliding window.
- A spec is a dataclass. Its fields say what its pages mean: dtypes, shapes, quantization.
- Of a group that is not prefix-cacheable a hit needs nothing in two cases. A circular buffer keeps
  what is still to be compressed, and that is nothing where vLLM's own hits end. What has
  ``prefix_replay_tokens`` vLLM computes again after each hit, also after one of a connector that
  does not say that it loads such groups.
- In ``align`` mode a Mamba group keeps the state of the last computed token in that token's block.
  vLLM reports which block holds the state at a block boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvass.engine import identity
from kvass.kinds import KINDS, GroupKind
from kvass.types import GroupLayout


class Unsupported(Exception):
    """The error for a KV cache group that kvass does not support."""


def _no_window(spec: Any) -> int:
    return 0


def _sliding_window(spec: Any) -> int:
    return int(spec.sliding_window + spec.extra_retained_tokens)


def _state(spec: Any) -> int:
    if spec.mamba_cache_mode != "align":
        mode = f"mamba_cache_mode {spec.mamba_cache_mode!r}"
        raise Unsupported(f"{mode} is not supported, only 'align'")
    return 0


SPECS: Final[dict[str, tuple[GroupKind, Callable[[Any], int]]]] = {
    "FullAttentionSpec": ("full", _no_window),
    "MLAAttentionSpec": ("full", _no_window),
    "SlidingWindowSpec": ("sliding_window", _sliding_window),
    "SlidingWindowMLASpec": ("sliding_window", _sliding_window),
    "ChunkedLocalAttentionSpec": ("chunked_local", lambda spec: int(spec.attention_chunk_size)),
    "MambaSpec": ("state", _state),
}
"""The kind of a cache spec, and what gives ``GroupLayout.window_tokens`` of it, by the name of its
class."""


def read_groups(
    kv_cache_config: Any, block_tokens: tuple[int, ...], layers_here: set[str] | None = None
) -> tuple[GroupLayout, ...]:
    """The layouts of all groups, with those layers that are in ``layers_here`` (default: all
    layers).

    ``block_tokens[g]``: the number of tokens that a block id of group ``g`` stands for. Raises
    ``Unsupported``.
    """
    cacheable = kv_cache_config.prefix_cacheable_group_ids
    found = []
    if not cacheable:
        raise Unsupported("no KV cache group is prefix-cacheable")
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = _specs(group)
        names = {type(spec).__name__ for spec in specs}
        if number not in cacheable and group.enable_kv_transfer and all(map(_rebuilt, specs)):
            # Of a window of one token a hit needs nothing, and there are no layers to copy.
            found.append(GroupLayout("sliding_window", max(block_tokens), (), (), 1))
            continue
        if unknown := ", ".join(sorted(names - SPECS.keys())):
            raise Unsupported(f"KV cache group {number} of kind {unknown} is not supported")
        if number not in cacheable:
            raise Unsupported(
                f"KV cache group {number} ({', '.join(names)}) is not prefix-cacheable"
            )
        shapes = {_shape(number, spec) for spec in specs}
        if len(shapes) > 1:
            raise Unsupported(f"KV cache group {number} mixes {sorted(shapes)}")
        ((kind, window_tokens),) = shapes
        each = layer_specs(group)
        layers = tuple(name for name in each if layers_here is None or name in layers_here)
        pages = tuple(each[name].page_size_bytes for name in layers)
        found.append(GroupLayout(kind, block_tokens[number], layers, pages, window_tokens))
    return tuple(found)


def rings(kv_cache_config: Any) -> frozenset[int]:
    """The groups whose layers have circular buffers: one block each request."""
    every = enumerate(kv_cache_config.kv_cache_groups)
    return frozenset(number for number, group in every if all(map(_circular, _specs(group))))


def _circular(spec: Any) -> bool:
    return type(spec).__name__ == "CircularBufferSpec"


def _rebuilt(spec: Any) -> bool:
    """Whether vLLM has what a hit needs of a group that is not prefix-cacheable."""
    return _circular(spec) or getattr(spec, "prefix_replay_tokens", 0) > 0


def _shape(number: int, spec: Any) -> tuple[GroupKind, int]:
    """``kind`` and ``window_tokens`` of a spec in group ``number``. Raises ``Unsupported``."""
    kind, window = SPECS[type(spec).__name__]
    try:
        return kind, window(spec)
    except Unsupported as error:
        raise Unsupported(f"KV cache group {number}: {error}") from None


def has_states(kv_cache_config: Any) -> bool:
    """Whether some layer keeps a state rather than pages of tokens."""
    return any(_is_state(spec) for spec in all_specs(kv_cache_config))


def _is_state(spec: Any) -> bool:
    known = SPECS.get(type(spec).__name__)
    return known is not None and KINDS[known[0]].summary


def any_non_causal(kv_cache_config: Any) -> bool:
    """Whether some layer attends to tokens after the one that it computes (a "prefix LM")."""
    return any(getattr(spec, "non_causal", False) for spec in all_specs(kv_cache_config))


def all_specs(kv_cache_config: Any) -> list[Any]:
    """The specs of all layers, or a group's own if this stage has no layer of it."""
    return [spec for group in kv_cache_config.kv_cache_groups for spec in _specs(group)]


def _specs(group: Any) -> list[Any]:
    spec = group.kv_cache_spec
    return (
        [*layer_specs(group).values()] or [*getattr(spec, "kv_cache_specs", {}).values()] or [spec]
    )


def layer_specs(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    each = getattr(spec, "kv_cache_specs", {})
    return {name: each.get(name, spec) for name in group.layer_names}


def page_values(kv_cache_config: Any) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """The values in a page of each layer, by layer name, as ``engine.memory.Values``. What follows
    them is padding."""
    return {
        name: tuple(_values(spec))
        for group in kv_cache_config.kv_cache_groups
        for name, spec in layer_specs(group).items()
    }


def _values(spec: Any) -> Iterator[tuple[str, int, int]]:
    if not _is_state(spec):
        size = int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))
        yield str(spec.dtype).removeprefix("torch."), 0, size
        return
    begin = 0
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        yield str(dtype).removeprefix("torch."), begin, size
        begin += size


def page_formats(kv_cache_config: Any) -> dict[str, str]:
    """A short digest of the cache spec of each layer, by layer name. It identifies what the bytes
    of the layer's pages mean.

    A rank reports these digests in its layout, because only a rank knows each of its layers. Raises
    ``identity.Indescribable``.
    """
    return {
        name: identity.digest([type(spec).__name__, identity.canonical(spec, "KV cache spec")])[:16]
        for group in kv_cache_config.kv_cache_groups
        for name, spec in layer_specs(group).items()
    }
