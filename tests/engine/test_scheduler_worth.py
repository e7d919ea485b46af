"""Whether hits are loaded or computed: vLLM's real schedulers, and a model and copies that take as
long as the test says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.engine import stores
from kvass.engine.asking import Question
from kvass.engine.copy_speed import Copied
from kvass.engine.request_state import Answer, RequestState
from kvass.engine.worth import CHEAPER, LEAST, SAMPLES, TOO_LITTLE
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
    step that ends after it. ``slower``: how many times longer copies take. ``lookup_s``: what a
    lookup takes, whatever it finds."""

    def __init__(self, *, asynchronous: bool = False, **options: Any) -> None:
        self.client: FakeClient
        options = {"options": ON, "blocks": 400, "batched": 1024, **options}
        self.client, self.world = rig(asynchronous=asynchronous, **options)
        self.now, self.slower, self.lookup_s = 1000.0, 1.0, 0.0
        self.world.planner._times.clock = lambda: self.now
        look_up = self.client.look_up

        def timed(*args: Any) -> Any:
            self.now += self.lookup_s
            return look_up(*args)

        vars(self.client)["look_up"] = timed
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

    def finish(self) -> None:
        """Make steps until no request is left."""
        while self.world.scheduler.has_unfinished_requests():
            self.step()

    def forget(self) -> None:
        """Empty the engine's own cache, once all is stored."""
        while self.world.open_steps or self.world.planner.storing():
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


@BOTH
def test_one_slow_copy_prevents_no_load_after_the_next_one(asynchronous: bool) -> None:
    """The process stood still while it copied. A prompt of which nothing is found is no trial."""
    engine = Engine(asynchronous=asynchronous)
    engine.warm()
    prompts = [seen(engine, 512) for _ in range(3)]
    engine.slower = 1000.0
    assert engine.run(prompts[0])[0] == 512
    engine.slower = 1.0
    engine.run(fresh(600))
    assert [engine.run(one)[0] for one in prompts] == [256, 512, 512]


def test_after_one_slow_copy_one_of_many_hits_is_a_trial_and_no_lookup_is() -> None:
    engine = Engine()
    engine.warm()
    small, large = [seen(engine, 32) for _ in range(12)], seen(engine, 512)
    engine.lookup_s = 0.002
    for _ in range(SAMPLES):
        engine.run(fresh(600))
    engine.slower = 1000.0
    assert engine.run(large)[0] == 512
    engine.slower, before = 1.0, len(engine.client.lookups)
    for _ in range(20):
        engine.run(fresh(65))
    assert len(engine.client.lookups) - before == 0
    engine.lookup_s = 0.0
    engine.world.planner._worth._lookups.clear()
    engine.forget()
    waiting = [engine.world.add(f"all {n}", one, max_tokens=1) for n, one in enumerate(small)]
    loaded = set()
    while engine.world.scheduler.has_unfinished_requests():
        engine.step()
        live = engine.world.planner._requests
        loaded |= {
            one.request_id
            for one in waiting
            if getattr(live.get(one.request_id), "loaded_tokens", 0)
        }
    assert len(loaded) == 1


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


def test_the_daemon_is_not_asked_for_what_takes_longer_to_look_up_than_to_compute() -> None:
    """A lookup takes 2 ms: as long as computing 100 tokens. Nothing matches here."""
    engine = Engine()
    engine.warm()
    engine.lookup_s = 0.002
    for _ in range(SAMPLES):
        engine.run(fresh(600))
    for length, asked in ((65, 0), (300, 1), (65, 0)):
        before = len(engine.client.lookups)
        _, took_s = engine.run(fresh(length))
        assert len(engine.client.lookups) - before == asked
        assert took_s == pytest.approx(BASE_S + TOKEN_S * length + asked * engine.lookup_s)
    assert engine.client.notes[-1].why == TOO_LITTLE
    engine.client.notes.clear()


def test_what_would_save_nothing_is_never_asked_for() -> None:
    """Steps of all these sizes take equally long."""
    engine = Engine()
    engine.warm()
    worth, times = engine.world.planner._worth, engine.world.planner._times
    for _ in range(SAMPLES):
        worth.looked_up(1, engine.now - 0.002)
    vars(times)["seconds"] = lambda tokens: 0.01
    vars(worth)["_easier"] = 1e300  # after so many requests
    for number in range(500):
        state = RequestState(SimpleNamespace(name=f"short {number}", known_tokens=48))
        assert not worth.asks(state, Question(0, 32, 1, None))


def test_what_is_not_asked_is_tried_again_seldom_and_a_miss_ends_it() -> None:
    engine = Engine()
    engine.warm()
    engine.lookup_s = 0.002
    for _ in range(SAMPLES):
        engine.run(fresh(600))
    before, misses = len(engine.client.lookups), 60
    for _ in range(misses):
        engine.run(fresh(65))
    tries = len(engine.client.lookups) - before
    assert 2 <= tries <= misses / 8, "64 tokens take 1.3 ms, so each try waits for some 10 refusals"
    engine.lookup_s = 0.0  # it has become fast, as lookups of longer prompts show
    for _ in range(SAMPLES):
        engine.run(fresh(600))
    before = len(engine.client.lookups)
    for _ in range(3):
        engine.run(fresh(65))
    assert len(engine.client.lookups) - before == 3


