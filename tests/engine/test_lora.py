"""LoRA adapters on real engines: rows are those of the weights that a worker holds.

vLLM serves an adapter by its id, and hashes its name and path. Here neither says what the worker
holds: its folder was replaced, another adapter has its id, or it was loaded in place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.conftest import store
from tests.support.vllm.judge import Judge
from tests.support.vllm.process import EngineProcess

pytestmark = pytest.mark.engine
Make = Callable[[int], list[int]]


class World:
    """Adapters that no other test has, and what each computes by itself."""

    def __init__(self, folder: Path, names: str, judge: Judge, prompt: Make) -> None:
        self.one, self.other = (folder / name for name in names)
        self.tokens = prompt(520)  # after 512 a cold run begins a step, as a hit does
        self.id = 1000 * ord(names[0])
        self._judge = judge

    def truth(self, lora: Path, tokens: list[int] | None = None) -> list[int]:
        """What an engine without kvass computes with the adapter that is at ``lora`` now."""
        self.id += 1
        assert self._judge.engine.reset()
        tokens = tokens or self.tokens
        answer = self._judge.engine.one(tokens, lora=str(lora), lora_id=self.id)
        assert answer.cached == 0
        return answer.tokens

    def swap(self) -> None:
        """What is in one folder is in the other. The files themselves do not change."""
        aside = self.one.with_suffix(".aside")
        self.one.rename(aside)
        self.other.rename(self.one)
        aside.rename(self.other)


@pytest.fixture
def make_world(adapters: Path, judge: Judge, prompt: Make) -> Callable[[str], World]:
    """A world of the two adapters of these names, which no other test may use."""
    return lambda names: World(adapters, names, judge, prompt)


def stored(engine: EngineProcess, world: World, lora: Path, lora_id: int) -> list[int]:
    """What ``engine`` computes; three times, and stores what it may."""
    for _ in range(3):
        assert engine.reset()
        answer = engine.one(world.tokens, lora=str(lora), lora_id=lora_id)
    return answer.tokens


def test_a_folder_that_was_replaced_after_it_was_loaded(
    a: EngineProcess, b: EngineProcess, make_world: Callable[[str], World]
) -> None:
    world = make_world("AB")
    one, other = world.one, world.other
    old, new = world.truth(one), world.truth(other)
    assert old != new
    a.add_lora(one, 1)
    world.swap()
    assert stored(a, world, one, 1) == old, "it holds what it loaded"
    assert stored(b, world, one, 1) == new
    assert stored(b, world, other, 2) == old


def test_two_adapters_of_one_id(
    a: EngineProcess, b: EngineProcess, make_world: Callable[[str], World]
) -> None:
    world = make_world("CD")
    one, other = world.one, world.other
    first, second = world.truth(one), world.truth(other)
    assert stored(a, world, one, 3) == first
    assert stored(a, world, other, 3) == first, "vLLM serves by the id"
    assert stored(b, world, other, 4) == second


def test_an_adapter_loaded_in_place(
    a: EngineProcess, b: EngineProcess, make_world: Callable[[str], World]
) -> None:
    world = make_world("EF")
    one, other = world.one, world.other
    first, second = world.truth(one), world.truth(other)
    assert stored(a, world, one, 5) == first
    a.add_lora(other, 5, in_place=True)
    assert stored(a, world, one, 5) == second
    assert stored(b, world, one, 5) == first
    assert stored(b, world, other, 6) == second
    assert a.reset()
    tokens = a.one(world.tokens, lora=str(one), lora_id=5, lora_in_place=True).tokens
    assert tokens == first


def test_what_was_computed_before_the_scheduler_heard_of_another_adapter(
    a: EngineProcess, b: EngineProcess, make_world: Callable[[str], World], prompt: Make
) -> None:
    """The step that computes a new prompt is planned with the adapter of before: the worker, which
    holds another one, stores nothing under its name."""
    world, new = make_world("IJ"), prompt(520)
    one, other = world.one, world.other
    right, wrong = world.truth(one, new), world.truth(other, new)
    stored(a, world, one, 9)
    assert a.reset()
    a.add_lora(other, 9, in_place=True)
    assert a.one(new, lora=str(one), lora_id=9).tokens == wrong
    stored(b, world, one, 9)
    assert b.reset()
    assert b.one(new, lora=str(one), lora_id=9).tokens == right


def test_adapters_that_alternate_hit(
    a: EngineProcess, b: EngineProcess, make_world: Callable[[str], World]
) -> None:
    """The workers hold one adapter only, so each is read again each time."""
    world = make_world("GH")
    one, other = world.one, world.other
    truth = {one: world.truth(one), other: world.truth(other)}
    for engine in (a, b):
        for lora, number in ((one, 7), (other, 8)) * 2:
            store(engine, world.tokens, lora=str(lora), lora_id=number)
        for lora, number in ((one, 7), (other, 8)) * 2:
            assert engine.reset()
            answer = engine.one(world.tokens, lora=str(lora), lora_id=number)
            assert answer.tokens == truth[lora]
            assert answer.external == 512
