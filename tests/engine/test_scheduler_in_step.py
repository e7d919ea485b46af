"""Loads inside steps, in vLLM's real schedulers: which they are, and what is forgotten after one
that failed.

``own`` is the negative control: vLLM handles a load that failed as it does without kvass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.connectors.vllm import bad_blocks
from kvass.engine import in_step, step_times
from kvass.engine.copy_speed import Copied
from kvass.engine.in_step import TRIAL
from tests.engine.test_scheduler_load import settled, stored
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.hybrid import make_hybrid_configs
from tests.support.vllm.scheduler import (
    BLOCK,
    CHUNK,
    FIXED,
    SchedulerHarness,
    before,
    make_configs,
    make_multi_configs,
    rig,
)

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
OWN = pytest.mark.parametrize("own", [False, True], ids=["kvass", "vllm-alone"])
PROMPT: Final = range(100)
BAD: Final = (99,)
"""What the model answers in steps after a load that failed."""


@pytest.fixture(autouse=True)
def no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of these tests are short, because they compute nothing."""
    monkeypatch.setattr(in_step, "STEP_SHARE", 1e9)


def report(world: SchedulerHarness, block_s: float = 1e-6, verified: bool = True) -> None:
    """The rank has copied a load, and needs ``block_s`` for a block."""
    figures = Copied(1 << 20, (1 << 20) / 4096 * block_s, (4096,), verified, True)
    world.step(copied={0: figures})


def ready(tokens: int = 100, **options: Any) -> tuple[FakeClient, SchedulerHarness]:
    """As ``stored``, in an engine that loads inside steps."""
    client, world = stored(tokens, **options)
    report(world)
    return client, world


def alone(world: SchedulerHarness, own: bool) -> None:
    if own:
        del world.scheduler._handle_invalid_blocks


def table(world: SchedulerHarness, name: str) -> tuple[int, ...]:
    return tuple(world.scheduler.kv_cache_manager.get_block_ids(name)[0])


def begins_in_step(world: SchedulerHarness, name: str, tokens: range = PROMPT) -> bool:
    """Whether the load of a request is inside the step that it is added to. It is run to its
    end."""
    world.add(name, tokens, max_tokens=1)
    output, work = world.schedule()
    (load,) = work.loads
    assert bool(load.in_step) == (name in output.num_scheduled_tokens)
    world.finish(output, received=[] if load.in_step else [name])
    world.run()
    assert world.scheduler.reset_prefix_cache()
    return bool(load.in_step)


@BOTH
def test_a_hit_that_fits_is_loaded_in_the_step_that_computes_the_rest(asynchronous: bool) -> None:
    client, world = ready(asynchronous=asynchronous)
    request = world.add("b", PROMPT)
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"b": 4}
    assert output.has_sync_kv_loads
    (load,) = work.loads
    assert load.blocks == (table(world, "b")[:6],)
    assert load.in_step == table(world, "b"), "if it fails, what is computed is wrong, too"
    assert client.handed[-1:] == [load.lease]
    client.results.clear()
    world.finish(output)
    assert [(one.hit_tokens, one.failed) for one in client.results] == [(96, False)]
    world.run(client)
    assert request.num_output_tokens == 4
    settled(client, world)


@pytest.mark.parametrize("tokens", [33, 64, 65, 96])
def test_the_last_token_of_a_prompt_is_computed(tokens: int) -> None:
    client, world = ready()
    request = world.add("b", range(tokens))
    output, work = world.schedule()
    (load,) = work.loads
    whole = tokens // CHUNK * CHUNK
    assert len(load.blocks[0]) == whole // BLOCK
    assert output.num_scheduled_tokens == {"b": max(1, tokens - whole)}
    world.finish(output)
    world.run(client)
    assert request.num_output_tokens == 4
    settled(client, world)


def test_what_is_not_known_or_not_verified_or_switched_off_is_asynchronous() -> None:
    _, world = stored()
    assert not begins_in_step(world, "unknown")
    report(world, verified=False)
    assert not begins_in_step(world, "not verified")
    report(world)
    assert begins_in_step(world, "verified")
    _, off = ready(options={"kvass.sync_load_ms": 0})
    assert not begins_in_step(off, "off")


