"""K that was moved is the K that the model computes there, in each kind of rope.

Layer 0's K depends on token and position alone, so it can be compared at any two positions. That
fails for K that was not moved, so an equal K is no accident.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from kvass.blend.rope import Move, Rope, RopeRefused, fingerprint, move
from kvass.blend.rope_of import ropes_of_model
from kvass.errors import UsageError

TOKENS = 24
SIZE = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
}
SCALED = {"rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 4096}
LLAMA3 = dict(SCALED, rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(SCALED, rope_type="yarn")
LATENT = dict(
    SIZE,
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    head_dim=16,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
)


def rope(**parameters: Any) -> dict[str, Any]:
    return dict(SIZE, rope_parameters=parameters)


MODELS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SIZE),
    "llama, linear": lambda: hf.LlamaConfig(**rope(rope_type="linear", rope_theta=1e4, factor=3.0)),
    "llama, llama3": lambda: hf.LlamaConfig(**rope(**LLAMA3)),
    "llama, yarn": lambda: hf.LlamaConfig(**rope(**YARN)),
    "qwen3": lambda: hf.Qwen3Config(**SIZE, head_dim=16),
    "mistral": lambda: hf.MistralConfig(**SIZE, sliding_window=None),
    "gemma": lambda: hf.GemmaConfig(**SIZE, head_dim=32),
    "gemma3": lambda: hf.Gemma3TextConfig(**SIZE, head_dim=32, layer_types=["full_attention"] * 2),
    "gpt-j": lambda: hf.GPTJConfig(
        vocab_size=99, n_embd=64, n_layer=2, n_head=2, rotary_dim=16, n_positions=131_072
    ),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**SIZE, rotary_pct=0.25),
    "phi": lambda: hf.PhiConfig(**SIZE, partial_rotary_factor=0.5),
    "cohere": lambda: hf.CohereConfig(**SIZE),
    "deepseek v2": lambda: hf.DeepseekV2Config(**LATENT),
    "deepseek v3": lambda: hf.DeepseekV3Config(**LATENT),
    "deepseek v3, yarn": lambda: hf.DeepseekV3Config(**LATENT, rope_parameters=YARN),
}


def model_of(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return hf.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def kv(model: Any, start: int, part: str) -> torch.Tensor:
    """Layer 0's K (or what holds it), [1, heads, tokens, numbers], of tokens at ``start`` on."""
    ids = torch.arange(TOKENS)[None] * 7 % 99
    with torch.no_grad():
        out = model(ids, position_ids=torch.arange(start, start + TOKENS)[None], use_cache=True)
    found: torch.Tensor = getattr(out.past_key_values.layers[0], part)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_moved_k_is_the_models_own(name: str) -> None:
    model = model_of(MODELS[name]())
    one = ropes_of_model(model)[0]
    before = kv(model, 5, one.part)
    for start in (0, 777, 120_000):
        there = kv(model, start, one.part)
        assert (move(one, before, 5, start) - there).abs().max() <= 1e-4
        assert (before - there).abs().max() > 1e-2, "without the move it is far off"
    assert torch.equal(move(one, before, 5, 5), before)
    half = kv(model.to(torch.bfloat16), 777, one.part)
    (again, *_) = ropes_of_model(model)
    moved = move(again, kv(model, 5, one.part), 5, 777)
    assert (moved - half).abs().max() <= 0.03 * half.abs().max()


def test_angles_are_rounded_as_the_model_rounds_them() -> None:
    """From exact angles, K that is far from the start would be wrong by more than is allowed."""
    model = model_of(MODELS["llama"]())
    (one, *_) = ropes_of_model(model)
    exact = torch.tensor(one.inv_freq, dtype=torch.float64) * (120_000 - 5)
    before, there = kv(model, 5, "keys"), kv(model, 120_000, "keys")
    a, b = before.double().chunk(2, -1)
    cos, sin = exact.cos(), exact.sin()
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    assert (turned - there).abs().max() > 1e-4


