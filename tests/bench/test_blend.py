"""``python -m bench --blend``: what it compares. The model is small, engines are stand-ins."""

from __future__ import annotations

from typing import Any

import pytest

from bench import blend, blend_engine
from kvass.errors import Unavailable
from tests.support.vllm.process import Answer


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


class Engine:
    """A token takes a millisecond. With a salt none is cached, else 200, and with blend ``spared``
    more, by what it computes again."""

    def __init__(self, **spared: int) -> None:
        self.spared, self.select = spared, ""

    def blend(self, select: str) -> None:
        self.select = select

    def one(self, tokens: list[int], max_tokens: int, salt: str | None = None) -> Answer:
        cached = 0 if salt is not None else 200 + self.spared.get(self.select, 0)
        took_s = (len(tokens) - cached) * 1e-3
        return Answer([], [], 0, cached, took_s, took_s)


def test_each_way_is_measured_in_the_engine_that_has_it() -> None:
    engines: Any = {"alone": Engine(), "blend": Engine(**{"none": 2000, "first_k:16": 1800})}
    figures = blend_engine.measure_prompts(engines, 3)
    assert blend.markdown(figures).splitlines()[2:] == [
        "| full prefill | 2,660 | 2.7 s | 1.0 |",
        "| prefix reuse only | 2,460 | 2.5 s | 1.1 |",
        "| blend `none` | 460 | 0.5 s | 5.8 |",
        "| blend `first_k:16` | 660 | 0.7 s | 4.0 |",
    ]
    engines["blend"] = Engine()
    with pytest.raises(Unavailable, match="only 200 tokens"):
        blend_engine.measure_prompts(engines, 1)