def test_the_budget_is_a_time_of_all_loads_of_one_step() -> None:
    """Two milliseconds are six blocks of 0.3 ms, and no seventh."""
    _, world = stored(200, blocks=128)
    report(world, 0.0003)
    assert not begins_in_step(world, "more", range(200))
    assert begins_in_step(world, "one")
    world.planner.in_step._spent_s = 0.0003
    assert not begins_in_step(world, "beside another")
    assert begins_in_step(world, "in the next step")


def test_there_is_room_for_what_the_step_has_left() -> None:
    """Of 192 tokens there is room for six blocks of 0.3 ms, beside another load for one chunk."""
    _, world = stored(200, blocks=128)
    report(world, 0.0003)
    match: Any = SimpleNamespace(given_s=0.0, deadline_s=1e12)
    old: Any = SimpleNamespace(given_s=0.0, deadline_s=1.0)
    inside = world.planner.in_step
    assert inside.room(0, 96, match) == 96
    assert inside.room(0, 192, match) == 96
    inside._spent_s = 0.0005
    assert inside.room(0, 192, match) == 64
    assert inside.room(0, 96, old) == 0
    inside._trial = 1
    assert inside.room(0, 192, match) == 0


def test_a_load_that_took_long_ends_loads_inside_steps_at_once() -> None:
    _, world = ready()
    assert begins_in_step(world, "fast")
    report(world, 0.01)
    assert not begins_in_step(world, "slow")
    report(world)
    assert begins_in_step(world, "fast again")


