"""Random pairs of prompts on real engines: hits are as long as those of vLLM's own cache.

Engine ``a`` computes the first prompt of a pair, ``b`` gets the second one and has nothing itself.
The judge is an engine without kvass that computed the first prompt too: ``b`` has as many tokens
cached, and the same tokens and logprobs come after them. ``--pairs 200`` compares more of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvass.testing.daemon import Daemon
from tests.support.vllm.judge import Judge, apart, check_same
from tests.support.vllm.pairs import CHUNK, PromptPair, draw
from tests.support.vllm.process import Answer, EngineProcess, Prompt, Settings

pytestmark = pytest.mark.engine

TOKENS = 4
"""Generated after a second prompt."""


def both(one: EngineProcess, other: EngineProcess, prompt: Prompt) -> tuple[Answer, Answer]:
    """The prompt in two engines at once."""
    one.submit(prompt)
    other.submit(prompt)
    return one.answers()[0], other.answers()[0]


def run(
    a: EngineProcess, b: EngineProcess, judge: Judge, daemon: Daemon, pair: PromptPair
) -> tuple[Answer, Answer]:
    """What ``b`` and the judge answer to the second prompt of ``pair``."""
    first, second = pair.fields
    said, same = both(a, judge.engine, Prompt(pair.first, pair.generates, **first))
    assert said.tokens == same.tokens
    daemon.wait_until(reservations=0)
    return both(b, judge.engine, Prompt(pair.second(said.tokens), TOKENS, **second))


def test_a_hit_is_as_long_as_that_of_vllms_own_cache(
    a: EngineProcess,
    b: EngineProcess,
    judge: Judge,
    daemon: Daemon,
    adapters: Path,
    request: pytest.FixtureRequest,
) -> None:
    inside = Counter[str]()
    b.one([5] * 8, lora=f"{adapters}/one")  # an adapter's first request in an engine computes
    for number, pair in enumerate(draw(0, request.config.getoption("pairs"), f"{adapters}/one")):
        warm, local = run(a, b, judge, daemon, pair)
        assert (warm.local, warm.external) == (0, local.local), f"pair {number}: {pair.kind}"
        check_same(warm, local)
        inside[pair.kind] += warm.external % CHUNK > 0
    assert all(inside[kind] for kind in ("plain", "lora", "salt", "turns")), inside
    assert not inside["other salt"]


def test_what_is_loaded_decides_the_logprobs(
    a: EngineProcess, b: EngineProcess, judge: Judge, daemon: Daemon, adapters: Path
) -> None:
    """The negative control: pages are zeroed as they are loaded."""
    b.one([5] * 8, lora=f"{adapters}/one")
    b.disturb(Settings(spoil=True))
    wrong: set[str] = set()
    for pair in draw(1, 24, f"{adapters}/one"):
        if pair.kind in {*wrong, "other salt"}:
            continue
        warm, local = run(a, b, judge, daemon, pair)
        if warm.external:
            assert apart(warm, local) > judge.noise()
            wrong.add(pair.kind)
    b.disturb(Settings())
    assert b.reset()
    assert wrong == {"plain", "lora", "salt", "turns"}
