"""K that was moved is the K that vLLM's own rotary modules give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from kvass.blend.rope import Move, RopeRefused
from kvass.blend.rope_of import MEASURED_AT, rope_of_vllm, rope_that_explains

SCALED = {"rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 16_384}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "partial": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {**SCALED, "rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4},
    "yarn": {**SCALED, "rope_type": "yarn"},
    "deepseek": {**SCALED, "rope_type": "deepseek_yarn", "mscale": 1.0, "mscale_all_dim": 0.7},
}


def rotary(parameters: dict[str, Any], neox: bool = True, dtype: Any = torch.float32) -> Any:
    with set_current_vllm_config(VllmConfig()):
        return get_rope(32, 131_072, neox, parameters, dtype=dtype)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_moved_k_is_vllms_own(kind: str, neox: bool) -> None:
    module = rotary(KINDS[kind], neox)
    raw = torch.randn(16, 2, 32, generator=torch.manual_seed(0))

    def at(start: int) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
        places = np.arange(start, start + 16)
        _, k = module.forward_native(torch.from_numpy(places), raw.clone(), raw.clone())
        return places, k

    rope = rope_of_vllm(module, torch.float32)
    old, before = at(5)
    for start in (0, 700, 120_000):
        new, there = at(start)
        assert (Move(rope, old, new)(before, tokens=-3) - there).abs().max() <= 1e-4
        assert (before - there).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("largest", [1, 1000])
def test_a_rope_is_found_though_some_numbers_of_k_are_huge_and_hardly_turn(
    dtype: torch.dtype, largest: int
) -> None:
    module = rotary(KINDS["default"], dtype=dtype)
    raw = torch.randn(1, 2, 32, generator=torch.manual_seed(0))
    raw[..., 15] *= largest  # of the slowest pair
    raw = raw.to(dtype).repeat(len(MEASURED_AT), 1, 1)
    _, k = module.forward_native(torch.from_numpy(MEASURED_AT), raw.clone(), raw.clone())
    assert rope_that_explains("0", torch.nn.ModuleList([module]), k, dtype).width == 32
    assert rope_that_explains("0", torch.nn.ModuleList([module]), raw, dtype).width == 0
    with pytest.raises(RopeRefused, match="layer 0"):
        rope_that_explains("0", torch.nn.ModuleList([]), k, dtype)


def test_what_cannot_be_moved_is_refused_by_name() -> None:
    with pytest.raises(RopeRefused, match="float8_e5m2"):
        rope_of_vllm(rotary(KINDS["default"]), torch.float8_e5m2)
    refused: dict[str, dict[str, Any]] = {
        "dynamic NTK": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        "mrope": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "NTKScalingRotaryEmbedding": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 2.0},
    }
    for name, parameters in refused.items():
        with pytest.raises(RopeRefused, match=name) as caught:
            rope_of_vllm(rotary(parameters), torch.float32)
        assert caught.value.name == name
    longrope = type("Phi3LongRoPEScaledRotaryEmbedding", (), {})  # vLLM makes none without a model
    with pytest.raises(RopeRefused, match="longrope"):
        rope_of_vllm(longrope(), torch.float32)
