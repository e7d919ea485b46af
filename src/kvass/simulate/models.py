"""KV cache geometry of well-known models, by name: what one token takes in each layer group.

The numbers are from the models' ``config.json``: ``2 * num_key_value_heads * head_dim`` values per
layer, or with MLA ``kv_lora_rank + qk_rope_head_dim``. A value has 2 bytes (bf16). One shard has
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvass.errors import UsageError
from kvass.kinds import GroupKind
from kvass.types import GroupLayout


@dataclass(frozen=True)
class Layers:
    """Layers with the same cache spec: their number, and the bytes of a token in one of them.
    ``window_tokens`` is that of ``GroupLayout``."""

    count: int
    token_bytes: int
    kind: GroupKind = "full"
    window_tokens: int = 0


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
}


def layers_of(model: str) -> tuple[Layers, ...]:
    """The layers of a model. Raises ``UsageError`` for a name that is not in ``MODELS``."""
    if model not in MODELS:
        raise UsageError(f"--model {model}: it is one of {', '.join(MODELS)}; or use --token-bytes")
    return MODELS[model]


def layout(layers: tuple[Layers, ...], block_tokens: int) -> tuple[GroupLayout, ...]:
    """The layer groups that an engine with blocks of ``block_tokens`` tokens registers."""
    return tuple(
        GroupLayout(
            each.kind,
            block_tokens,
            tuple(map(str, range(each.count))),
            (block_tokens * each.token_bytes,) * each.count,
            each.window_tokens,
        )
        for each in layers
    )
