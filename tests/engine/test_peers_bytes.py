"""What vLLM's own offloading keeps of a token, computed with vLLM's code, beside what kvass keeps:
the table of ``docs/sizing.md``."""

from __future__ import annotations

from typing import Any

import pytest

from kvass.connectors.vllm.contract import release
from kvass.layout.windows import default_interval
from kvass.simulate.models import MODELS, Layers, layout, token_bytes
from tests.engine.conftest import ROOT
from tests.support.vllm.fake_vllm import installed, version_of

BLOCK, TOKENS = 16, 1 << 16
HYBRID = [name for name, layers in MODELS.items() if any(one.kind != "full" for one in layers)]

pytestmark = pytest.mark.skipif(
    release(version_of(installed()))[:2] != (0, 32), reason="the page is about 0.32"
)


def spec_of(layers: Layers) -> Any:
    """vLLM's cache spec of one layer."""
    import torch
    from vllm.v1 import kv_cache_interface as kv

    block_tokens = layers.block_tokens or BLOCK
    common: dict[str, Any] = {"block_size": block_tokens, "num_kv_heads": 1, "dtype": torch.int8}
    common["head_size"] = layers.token_bytes // 2 or 8
    if layers.kind == "full":
        return kv.FullAttentionSpec(**common)
    if layers.kind == "sliding_window":
        return kv.SlidingWindowSpec(**common, sliding_window=layers.window_tokens)
    return kv.ChunkedLocalAttentionSpec(**common, attention_chunk_size=layers.window_tokens)


def groups_of(model: tuple[Layers, ...]) -> tuple[int, list[Any]]:
    """The bytes of a block, which belongs to one group at a time, and the spec of each group."""
    from vllm.v1.core import kv_cache_utils

    if any(layers.pages for layers in model):
        return max(sum(layers.pages) for layers in model), [spec_of(layers) for layers in model]
    specs = {f"{n}.{i}": spec_of(one) for n, one in enumerate(model) for i in range(one.count)}
    groups = kv_cache_utils._get_kv_cache_groups_uniform_page_size(specs)
    size = max(len(group.layer_names) for group in groups)
    return size * groups[0].kv_cache_spec.page_size_bytes, [g.kv_cache_spec for g in groups]


def offloaded(model: tuple[Layers, ...], interval: int | None) -> float:
    """The bytes of a token in the middle of a long prompt. Each block of a group that is stored
    takes a whole block (``worker_kv_bytes_per_block``). ``interval``: vLLM's retention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    block_bytes, specs = groups_of(model)
    (alignment,) = {spec.block_size for spec in specs if isinstance(spec, FullAttentionSpec)}
    blocks = 0
    for spec in specs:
        mask = KVCacheSpecRegistry.get_manager_class(spec).reachable_block_mask(
            start_block=0,
            end_block=TOKENS // spec.block_size,
            alignment_tokens=alignment,
            kv_cache_spec=spec,
            use_eagle=False,
            retention_interval=interval,
            reachable_boundaries=(2 * TOKENS,),
        )
        blocks += TOKENS // spec.block_size if mask is None else sum(mask)
    return blocks * block_bytes / TOKENS


@pytest.mark.parametrize("model", HYBRID)
def test_the_bytes_of_peers_are_those_of_the_page(model: str) -> None:
    layers = MODELS[model]
    groups = layout(layers, BLOCK)
    own = token_bytes(groups, 256, default_interval(groups))
    each_chunk = own.whole + own.dense_windows  # LMCache: what of a chunk lies in the window
    sizes = offloaded(layers, 0), offloaded(layers, None), each_chunk, own.whole + own.windows
    cells = " | ".join(f"{size / 1024:.1f}" for size in sizes)
    assert f"| {model} | {cells} |" in (ROOT / "docs" / "sizing.md").read_text()