def test_copies_take_a_share_of_the_steps_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the engine rests between steps does not count."""
    _, world = stored()
    report(world, 0.0002)
    planner = world.planner
    monkeypatch.setattr(in_step, "STEP_SHARE", 0.5)
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(planner._times, "clock", lambda: now.s)
    for step_s, fits in ((0.002, True), (0.0005, False), (0.002, True)):
        for _ in range(step_times.SAMPLES):
            planner._times.planned(1, frozenset({"one"}))
            now.s += step_s
            planner._times.ended()
            now.s += 1.0
        assert planner.in_step.fits([4]) == fits


def test_a_lease_that_is_not_fresh_is_not_used_inside_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, world = ready()
    find = client.find

    def aged(left_s: float) -> Any:
        def found(*lookup: Any) -> Any:
            match: Any
            match, now_s = find(*lookup), time.monotonic()
            match.given_s, match.deadline_s = now_s - 100, now_s + left_s
            return match

        return found

    for left_s, fresh in ((200.0, True), (50.0, False)):
        monkeypatch.setattr(client, "find", aged(left_s))
        assert begins_in_step(world, f"{left_s} s are left") == fresh


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_with_equal_bytes_load_asynchronously(replicas: int) -> None:
    """The first of them stores, and does not know that the load of another one failed."""
    strategy = ParallelStrategy(tp=2, replicas=replicas)
    _, world = rig(strategy=strategy)
    assert bool(world.planner.in_step.why_not) == (replicas == 2)


def test_an_engine_that_cannot_take_back_a_step_loads_asynchronously(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvass.connectors.vllm.borrowed.scheduler", lambda: None)
    _, world = ready()
    assert world.planner.in_step.why_not == "the engine cannot take back a step"
    assert not begins_in_step(world, "b")


@pytest.mark.parametrize(
    ("configs", "replaced"),
    [
        (make_configs, True),
        (lambda: make_configs({"kvass.sync_load_ms": 0}), False),
        (
            lambda: make_hybrid_configs({}, [("sliding_window", 16, 40, 1), ("full", 16, 0, 1)]),
            False,
        ),
    ],
    ids=["in-steps", "off", "two-groups"],
)
def test_vllm_handles_failed_loads_itself_where_none_is_inside_a_step(
    configs: Callable[[], Any], replaced: bool
) -> None:
    """Another connector may report blocks. Of several groups vLLM cannot say whose they are, and
    raises. So it must where nothing of kvass is taken back."""
    _, world = rig(configs=configs())
    assert ("_handle_invalid_blocks" in vars(world.scheduler)) == replaced
    if len(world.scheduler.kv_cache_config.kv_cache_groups) > 1 and not before("0.32"):
        with pytest.raises(RuntimeError, match="multiple KV cache groups"):
            world.scheduler._handle_invalid_blocks({1}, {})


def test_after_a_failure_loads_are_asynchronous_for_a_while() -> None:
    client, world = ready()
    world.add("b", PROMPT, max_tokens=1)
    world.step(late=["b"])
    world.run(client)
    assert world.scheduler.reset_prefix_cache()
    for number in range(TRIAL):
        assert not begins_in_step(world, f"trial {number}")
    assert begins_in_step(world, "trusted")


def test_after_a_failure_hits_that_are_worth_no_other_load_are_loaded_again_in_the_end() -> None:
    client, world = ready()
    world.add("b", PROMPT, max_tokens=1)
    world.step(late=["b"])
    world.run(client)
    assert world.scheduler.reset_prefix_cache()
    vars(world.planner._worth)["choose"] = lambda state, local, hit, inside: min(hit, inside)
    for number in range(TRIAL):
        world.add(f"computed {number}", PROMPT, max_tokens=1)
        assert not world.step().loads
        world.run(client)
        assert world.scheduler.reset_prefix_cache()
    assert begins_in_step(world, "trusted")


def test_a_load_of_another_connector_ends_no_trial() -> None:
    _, world = ready()
    world.add("another's", PROMPT)
    world.planner.in_step._trial = 2
    world.planner.reported({}, (), ("another's", "nobody's"))
    assert world.planner.in_step._trial == 2


def test_inside_a_multi_connector() -> None:
    client = FakeClient()
    world = SchedulerHarness(client, configs=make_multi_configs(FIXED))
    world.add("writer", PROMPT, max_tokens=1)
    world.run(client)
    assert world.scheduler.reset_prefix_cache()
    report(world)
    assert begins_in_step(world, "b")
    request = world.add("c", PROMPT)
    world.step(late=["c"], tokens=BAD)
    assert list(request.output_token_ids) == []
    world.run(client)
    assert list(request.output_token_ids) == [7] * 4


# ---------------------------------------------------------------- loads that fail


@BOTH
def test_what_a_late_load_gave_is_computed_again(asynchronous: bool) -> None:
    client, world = ready(asynchronous=asynchronous)
    request = world.add("b", PROMPT)
    output, _ = world.schedule()
    following = world.schedule()[0] if asynchronous else None
    world.finish(output, late=["b"], tokens=BAD)
    assert request.status.name == "PREEMPTED"
    assert (request.num_computed_tokens, request.num_output_tokens) == (0, 0)
    assert world.planner.took_back
    if following is not None:
        world.finish(following, tokens=BAD)
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"b": 100}
    cached = output.scheduled_cached_reqs
    assert cached.req_ids == [*cached.all_token_ids], "the worker begins it anew"
    assert work.loads == []
    world.finish(output)
    world.run(client)
    assert list(request.output_token_ids) == [7] * 4
    assert [(one.hit_tokens, one.failed) for one in client.results[-1:]] == [(0, True)]
    settled(client, world)


@BOTH
@OWN
def test_nobody_gets_an_answer_from_its_blocks(asynchronous: bool, own: bool) -> None:
    """Request "c" hits the blocks in the same step, with asynchronous scheduling also "d" in the
    next one. "b" ends before it is computed again."""
    client, world = ready(asynchronous=asynchronous)
    alone(world, own)
    world.add("b", PROMPT)
    others = [world.add("c", range(98))]
    output, _ = world.schedule()
    following = []
    if asynchronous:
        others.append(world.add("d", range(99)))
        following = [world.schedule()[0]]
    world.finish(output, late=["b"], tokens=BAD)
    world.abort("b")
    client.rows.clear()
    for one in following:
        world.finish(one, tokens=BAD)
    output, _ = world.schedule()
    first = others[0]
    computed = output.num_scheduled_tokens.get("c") == first.num_tokens == 98
    assert computed != own
    if not own:  # vLLM alone may not come to an end
        world.finish(output)
        world.run(client)
        assert [list(one.output_token_ids) for one in others] == [[7] * 4] * len(others)
        settled(client, world)


def test_what_was_computed_from_a_bad_block_is_bad() -> None:
    tables = {"last": [9, 5], "second": [7, 3, 9], "first": [1, 2, 3], "other": [1, 7]}
    bad = {2}
    assert bad_blocks._with_bad_blocks(tables, bad) == {"first", "second", "last"}
    assert bad == {2, 3, 9, 5}


@OWN
def test_a_request_that_is_preempted_meanwhile_gets_no_answer(own: bool) -> None:
    client, world = ready(asynchronous=True)
    alone(world, own)
    request = world.add("b", PROMPT)
    output, _ = world.schedule()
    (running,) = world.scheduler.running
    world.scheduler.running.clear()
    world.scheduler._preempt_request(running, 0.0)
    world.finish(output, late=["b"], tokens=BAD)
    assert (BAD[0] in request.output_token_ids) == own
    world.run(client)


@OWN
def test_a_request_that_has_ended_leaves_no_block(own: bool) -> None:
    client, world = ready(asynchronous=True)
    alone(world, own)
    world.add("b", PROMPT)
    output, _ = world.schedule()
    world.abort("b")
    world.finish(output, late=["b"])
    client.rows.clear()
    world.add("c", PROMPT, max_tokens=1)
    output, _ = world.schedule()
    assert (output.num_scheduled_tokens["c"] == 100) != own
    world.finish(output)
    world.run(client)


def test_a_load_into_a_request_that_has_its_blocks_fails() -> None:
    client, world = stored(200, blocks=128)
    report(world, 0.0003)
    world.add("b", PROMPT)
    longer = world.add("c", range(200))
    output, work = world.schedule()
    assert [bool(load.in_step) for load in work.loads] == [True, False]
    assert longer.status.name == "WAITING_FOR_REMOTE_KVS"
    assert longer.num_computed_tokens == 192
    world.finish(output, late=["b"], received=["c"])
    assert longer.num_computed_tokens == 0
    output, _ = world.schedule()
    assert sum(output.num_scheduled_tokens.values()) == 204, "one computes what both have"
    world.finish(output)
    world.run(client)
    assert list(longer.output_token_ids) == [7] * 4
    settled(client, world)


def test_offers_of_a_step_that_is_taken_back_are_not_stored() -> None:
    """The grant of what "b" computed after its load comes after the step was taken back."""
    client, world = ready()
    client.silent = True
    world.add("b", range(200), max_tokens=1)
    output, work = world.schedule()
    assert work.loads
    assert not work.stores
    assert world.planner.stores.offers()
    failed = work.number
    world.finish(output, late=["b"])
    assert not world.planner.stores.offers()
    client.silent = False
    _, work = world.schedule()
    assert work.recovered == failed


def test_a_load_that_cannot_be_handed_over_or_planned_fails_inside_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, world = ready()
    client.deaf = True
    request = world.add("b", PROMPT)
    output, work = world.schedule()
    (load,) = work.loads
    assert (load.lease, load.blocks, load.in_step) == (0, (), table(world, "b"))
    world.finish(output, late=["b"], tokens=BAD)
    client.deaf = False
    world.run(client)
    assert list(request.output_token_ids) == [7] * 4
    world.planner.in_step._trial = 0
    assert world.scheduler.reset_prefix_cache()
    world.tolerant = True
    monkeypatch.setattr(world.planner._make, "load", lambda *_: 1 / 0)
    world.add("c", PROMPT)
    _, work = world.schedule()
    (load,) = work.loads
    assert (load.lease, load.in_step) == (0, table(world, "c"))
