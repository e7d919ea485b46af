"""``python -m bench --engine``: which hits it compares. The engines are stand-ins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from bench.engine import (
    BLOCK,
    CHUNKS,
    measure_crowd,
    measure_hits,
    measure_new,
    rotated,
    words,
    workloads,
)
from kvass.errors import Unavailable
from tests.support.vllm.process import Answer, Prompt


class Engine:
    """A token takes a millisecond unless it is in the own cache, which ``reset`` empties, or in the
    one that has chunks of ``unit`` tokens (0: there is none)."""

    def __init__(self, unit: int) -> None:
        self.unit, self.own, self.shared = unit, set[int](), set[int]()
        self.resets = True

    def one(self, tokens: list[int], max_tokens: int, skip_prefix_cache: bool = False) -> Answer:
        local = 0 if skip_prefix_cache else found(self.own, tokens, BLOCK)
        both = max(local, found(self.shared, tokens, self.unit)) if self.unit else local
        self.own |= set(keys(tokens, BLOCK))
        self.shared |= set(keys(tokens, self.unit)) if self.unit else set()
        took_s = (len(tokens) - both) * 1e-3
        return Answer([], [], local, both - local, took_s, took_s)

    def generate(self, *prompts: Prompt) -> list[Answer]:
        answers = [self.one(prompt.tokens, prompt.max_tokens) for prompt in prompts]
        self.own.clear()  # too small for them
        return answers

    def reset(self) -> bool:
        self.own.clear()
        return self.resets


def keys(tokens: list[int], unit: int) -> list[int]:
    """One for each whole ``unit``, which stands for all tokens up to its end."""
    chain = [0]
    for end in range(unit, len(tokens) + 1, unit):
        chain.append(hash((chain[-1], *tokens[end - unit : end])))
    return chain[1:]


def found(cache: set[int], tokens: list[int], unit: int) -> int:
    hits = [key in cache for key in keys(tokens[:-1], unit)]
    return unit * (hits.index(False) if False in hits else len(hits))


@pytest.fixture
def engines() -> dict[str, Any]:
    return {name: Engine(CHUNKS.get(name, 0)) for name in ("none", *CHUNKS)}


def test_what_is_compared_has_hits_as_long_as_its_name_says(engines: dict[str, Any]) -> None:
    figures: dict[str, float] = {}
    for load in workloads(2):
        figures |= measure_hits(engines, load)
    tail, system, turns = 6011 - 5984, 2011 - 1984, [500, 850, 1200, 1550, 1900]
    chat = 500 + sum(now - before // BLOCK * BLOCK for before, now in pairwise(turns))
    of_256 = 500 + sum(now - before // 256 * 256 for before, now in pairwise(turns))
    assert figures == {
        name: pytest.approx(value)
        for name, value in {
            "document_cold_s": 6.011,
            "document_local_vs_cold": tail / 6011,
            "document_kvass_vs_local": (6011 - 5888) / tail,
            "document_blocks_vs_local": 1,
            "rag_cold_s": 2.711,
            "rag_local_vs_cold": (700 + system) / 2711,
            "rag_kvass_vs_local": (2711 - 1792) / (700 + system),
            "rag_blocks_vs_local": 1,
            "chat_cold_s": 6.0,
            "chat_local_vs_cold": chat / 6000,
            "chat_kvass_vs_local": of_256 / chat,
            "chat_blocks_vs_local": 1,
        }.items()
    }


def test_new_prompts_have_no_hit_and_a_crowds_come_from_kvass(engines: dict[str, Any]) -> None:
    assert measure_new(engines, 3) == {"new_kvass_vs_none": 1, "new_none_vs_none": 1}
    figures = measure_crowd(engines)
    assert figures["crowd_none_s"] == pytest.approx(3.0)
    assert figures["crowd_kvass_vs_none"] == pytest.approx((1500 - 1280) / 1500)
    assert figures["crowd_blocks_vs_none"] == pytest.approx((1500 - 1472) / 1500)


def test_a_hit_that_is_missing_is_no_figure(engines: dict[str, Any]) -> None:
    (document, *_) = workloads(2)
    engines["kvass"].unit = 0
    with pytest.raises(Unavailable, match="kvass: 0 of 6011 tokens hit, not 5888"):
        measure_hits(engines, document)


def test_nor_is_one_of_the_engines_own_cache(engines: dict[str, Any]) -> None:
    (document, *_) = workloads(2)
    engines["kvass"].resets = False
    with pytest.raises(Unavailable, match="could not be emptied"):
        measure_hits(engines, document)


def test_each_goes_first_in_its_turn() -> None:
    assert [rotated(["a", "b", "c"], n)[0] for n in range(4)] == ["a", "b", "c", "a"]
    assert words(9, "x") == words(9, "x") != words(9, "y")
