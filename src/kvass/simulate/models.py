"""KV cache geometry of well-known models, by name: what one token takes in each layer group.

The numbers are from the models' ``config.json``: ``2 * num_key_value_heads * head_dim`` values per
layer, or with MLA ``kv_lora_rank + qk_rope_head_dim``. A value has 2 bytes (bf16). One shard has
all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvass.errors import UsageError
from kvass.kinds import GroupKind
from kvass.layout.windows import Points, WindowRows
from kvass.types import GroupLayout


@dataclass(frozen=True)
class Layers:
    """Layers with the same cache spec: their number, and the bytes of a token in one of them.
    ``window_tokens`` is that of ``GroupLayout``. ``block_tokens``: of a block; 0: the engine's.
    ``pages``: the bytes of a block in each layer, if they differ."""

    count: int
    token_bytes: int
    kind: GroupKind = "full"
    window_tokens: int = 0
    block_tokens: int = 0
    pages: tuple[int, ...] = ()

    def layout(self, block_tokens: int) -> GroupLayout:
        """The layer group in an engine with blocks of ``block_tokens`` tokens."""
        tokens = self.block_tokens or block_tokens
        pages = self.pages or (tokens * self.token_bytes,) * self.count
        names = tuple(map(str, range(len(pages))))
        return GroupLayout(self.kind, tokens, names, pages, self.window_tokens)


def _windows(block_tokens: int, window_tokens: int, *pages: int) -> Layers:
    return Layers(0, 0, "sliding_window", window_tokens, block_tokens, pages)


def _heads(kv_heads: int, width: int) -> int:
    return 2 * kv_heads * width * 2


MODELS: Final[dict[str, tuple[Layers, ...]]] = {
    "llama-3-8b": (Layers(32, _heads(8, 128)),),
    "llama-3-70b": (Layers(80, _heads(8, 128)),),
    "mistral-7b": (Layers(32, _heads(8, 128)),),
    "qwen3-8b": (Layers(36, _heads(8, 128)),),
    "qwen3-32b": (Layers(64, _heads(8, 128)),),
    "qwen3-30b-a3b": (Layers(48, _heads(4, 128)),),
    "deepseek-v3": (Layers(61, (512 + 64) * 2),),
    "gpt-oss-20b": (Layers(12, _heads(8, 64)), Layers(12, _heads(8, 64), "sliding_window", 128)),
    "gpt-oss-120b": (Layers(18, _heads(8, 64)), Layers(18, _heads(8, 64), "sliding_window", 128)),
    "gemma-3-12b": (
        Layers(8, _heads(8, 256)),
        Layers(40, _heads(8, 256), "sliding_window", 1024),
    ),
    "gemma-3-27b": (
        Layers(10, _heads(16, 128)),
        Layers(52, _heads(16, 128), "sliding_window", 1024),
    ),
    "llama-4-scout": (
        Layers(12, _heads(8, 128)),
        Layers(36, _heads(8, 128), "chunked_local", 8192),
    ),
    # Pages as vLLM 0.32 made them for a model of four layers with the real widths, ten times over:
    # 40 layers, compressed by 0, 4, 128 and 4 in turn (latent pages, the indexer's, compressors'
    # states).
    "deepseek-v4": (
        _windows(64, 128, *[37440] * 20),
        _windows(64, 128, *[37440] * 20),
        Layers(0, 0, block_tokens=256, pages=(8640, 37440, 1728, 8640, 37440) * 10),
        _windows(4, 8, *[8640, 32832] * 20),
        _windows(8, 128, *[32832] * 10),
    ),
}


def layers_of(model: str) -> tuple[Layers, ...]:
    """The layers of a model. Raises ``UsageError`` for a name that is not in ``MODELS``."""
    if model not in MODELS:
        raise UsageError(f"--model {model}: it is one of {', '.join(MODELS)}; or use --token-bytes")
    return MODELS[model]


def layout(layers: tuple[Layers, ...], block_tokens: int) -> tuple[GroupLayout, ...]:
    """The layer groups that an engine with blocks of ``block_tokens`` tokens registers."""
    return tuple(each.layout(block_tokens) for each in layers)


class TokenBytes(NamedTuple):
    """What a token takes in L1 on average: in groups of which a hit needs all rows, and in windows;
    of these also if all are stored."""

    whole: float
    windows: float
    dense_windows: float


def token_bytes(groups: Sequence[GroupLayout], chunk_tokens: int, interval: int) -> TokenBytes:
    """``TokenBytes`` of a long prompt. ``interval``: between windows, as of ``WindowRows``."""
    rows = WindowRows(groups, chunk_tokens, interval)
    chunks, end = 0, Points(1 << 40)
    sums = [0.0, 0.0, 0.0]
    for chunks in range(interval // chunk_tokens or 1):
        mask = rows.wanted(chunks, end)
        for number, group in enumerate(groups):
            size = group.shard_bytes(chunk_tokens)
            sums[2 if group.rules.windowed else 0] += size
            sums[1] += size * group.rules.windowed * (mask >> number & 1)
    return TokenBytes(*(each / ((chunks + 1) * chunk_tokens) for each in sums))
