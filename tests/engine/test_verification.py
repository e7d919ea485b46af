"""A wrong copy in an engine: its tokens stay right, it goes uncached, and what it stored is
cleared for all. Models with several layer groups: ``test_hybrid.py``; several ranks:
``test_ranks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pytest

from tests.engine.conftest import CHUNK, store
from tests.support.vllm.judge import Judge
from tests.support.vllm.process import EngineProcess, Settings

pytestmark = pytest.mark.engine

Make = Callable[[int], list[int]]
OFF: Final = "kvass is off, the engine runs uncached"


@pytest.fixture
def fresh(a: EngineProcess, b: EngineProcess) -> Iterator[EngineProcess]:
    """``b`` as if it had verified nothing; afterwards it uses the cache again."""
    b.verify_again()
    yield b
    b.disturb(Settings())
    b.verify_again()


@pytest.mark.parametrize("kind", ["store", "load"])
def test_one_flipped_byte_ends_the_cache_of_an_engine(
    a: EngineProcess, fresh: EngineProcess, judge: Judge, prompt: Make, kind: str
) -> None:
    right, other = prompt(CHUNK + 1), prompt(CHUNK + 1)  # one row each
    store(a, other)
    if kind == "load":
        store(a, right)
    said = fresh.log().count(OFF)
    fresh.disturb(Settings(flip=kind))
    for _ in range(2):
        answer = fresh.one(right)
        assert answer.cached == 0, "all is computed"
        judge.check(right, answer)
        assert fresh.reset()
    fresh.disturb(Settings())
    assert fresh.one(other).external == 0, "it looks up nothing more"
    (line,) = [line for line in fresh.log().splitlines() if OFF in line][said:]
    assert f"rank 0: a {kind} in layer group 0 (full, blocks of 32 tokens, runs per bl" in line
    for tokens in (right, other):
        assert a.reset()
        assert a.one(tokens).external == 0, "for a second engine the namespace is empty"
    store(a, other)
