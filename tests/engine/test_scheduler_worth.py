"""Whether hits are loaded or computed: vLLM's real schedulers, and a model and copies that take as
long as the test says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.engine.copy_speed import Copied
from kvass.engine.request_state import Answer, RequestState
from kvass.engine.worth import CHEAPER, LEAST, SAMPLES
from kvass.testing.daemon import Daemon
from tests.engine import conftest
from tests.engine.conftest import empty
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.ranks import StubModelEngine, making
from tests.support.vllm.scheduler import CHUNK, rig

daemon = conftest.own_daemon
ON = {"kvass.skip_slow_loads": True}
BLOCK_BYTES = 1 << 20
BASE_S, TOKEN_S = 0.004, 0.00002
BLOCK_S = 0.00003
"""A step takes ``BASE_S`` and ``TOKEN_S`` for each token, a load ``BLOCK_S`` for each block."""
EMPTY_S = 0.001
"""A step that computes nothing."""
BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


class Engine:
    """A scheduler with a daemon that holds all that was computed. A load is reported with the first
    step that ends after it. ``slower``: how many times longer copies take."""

    def __init__(self, *, asynchronous: bool = False, **options: Any) -> None:
        self.client: FakeClient
        options = {"options": ON, "blocks": 400, "batched": 1024, **options}
        self.client, self.world = rig(asynchronous=asynchronous, **options)
        self.now, self.slower = 1000.0, 1.0
        self.world.planner._times.clock = lambda: self.now
        self._loads: dict[str, tuple[float, int]] = {}
        """By request: when its load ends, and of how many blocks."""
        self._names = itertools.count()

    def step(self) -> Any:
        output, work = self.world.schedule()
        self.client.commit(store.reservation for store in work.stores)
        for load in work.loads:
            blocks = len(load.blocks[0])
            self._loads[load.request] = self.now + self.slower * BLOCK_S * blocks, blocks
        tokens = output.total_num_scheduled_tokens
        self.now += BASE_S + TOKEN_S * tokens if tokens else EMPTY_S
        ended = {name for name, (end_s, _) in self._loads.items() if end_s <= self.now}
        blocks = sum(self._loads.pop(name)[1] for name in ended)
        took_s = self.slower * BLOCK_S * blocks
        copied = {0: Copied(blocks * BLOCK_BYTES, took_s, (BLOCK_BYTES,), True)} if blocks else None
        reported = list(self.world.open_steps)
        self.world.finish(output, reported=reported, received=ended, copied=copied)
        return output

    def run(self, tokens: list[int], *, forget: bool = True) -> tuple[int, float]:
        """How many tokens of a prompt were loaded, and the seconds to its first token. ``forget``:
        the engine's own cache is emptied first."""
        if forget:
            self.forget()
        request = self.world.add(f"r{next(self._names)}", tokens, max_tokens=1)
        began_s, loaded = self.now, 0
        while not request.is_finished():
            self.step()
            if state := self.world.planner._requests.get(request.request_id):
                loaded = max(loaded, state.loaded_tokens)
        return loaded, self.now - began_s

    def forget(self) -> None:
        """Empty the engine's own cache, once all is stored."""
        while self.world.open_steps:
            self.step()
        assert self.world.scheduler.reset_prefix_cache()

    def warm(self) -> None:
        """Compute prompts of all lengths, then load one several times."""
        for length in (17, 33, 65, 129, 257, 513, 1000):
            self.run(fresh(length))
        for _ in range(SAMPLES):
            self.run(PROMPT)


_contents = itertools.count(1)
PROMPT = list(range(600))


def fresh(length: int) -> list[int]:
    """A prompt that nobody has sent before."""
    return [next(_contents) % 900, *[next(_contents) % 1000 for _ in range(length - 1)]]


def seen(engine: Engine, length: int) -> list[int]:
    """A prompt of which all whole chunks are stored, and 16 tokens more."""
    prompt = fresh(length)
    engine.run(prompt)
    return prompt + fresh(16)


def decoding(engine: Engine, number: int = 3) -> None:
    """Other requests generate tokens from now on. The engine's own cache is empty."""
    engine.forget()
    for _ in range(number):
        engine.world.add(f"other {next(_contents)}", fresh(20), max_tokens=900)
    engine.step()


@BOTH
def test_a_hit_is_loaded_if_that_is_faster_than_computing(asynchronous: bool) -> None:
    """512 tokens take 10 ms to compute, and 1 and a wait to load. 32 take less than the wait."""
    engine = Engine(asynchronous=asynchronous)
    engine.warm()
    for length, expected in ((32, 0), (512, 512), (32, 0)):
        prompt = seen(engine, length)
        loaded, took_s = engine.run(prompt)
        assert loaded == expected
        assert took_s <= BASE_S + TOKEN_S * len(prompt) + 1e-9
    assert engine.client.results[-1].why == CHEAPER
    assert not engine.client.held
    assert not engine.client.taken


