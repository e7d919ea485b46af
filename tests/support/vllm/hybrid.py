"""The configuration of models of several layer groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from kvass.types import PAGE
from tests.support.vllm.scheduler import make_configs, tell

Shape = Literal["full", "sliding_window", "chunked_local", "state", "ring", "replayed"]
"""A kind of kvass, or a group that vLLM does not cache: a circular buffer, or a window that vLLM
computes again after a hit."""
GroupShape = tuple[Shape, int, int, int]
"""Kind, block tokens, window tokens, layers."""


def make_hybrid_configs(
    extra: dict[str, object],
    shapes: Sequence[GroupShape],
    *,
    alignment: int = 0,
    draft_states: int = 0,
    retention: int | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """vLLM's own and its KV cache configuration, for groups of these shapes.

    As in vLLM, all groups share one storage: a block belongs to one group at a time. ``alignment``
    0 means vLLM's own; ``draft_states`` are the blocks of a request for states of drafts;
    ``retention`` is vLLM's interval.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    config, plain = make_configs(extra, **options)
    for block_tokens in (block for kind, block, *_ in shapes if kind == "state"):
        config.cache_config.mamba_cache_mode = "align"
        config.cache_config.block_size = block_tokens
    blocks, page, groups, tensors = plain.num_blocks, PAGE, [], []
    stride = page * max(layers for *_, layers in shapes)
    for number, (kind, block_tokens, window, count) in enumerate(shapes):
        spec = _spec(kind, block_tokens, window, page, draft_states)
        layers = [f"{number}.{kind}.{i}" for i in range(count)]
        groups.append(KVCacheGroupSpec(layers, spec))
        tensors.append(
            KVCacheTensor(
                size=blocks * stride, layers=layers, layer_stride=page, block_stride=stride
            )
        )
    caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
    caches.prefix_cache_retention_interval = retention
    sizes = kv_cache_utils.resolve_kv_cache_block_sizes(caches, config)
    tell(caches, hash_block_size=sizes[1])
    if hasattr(caches, "cache_hit_alignment_tokens"):
        own = kv_cache_utils.resolve_cache_hit_alignment_tokens(caches, config, *sizes)
        caches.cache_hit_alignment_tokens = alignment or own
    return config, caches


def _spec(kind: str, block_tokens: int, window: int, page: int, draft_states: int) -> Any:
    """A spec with pages of ``page`` bytes, whatever its block size."""
    import torch
    from vllm.v1 import kv_cache_interface as kv

    if kind == "state":
        return kv.MambaSpec(
            block_size=block_tokens,
            shapes=((16, 32),),
            dtypes=(torch.float32,),
            page_size_padded=page,
            mamba_cache_mode="align",
            num_speculative_blocks=draft_states,
        )
    common: dict[str, Any] = {
        "block_size": block_tokens,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.int8,
        "page_size_padded": page,
    }
    if kind == "full":
        return kv.FullAttentionSpec(**common)
    if kind == "ring":
        return kv.CircularBufferSpec(**common)
    if kind == "replayed":
        replayed = common | {"head_size": 16, "bounded_replay": True}
        return kv.SlidingWindowMLASpec(**replayed, sliding_window=window)
    if kind == "sliding_window":
        return kv.SlidingWindowSpec(**common, sliding_window=window)
    return kv.ChunkedLocalAttentionSpec(**common, attention_chunk_size=window)
