"""``python -m bench --blend``: what it compares. The model is small."""

from __future__ import annotations

import pytest

from bench import blend


@pytest.mark.slow  # on a busy machine the lookup of a segment may time out
def test_blend_computes_fewer_tokens_of_shuffled_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    monkeypatch.setattr(blend, "SIZES", blend.SIZES | small | {"num_attention_heads": 4})
    monkeypatch.setattr(blend, "TOKENS", {"system": 70, "document": 140, "question": 20})
    monkeypatch.setattr(blend, "DOCUMENTS", 3)
    figures = blend.measure_blend(64 << 20, 2)
    tokens = figures["prompt_tokens"]
    assert tokens == figures["full_computed"] == 70 + 3 * 140 + 20
    assert tokens > figures["prefix_computed"] >= tokens - 70 - 2 * 140
    found = 3 * 2 * blend.CHUNK
    assert tokens - found - 70 <= figures["none_computed"] <= tokens - found
    for name in ("first_k:16", "kv_dev:0.15"):
        assert figures["none_computed"] < figures[f"{name}_computed"] < tokens - found // 2
