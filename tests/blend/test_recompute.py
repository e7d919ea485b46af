"""All of a segment computed again is a full prefill, bit for bit, whatever its K and V were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from kvass.blend.plan import PlacedSegment, Prompt, all_tokens, none
from kvass.connectors.transformers.blending import Blender
from kvass.connectors.transformers.model import new_cache, tensors_of

TINY: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("kind", [hf.LlamaConfig, hf.Qwen3Config, hf.GPTNeoXConfig])
def test_all_computed_again_is_a_full_prefill(kind: Any) -> None:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(kind(**TINY), attn_implementation="eager").eval()
    ids = torch.from_numpy(np.arange(40) * 7 % 99)[None]
    cache = new_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    prompt = Prompt(40, 0, (PlacedSegment(8, 100, 24),))
    for select in (all_tokens, none):
        kv = [torch.full_like(tensor[:, :, :39], 9.0) for tensor in tensors_of(cache)]
        Blender(model).recompute(ids, kv, prompt, select)
        pairs = zip(kv, tensors_of(cache), strict=True)
        same = all(torch.equal(ours, full[:, :, :39]) for ours, full in pairs)
        assert same == (select is all_tokens)