@pytest.mark.parametrize("style", ["neox", "gptj"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_token_that_stays_keeps_its_bits(style: Any, dtype: torch.dtype) -> None:
    one = Rope(style, (1.0, 0.5, 0.25), dtype, offset=2)
    stored = torch.randn(3, 4, 9, generator=torch.manual_seed(0)).to(dtype)
    stored[0, 0, 2:7] = torch.tensor([-0.0, torch.inf, torch.nan, -torch.inf, 0.0])
    old, new = np.array([7, 8, 9, 10]), np.array([7, 8, 12, 10])
    moved = Move(one, old, new)(stored)
    raw, now = (t.contiguous().view(torch.uint8).reshape(3, 4, -1) for t in (stored, moved))
    assert torch.equal(raw[:, [0, 1, 3]], now[:, [0, 1, 3]])
    assert not torch.equal(raw[:, 2], now[:, 2])
    rest = [0, 1, 8]
    assert torch.equal(moved[1:, :, rest], stored[1:, :, rest]), "what is not rotated stays"
    pages = stored.transpose(0, 1)  # as in vLLM: [tokens, heads, numbers]
    across = Move(one, old, new)(pages, tokens=-3).transpose(0, 1)
    assert torch.equal(across[1:], moved[1:])


def test_there_and_back_is_the_same_to_rounding() -> None:
    one = Rope("neox", tuple(1 / 10_000 ** (i / 8) for i in range(8)), torch.float32)
    stored = torch.randn(2, 16, 16, generator=torch.manual_seed(0))
    there = move(one, stored, 3, 90_000)
    assert (move(one, there, 90_000, 3) - stored).abs().max() < 1e-5


REFUSED: dict[str, Any] = {
    "dynamic NTK": lambda: hf.LlamaConfig(**rope(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
    "longrope": lambda: hf.Phi3Config(
        **SIZE,
        pad_token_id=0,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    ),
    "sliding windows": lambda: hf.MistralConfig(**SIZE, sliding_window=64),
    "state groups": lambda: hf.MambaConfig(vocab_size=99, hidden_size=32, num_hidden_layers=1),
    "a model without rotary positions": lambda: hf.BloomConfig(
        vocab_size=99, hidden_size=64, n_layer=1, n_head=4
    ),
    "layer 0": lambda: hf.GPT2Config(vocab_size=99, n_embd=64, n_layer=1, n_head=4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_moved_is_refused_by_name(name: str) -> None:
    with pytest.raises(RopeRefused, match=name) as caught:
        ropes_of_model(model_of(REFUSED[name]()))
    assert caught.value.name == name


def test_fp8_is_refused_and_so_is_k_of_another_shape() -> None:
    with pytest.raises(RopeRefused, match="float8_e4m3fn"):
        Rope("neox", (1.0,), torch.float8_e4m3fn)
    one = Rope("neox", (1.0, 0.5), torch.float32)
    for wrong in (torch.zeros(2, 5, 3), torch.zeros(2, 5, 4, dtype=torch.float16)):
        with pytest.raises(UsageError, match="is not K of"):
            move(one, wrong, 0, 1)
    with pytest.raises(UsageError, match="K of 5 tokens, positions of 2"):
        Move(one, np.arange(2), np.arange(2))(torch.zeros(2, 5, 4))
    with pytest.raises(UsageError, match="moves from"):
        Move(one, np.arange(2), np.arange(3))


def test_a_fingerprint_tells_ropes_apart() -> None:
    base = {"style": "neox", "inv_freq": (1.0, 0.5), "dtype": torch.float32}
    others: list[dict[str, Any]] = [
        {},
        {"style": "gptj"},
        {"inv_freq": (1.0, 0.25)},
        {"inv_freq": (1.0,)},
        {"dtype": torch.bfloat16},
        {"offset": 2},
        {"part": "values"},
        {"divisor": 2.0},
        {"mscale": 1.1},
    ]
    ropes = [Rope(**{**base, **other}) for other in others]
    prints = {fingerprint([one]) for one in ropes} | {fingerprint(ropes[:2])}
    assert len(prints) == len(ropes) + 1
    assert fingerprint([ropes[0]]) == fingerprint([Rope(**base)])
    assert all(len(one) == 16 for one in prints)
