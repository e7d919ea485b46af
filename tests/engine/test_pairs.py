"""Random pairs of prompts on real engines: hits are as long as those of vLLM's own cache.

Engine ``a`` computes the first prompt of a pair, ``b`` gets the second one and has nothing itself.
The judge is an engine without kvass that computed the first prompt too: ``b`` has as many tokens
cached, and the same tokens and logprobs come after them. ``--pairs 200`` compares more of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.vllm.judge import Judge, apart, check_same
from tests.support.vllm.pairs import CHUNK, PromptPair, draw
from tests.support.vllm.process import Answer, EngineProcess, Prompt, Settings

pytestmark = pytest.mark.engine

TOKENS = 4
"""Generated after a second prompt."""


def run(
    a: EngineProcess, b: EngineProcess, judge: Judge, pair: PromptPair
) -> tuple[Answer, Answer]:
    """What ``b`` and the judge answer to the second prompt of ``pair``."""
    first, second = pair.fields
    prompt = Prompt(pair.first, pair.generates, **first)
    judge.engine.submit(prompt)
    (said,), (same,) = a.store(prompt), judge.engine.answers()
    assert said.tokens == same.tokens
    prompt = Prompt(pair.second(said.tokens), TOKENS, **second)
    judge.engine.submit(prompt)
    return b.generate(prompt)[0], judge.engine.answers()[0]


def test_a_hit_is_as_long_as_that_of_vllms_own_cache(
    a: EngineProcess,
    b: EngineProcess,
    judge: Judge,
    adapters: Path,
    request: pytest.FixtureRequest,
) -> None:
    inside = Counter[str]()
    b.one([5] * 8, lora=f"{adapters}/one")  # an adapter's first request in an engine computes
    for number, pair in enumerate(draw(0, request.config.getoption("pairs"), f"{adapters}/one")):
        warm, local = run(a, b, judge, pair)
        assert (warm.local, warm.external) == (0, local.local), f"pair {number}: {pair.kind}"
        check_same(warm, local)
        inside[pair.kind] += warm.external % CHUNK > 0
    assert all(inside[kind] for kind in ("plain", "lora", "salt", "turns")), inside
    assert not inside["other salt"]


def test_what_is_loaded_decides_the_logprobs(
    a: EngineProcess, b: EngineProcess, judge: Judge, adapters: Path
) -> None:
    """The negative control: pages are zeroed as they are loaded."""
    b.one([5] * 8, lora=f"{adapters}/one")
    b.disturb(Settings(spoil=True))
    wrong: set[str] = set()
    for pair in draw(1, 24, f"{adapters}/one"):
        if pair.kind in {*wrong, "other salt"}:
            continue
        warm, local = run(a, b, judge, pair)
        if warm.external:
            assert apart(warm, local) > judge.noise()
            wrong.add(pair.kind)
    b.disturb(Settings())
    assert b.reset()
    assert wrong == {"plain", "lora", "salt", "turns"}