def test_everything_is_loaded_as_long_as_nothing_is_known() -> None:
    engine = Engine()
    for _ in range(LEAST):
        assert engine.run(seen(engine, 32))[0] == 32


def test_everything_is_loaded_if_the_rule_is_off() -> None:
    engine = Engine(options={"kvass.skip_slow_loads": False})
    engine.warm()
    engine.slower = 20.0
    for _ in range(3):
        assert engine.run(seen(engine, 32))[0] == 32


@BOTH
def test_beside_others_a_load_waits_for_their_steps(asynchronous: bool) -> None:
    """A hit that is worth a wait of nobody is not worth a step of three others."""
    engine = Engine(asynchronous=asynchronous)
    engine.warm()
    prompts = [seen(engine, 160) for _ in range(LEAST + 3)]
    assert engine.run(prompts[0])[0] == 160
    long, unknown = seen(engine, 800), [seen(engine, 64) for _ in range(LEAST)]
    decoding(engine)
    assert [engine.run(one, forget=False)[0] for one in unknown] == [64] * LEAST
    assert [engine.run(one, forget=False)[0] for one in prompts[1:]] == [0] * (LEAST + 2)
    assert engine.run(long, forget=False)[0] == 800


@BOTH
def test_slow_copies_make_the_engine_compute_and_fast_ones_load_again(asynchronous: bool) -> None:
    engine = Engine(asynchronous=asynchronous)
    engine.warm()
    prompts = itertools.cycle([seen(engine, 512) for _ in range(3)])
    computed_s = BASE_S + TOKEN_S * 528
    engine.slower = 20.0
    loads = [engine.run(next(prompts)) for _ in range(40)]
    assert loads[0][0] == 512, "nobody knows yet"
    tries = [loaded for loaded, _ in loads[1:] if loaded]
    assert 2 <= len(tries) <= 4, "it is tried again, seldom"
    assert max(tries) <= 256, "and with little"
    assert median(took_s for _, took_s in loads) == pytest.approx(computed_s)
    engine.slower = 1.0
    loads = [engine.run(next(prompts)) for _ in range(20)]
    assert [loaded for loaded, _ in loads[-3:]] == [512] * 3


def test_a_load_inside_a_step_ends_refusals_too() -> None:
    """Its rank reports what it copied; what was measured while copies were slow is forgotten."""
    engine = Engine()
    engine.warm()
    worth, copies = engine.world.planner._worth, engine.world.planner.copy_speed
    state = RequestState(SimpleNamespace(name="r", known_tokens=528))
    engine.world.step(copied={0: Copied(1 << 24, 1.0, (BLOCK_BYTES,), True)})
    assert worth.choose(state, 0, 512, 512) == 0
    refusals = 0
    while not (hit := worth.choose(state, 0, 512, 512)):
        worth.allocated(state, Answer(0, 0, None, why=CHEAPER), 0)
        refusals += 1
    assert hit == 256, "a trial"
    state.in_step = hit
    worth.allocated(state, Answer(0, hit, None, why=CHEAPER), hit)
    engine.world.step(copied={0: Copied(BLOCK_BYTES, BLOCK_S, (BLOCK_BYTES,), True)})
    worth.loaded("r", state, True)
    assert refusals > 20
    assert copies.seconds([1]) == pytest.approx(BLOCK_S)
    assert worth._easier == 1.0
    assert worth.choose(state, 0, 512, 512) == 512


def test_a_cut_hit_is_computed_from_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    prompt = seen(engine, 512)
    monkeypatch.setattr(engine.world.planner._worth, "choose", lambda *_: 2 * CHUNK)
    assert engine.run(prompt)[0] == 2 * CHUNK
    (result,) = [one for one in engine.client.results if one.hit_tokens]
    assert (result.hit_tokens, result.lookup_tokens, result.why) == (2 * CHUNK, 512, CHEAPER)


@pytest.mark.parametrize("most", [16, 32, 48, 80])
def test_a_part_of_a_hit_brings_the_right_pages(
    daemon: Daemon, pages: Iterator[dict[str, Any]], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with making(StubModelEngine) as make:
        a, b = make(daemon.socket, daemon, **next(pages)), make(daemon.socket, **next(pages))
        a.generate("a", list(range(100)))
        monkeypatch.setattr(b.world.planner._worth, "choose", lambda *_: most)
        assert b.load("b", list(range(100)))[1] == most
        b.generate("all of b", list(range(9)))
    empty(daemon)


def test_shadow_mode_checks_everything() -> None:
    engine = Engine(options={**ON, "kvass.shadow": True})
    assert not engine.world.planner._worth._on