def test_lookups_that_were_slow_for_a_while_keep_no_short_prompt_from_being_asked_for() -> None:
    """Also if only short prompts come: the first try ends it."""
    engine = Engine()
    engine.warm()
    engine.lookup_s = 0.01
    for _ in range(SAMPLES):
        engine.run(fresh(600))
    engine.lookup_s, before = 0.0, len(engine.client.lookups)
    refused = 0
    while len(engine.client.lookups) == before:
        engine.run(fresh(65))
        refused += 1
    assert refused > 20
    for _ in range(3):
        before = len(engine.client.lookups)
        engine.run(fresh(65))
        assert len(engine.client.lookups) == before + 1


def test_a_lookup_that_is_pending_or_a_match_that_is_held_is_asked_for_to_the_end() -> None:
    engine = Engine()
    engine.warm()
    prompt = seen(engine, 512)
    worth = engine.world.planner._worth
    engine.forget()
    engine.client.pending = 3
    request = engine.world.add("waits", prompt, max_tokens=1)
    engine.step()
    vars(worth)["asks"] = lambda *_: False
    while not request.is_finished():
        engine.step()
    assert engine.client.results[-1].hit_tokens == 512
    assert not engine.client.held


def test_what_a_load_takes_inside_a_step_beyond_its_copy_counts() -> None:
    """Copies of 32 tokens take nothing, and their steps 3 ms longer all the same."""
    engine = Engine()
    engine.warm()
    worth, times = engine.world.planner._worth, engine.world.planner._times
    state = RequestState(SimpleNamespace(name="r", known_tokens=48))
    assert worth.choose(state, 0, 32, 32) == 32
    for _ in range(LEAST):
        state.in_step = 32
        worth.allocated(state, Answer(0, 32, None), 32)
        times.planned(16, {"r"}, loads=1)
        engine.now += times.seconds(16) + 0.003
        worth.loaded("r", state, True)
        times.ended()
    assert worth.choose(state, 0, 32, 32) == 0
    longer = RequestState(SimpleNamespace(name="longer", known_tokens=528))
    assert worth.choose(longer, 0, 512, 512) == 512
    while not worth.choose(state, 0, 32, 32):
        worth.allocated(state, Answer(0, 0, None, why=CHEAPER), 0)
    worth.allocated(state, Answer(0, 32, None), 32)
    times.planned(16, {"r"}, loads=1)
    engine.now += times.seconds(16)
    worth.loaded("r", state, True)
    times.ended()
    assert worth.choose(state, 0, 32, 32) == 32, "a trial was as fast as it seemed"


@BOTH
@pytest.mark.parametrize("aborted", [False, True])
def test_offers_are_not_in_the_way_of_a_first_token(asynchronous: bool, aborted: bool) -> None:
    """They come with the next step, also if the request ends before it."""
    engine, tokens = Engine(tails=True, asynchronous=asynchronous), fresh(100)
    engine.warm()
    engine.forget()
    before = len(engine.client.reserves)
    engine.world.add("r", tokens, max_tokens=4)
    engine.step()
    assert len(engine.client.reserves) == before, "not with the first token"
    if aborted:
        engine.world.abort("r")
    engine.step()
    assert len(engine.client.reserves) == before + 1, "and with the second one"
    engine.finish()
    assert engine.run(tokens + fresh(16))[0] == 96, "nothing was lost"


@pytest.mark.parametrize("why", ["", "one token", "long steps", "few blocks", "no tails", "off"])
def test_where_offers_are_not_put_off(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"kvass.skip_slow_loads": why != "off"}
    engine = Engine(tails=why != "no tails", options=options)
    engine.warm()
    engine.forget()
    if why == "long steps":
        monkeypatch.setattr(stores, "SHORT_STEP_S", BASE_S)
    if why == "few blocks":
        decoding(engine, 1)
        pool = engine.world.planner.stores._pool
        monkeypatch.setattr(type(pool), "free_blocks", pool.blocks // 2 - 1)
    vars(engine.world.planner.stores)["_put_off"] = False
    before = len(engine.client.reserves)
    engine.world.add("r", fresh(100), max_tokens=1 + (why != "one token"))
    engine.step()
    assert len(engine.client.reserves) - before == (why != "")


def test_steps_that_each_compute_a_first_token_offer_with_every_second_one() -> None:
    engine = Engine(tails=True)
    engine.warm()
    engine.forget()
    before = len(engine.client.reserves)
    for number in range(6):
        engine.world.add(f"each {number}", fresh(100), max_tokens=20)
        engine.step()
    assert len(engine.client.reserves) - before == 3


def test_what_an_ended_request_holds_is_offered_before_it_would_be_dropped() -> None:
    """A step that runs beside the one with the only token of a prompt as long as requests can be,
    and one after it."""
    engine = Engine(tails=True, asynchronous=True, blocks=200)
    engine.warm()
    engine.forget()
    world, tokens = engine.world, fresh(1023)
    world.add("long", tokens)
    outputs = [world.schedule()[0]]
    world.add("beside", fresh(20))
    outputs.append(world.schedule()[0])
    world.finish(outputs.pop(0))
    world.add("after", fresh(20))
    output, work = world.schedule()
    engine.client.commit(store.reservation for store in work.stores)
    for each in (*outputs, output):
        world.finish(each, reported=list(world.open_steps))
    engine.finish()
    assert engine.run(tokens[:1000])[0] == 992


def test_a_request_that_offers_nothing_more_puts_nothing_off() -> None:
    engine = Engine(tails=True)
    engine.warm()
    engine.forget()
    engine.world.add("stopped", fresh(20), max_tokens=200)
    engine.step()
    engine.step()
    engine.world.planner._requests["stopped"].offered.stop()
    for _ in range(3):
        engine.step()
        assert not engine.world.planner.stores._put_off


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
