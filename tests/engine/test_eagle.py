"""EAGLE in real engines: a drafter whose layer shares the target's KV cache group.

What is proposed cannot change what is said, so tokens and log-probabilities are compared as for any
model; that the drafter's own pages came back, byte for byte, is asked of the copies.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvass.testing.daemon import Daemon
from tests.engine import hybrid
from tests.engine.conftest import BLOCK, CHUNK, ROOT, Starter
from tests.support.vllm.judge import Judge
from tests.support.vllm.models import TINY, build, eagle_head
from tests.support.vllm.process import EngineProcess, Prompt, Settings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(hybrid.BEFORE_0_31, reason="without Triton vLLM 0.30 runs no drafter"),
]

DRAFTS: Final = 2


def eagle() -> dict[str, Any]:
    head = build(ROOT / ".cache" / "models", eagle_head(), seed=7)
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": DRAFTS}
    return {"speculative_config": config}


@pytest.fixture(scope="module")
def engines(daemon: Daemon, start: Starter) -> Iterator[list[EngineProcess]]:
    """Two with a drafter; the pages of the first are on a fake GPU."""
    socket = Path(daemon.socket)
    made = [start(f"eagle-{n}", socket=socket, args=eagle(), gpu=n == "a") for n in "ab"]
    yield [one.wait_ready() for one in made]
    for one in made:
        one.kill()


def prompt(tokens: int) -> list[int]:
    return random.Random(tokens).choices(range(4, TINY.vocab), k=tokens)


@pytest.fixture(scope="module")
def judge(engines: list[EngineProcess]) -> Judge:
    """The second engine. To hit a block, vLLM must have the next one: the drafter needs its end."""
    return Judge(engines[1], beyond=BLOCK)


def stored(engine: EngineProcess, tokens: list[int]) -> list[str]:
    """Compute ``tokens``, all of which is stored then; the digests of the blocks."""
    assert engine.reset()
    engine.reset_hooks()
    engine.disturb(Settings(watch=True))
    (answer,) = engine.store(Prompt(tokens, 8))
    assert answer.cached == 0
    return engine.pages()[0].stored


@pytest.mark.parametrize("size", [300, 512, 767, 768, 1000])
def test_a_hit_leaves_a_chunk_and_changes_nothing(
    engines: list[EngineProcess], judge: Judge, size: int
) -> None:
    a, b = engines
    assert sum(group.layers for group in b.groups()) == TINY.layers + 1
    tokens = prompt(size)
    digests = stored(a, tokens)
    assert b.reset()
    b.reset_hooks()
    b.disturb(Settings(watch=True))
    hit = (size // CHUNK - 1) * CHUNK
    warm = b.one(tokens, 8)
    assert (warm.local, warm.external) == (0, hit)
    assert b.pages()[0].loaded == digests[: hit // BLOCK]
    judge.check(tokens, warm)


def test_a_late_load_inside_a_step_is_taken_back(
    engines: list[EngineProcess], judge: Judge
) -> None:
    a, b = engines
    tokens = prompt(1001)
    stored(a, tokens)
    assert b.reset()
    b.reset_hooks()
    b.load_in_steps()
    b.scrub()
    (before,) = b.in_step()
    b.disturb(Settings(late_in_step=True))
    answers = b.generate(Prompt(tokens, 8), Prompt(tokens[:900], 8))
    b.disturb(Settings())
    assert b.reset()
    answers.append(b.one(tokens, 8))
    assert b.in_step() == [before + 1]
    b.load_in_steps(False)
    for prompted, answer in zip((tokens, tokens[:900], tokens), answers, strict=True):
        judge.check(prompted, answer, alike=False)


def test_a_hybrid_model_with_a_drafter(tmp_path: Path) -> None:
    """gpt-oss: windows, full attention, and the drafter's layer in a group of its own."""
    with hybrid.running_pair(hybrid.GPT_OSS, tmp_path, beyond=BLOCK, **eagle()) as pair:
        assert [(group.specs, group.layers) for group in pair.groups()] == [
            (["SlidingWindowSpec"], 2),
            (["FullAttentionSpec"], 2),
            (["FullAttentionSpec"], 1),
        ]
        for size in (513, 1000):
            tokens = pair.prompt(size)
            pair.store(tokens)
            warm = pair.load(tokens, 8)
            assert (warm.local, warm.external) == (0, (size // CHUNK - 1) * CHUNK)
            pair.check(tokens, warm)
        for group in (0, 1):
            tokens = pair.prompt(1000)
            pair.store(tokens)
            pair.spoil(group)
            spoilt = pair.load(tokens, 8)
            pair.b.reset_hooks()
            assert spoilt.external == 512
            hybrid.red(pair, tokens, spoilt)


def test_the_check_sees_a_wrong_page(engines: list[EngineProcess], judge: Judge) -> None:
    a, b = engines
    tokens = prompt(1002)
    stored(a, tokens)
    assert b.reset()
    b.reset_hooks()
    b.disturb(Settings(spoil=True))
    spoilt = b.one(tokens, 8)
    b.reset_hooks()
    assert spoilt.external == 512
    judge.check_wrong(tokens, spoilt)
