"""Loads planned by vLLM's real schedulers: matching, allocating, waiting, failing, ending early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvass.connectors.vllm.adapt import StepReport
from kvass.engine import planner
from kvass.engine.copy_speed import Copied
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import (
    CHUNK,
    FIXED,
    SchedulerHarness,
    before,
    make_multi_configs,
    rig,
)

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
PROMPT = range(100)


def stored(tokens: int = 100, **options: Any) -> tuple[FakeClient, SchedulerHarness]:
    """A world whose daemon holds all whole chunks of ``range(tokens)``, and whose engine none."""
    client, world = rig(**options)
    world.add("writer", range(tokens), max_tokens=1)
    world.run(client)
    assert world.scheduler.reset_prefix_cache()
    client.lookups.clear()
    client.handed.clear()
    return client, world


def settled(client: FakeClient, world: SchedulerHarness) -> None:
    """Nothing is owed, held or used any more."""
    assert not client.held
    assert not client.taken
    assert not world.scheduler.has_requests()
    assert world.free_blocks == world.pool.num_gpu_blocks - 1
    assert world.scheduler.reset_prefix_cache()


@BOTH
def test_a_hit_loads_before_it_is_scheduled(asynchronous: bool) -> None:
    client, world = stored(asynchronous=asynchronous)
    request = world.add("b", PROMPT)
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {}
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    (load,) = work.loads
    table = world.scheduler.kv_cache_manager.get_block_ids("b")[0]
    assert load.blocks == (tuple(table[:6]),)
    assert (load.request, load.skip, len(load.slots[0])) == ("b", (0,), 3)
    assert client.handed == [load.lease], "handed over before schedule() returned"
    world.finish(output, received=["b"])
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"b": 4}
    assert work.loads == work.stores == []
    assert client.released == [], "the second call for a load gives nothing back: it is the rank's"
    world.finish(output)
    world.run(client)
    assert client.lookups == [("b", 0)]
    settled(client, world)


@pytest.mark.parametrize("tokens", [31, 32, 33, 63, 64, 65, 95, 96, 97])
def test_prompts_around_a_boundary_load_whole_chunks(tokens: int) -> None:
    client, world = stored()
    world.add("b", range(tokens))
    output, work = world.schedule()
    chunks = tokens // CHUNK
    assert [len(load.slots[0]) for load in work.loads] == ([chunks] if chunks else [])
    world.finish(output, received=[load.request for load in work.loads])
    if chunks:
        output, _ = world.schedule()
        left = tokens - chunks * CHUNK
        assert output.num_scheduled_tokens == {"b": max(left, 1)}, "the last token is computed"
        world.finish(output)
    world.run(client)
    settled(client, world)


def test_a_local_hit_that_ends_inside_a_chunk_is_kept() -> None:
    client, world = stored()
    world.add("short", range(50), max_tokens=1)
    client.rows, rows = set(), client.rows
    world.run()
    client.rows = rows
    world.add("b", PROMPT)
    output, work = world.schedule()
    (load,) = work.loads
    assert client.lookups[-1] == ("b", 1), "48 tokens are local: chunk 0 and half of chunk 1"
    assert (load.skip, len(load.slots[0])) == ((1,), 2)
    table = world.scheduler.kv_cache_manager.get_block_ids("b")[0]
    assert load.blocks == (tuple(table[2:6]),)
    world.finish(output, received=["b"])
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"b": 4}
    assert len(client.reserves[-1]) == 1, "chunk 0 was no part of the match: it is offered"
    world.finish(output)
    world.run(client)
    settled(client, world)


def test_a_local_hit_that_covers_everything_asks_nothing() -> None:
    client, world = stored()
    world.add("b", PROMPT, max_tokens=1)
    world.run(client)
    before = len(client.lookups)
    world.add("c", PROMPT, max_tokens=1)
    world.run(client)
    assert len(client.lookups) == before
    settled(client, world)


def test_a_local_hit_that_shrinks_between_asks_is_looked_up_again() -> None:
    client, world = stored(blocks=10)
    world.add("short", range(64), max_tokens=1)
    client.rows, rows = set(), client.rows
    world.run()
    client.rows = rows
    world.add("hog", range(500, 564), max_tokens=24)
    world.step()
    world.add("b", PROMPT)
    world.step()
    assert client.lookups[-1] == ("b", 2)
    first = client.held["b"].lease
    for _ in range(40):
        output, work = world.schedule()
        world.finish(output, received=[load.request for load in work.loads])
        if first in client.released:
            break
    name, second = client.lookups[-1]
    assert name == "b"
    assert second < 2, "the hog took the local blocks meanwhile"
    world.run(client)
    settled(client, world)


def test_an_allocation_that_fails_keeps_the_match_and_asks_once() -> None:
    client, world = stored(blocks=10)
    hog = world.add("hog", range(500, 596), max_tokens=8)
    world.step()
    request = world.add("b", PROMPT)
    for _ in range(3):
        assert world.step().loads == []
    assert request.status.name == "WAITING"
    assert client.lookups == [("hog", 0), ("b", 0)]
    assert list(client.held) == ["b"]
    world.run(client)
    assert (hog.num_tokens, request.num_tokens) == (104, 104)
    assert client.released == []
    settled(client, world)


def test_a_pending_lookup_is_asked_again() -> None:
    client, world = stored()
    client.pending = 2
    world.add("b", PROMPT)
    assert [len(world.step().loads) for _ in range(2)] == [0, 0]
    output, work = world.schedule()
    assert len(work.loads) == 1
    world.finish(output, received=["b"])
    world.run(client)
    settled(client, world)


# ---------------------------------------------------------------- too few blocks for all


@BOTH
@pytest.mark.parametrize("ends", ["received", "failed"])
def test_who_has_no_room_does_not_stop_a_load_that_ended_behind_it(
    asynchronous: bool, ends: str
) -> None:
    """Of 30 blocks "l" holds 26, or if its load failed they are reserved for it, and "h" needs more
    than the others. vLLM 0.30 stops at "h", later versions come to "l" first."""
    client, world = stored(416, blocks=31, asynchronous=asynchronous)
    client.pending = 1
    world.add("h", range(416) if ends == "failed" else range(1000, 1112))
    world.add("l", range(417))
    output, work = world.schedule()
    assert [load.request for load in work.loads] == ["l"]
    assert world.free_blocks == 4
    world.finish(output)
    if ends == "received":  # else "h" and "small" have room at once, with what "l" computes
        world.add("small", range(2000, 2010))
    world.step(**{ends: ["l"]})
    began = list[str]()
    for _ in range(30):
        output, work = world.schedule()
        loads, reported = [load.request for load in work.loads], list(world.open_steps)
        began += [name for name in (*output.num_scheduled_tokens, *loads) if name not in began]
        world.finish(output, reported=reported, received=loads)
    assert began == ["l", "h", "small"][: 2 + (ends == "received")], "and nobody overtakes"
    settled(client, world)


def test_a_load_that_another_connector_failed_is_the_requests_last() -> None:
    """vLLM counts the room that is reserved for the request against a second load of it."""
    rows = set(stored(416)[0].rows)
    client = FakeClient()
    world = SchedulerHarness(client, configs=make_multi_configs(FIXED, others=1, blocks=31))
    request = world.add("other", range(417))
    output, work = world.schedule()
    assert work.loads == []
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    world.finish(output, failed=["other"])
    client.rows = rows
    assert world.schedule()[0].num_scheduled_tokens == {"other": 417}


# ---------------------------------------------------------------- ends at every stage


def test_what_the_ranks_copied_reaches_the_scheduler() -> None:
    slow, fast = Copied(1 << 20, 0.5, (64,)), Copied(1 << 20, 0.1, (64,))
    both = StepReport(copied={0: slow}).aggregate(StepReport(copied={1: fast}))
    assert both.copied == {0: slow, 1: fast}
    first = StepReport(in_step={"a": True, "b": False, "c": True}, failed_step=2)
    both = first.aggregate(StepReport(in_step={"a": False, "b": True, "c": True, "d": False}))
    assert both.in_step == {"a": False, "b": False, "c": True, "d": False}
    assert both.failed_step == 2
    _client, world = stored()
    world.step(copied={0: slow})
    assert world.planner.copy_speed.seconds([1 << 15]) == 1.0


def pending(client: FakeClient, world: SchedulerHarness) -> None:
    client.pending = 100
    world.add("b", PROMPT)
    world.step()


def matched(client: FakeClient, world: SchedulerHarness) -> None:
    world.add("hog", range(500, 900), max_tokens=60)
    world.step()
    world.add("b", PROMPT)
    world.step()
    assert list(client.held) == ["b"]


def loading(client: FakeClient, world: SchedulerHarness) -> None:
    world.add("b", PROMPT)
    world.step()


def loaded(client: FakeClient, world: SchedulerHarness) -> None:
    world.add("b", PROMPT)
    world.step()
    world.step(received=["b"])


def running(client: FakeClient, world: SchedulerHarness) -> None:
    loaded(client, world)
    world.step()


@BOTH
@pytest.mark.parametrize("stage", [pending, matched, loading, loaded, running])
def test_an_abort_leaves_nothing_behind(
    stage: Callable[[FakeClient, SchedulerHarness], None], asynchronous: bool
) -> None:
    client, world = stored(blocks=32, asynchronous=asynchronous)
    stage(client, world)
    world.abort("b")
    assert not client.held
    assert not client.taken
    if stage is loading:
        world.step()
        assert "b" in world.scheduler.requests, "its blocks are still being written"
        world.step(received=["b"])
    assert len(client.released) == (stage is matched), "what was handed over is the rank's"
    if stage is matched:
        world.abort("hog")
    world.run(client)
    assert "b" not in world.scheduler.requests
    settled(client, world)


@BOTH
def test_a_failed_load_is_recomputed_and_asks_nothing_again(asynchronous: bool) -> None:
    client, world = stored(asynchronous=asynchronous)
    client.rows, rows = set(client.rows), client.rows
    request = world.add("b", PROMPT)
    world.step()
    client.rows.clear()
    client.reserves.clear()
    world.step(failed=["b"])
    client.rows |= rows
    output, _ = world.schedule()
    assert output.num_scheduled_tokens == {"b": 100}
    assert client.lookups == [("b", 0)]
    assert [item.first for item in client.reserves[0]] == [0], "and its chunks are offered again"
    world.finish(output)
    world.run(client)
    assert request.num_tokens == 104
    assert client.lookups == [("b", 0)]
    settled(client, world)


def test_a_preempted_request_loads_no_second_time() -> None:
    client, world = stored(blocks=12)
    request = world.add("b", PROMPT, max_tokens=20)
    world.step()
    world.step(received=["b"])
    world.step()
    world.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    assert world.step().loads == []
    assert client.lookups == [("b", 0)]
    world.run(client)
    assert request.num_tokens == 120
    settled(client, world)


def test_skip_reading_prefix_cache_takes_no_lease_but_stores() -> None:
    client, world = stored()
    client.rows.clear()
    world.add("b", PROMPT, reads=False)
    work = world.step()
    assert client.lookups == []
    assert len(work.stores) == 1
    world.run(client)
    settled(client, world)


@pytest.mark.parametrize("tokens", [0, 64])
def test_a_load_of_other_tokens_than_matched_is_given_back(tokens: int) -> None:
    """None is no load; of any others the load fails."""
    client, world = stored()
    request = world.add("b", PROMPT)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (96, True)
    lease = client.held["b"].lease
    blocks = world.scheduler.kv_cache_manager.empty_kv_cache_blocks
    world.connector.update_state_after_alloc(request, blocks, tokens)
    assert client.released == [lease]
    assert client.held == {}
    if tokens:
        (load,) = world.schedule()[1].loads
        assert (load.request, load.lease) == ("b", 0)


# ---------------------------------------------------------------- when things go wrong


def test_a_connection_lost_between_match_and_allocation_fails_the_load() -> None:
    client, world = stored()
    request = world.add("b", PROMPT)
    client.take = lambda name: client.give_back(name)  # type: ignore[method-assign,assignment]
    output, work = world.schedule()
    (load,) = work.loads
    assert load.lease == 0
    assert client.handed == []
    world.finish(output, failed=["b"])
    world.run(client)
    assert request.num_tokens == 104
    settled(client, world)


def test_a_defect_while_planning_a_load_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client, world = stored()
    request = world.add("b", PROMPT)
    monkeypatch.setattr(world.planner._make, "load", lambda *_: 1 / 0)
    world.tolerant = True
    output, work = world.schedule()
    assert [(load.request, load.lease) for load in work.loads] == [("b", 0)]
    world.finish(output, failed=["b"])
    world.run(client)
    assert request.num_tokens == 104


def test_a_defect_while_matching_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    client, world = stored()
    monkeypatch.setattr(client, "find", lambda *_: 1 / 0)
    world.tolerant = True
    world.add("b", PROMPT)
    output, _ = world.schedule()
    assert output.num_scheduled_tokens == {"b": 100}


def test_vllm_is_told_to_recompute_and_to_deliver_nothing() -> None:
    _, world = stored()
    assert world.scheduler.recompute_kv_load_failures
    assert world.connector.requires_kv_delivery is False
    if not before("0.32.0"):
        assert world.connector._cache_hit_source.name == "HOST"


def test_waits_are_counted_per_step() -> None:
    client, world = stored()
    before = client.steps
    for name in "bcd":
        world.add(name, range(200, 300))
    world.step()
    assert client.steps == before + 1


def test_a_load_that_cannot_be_handed_over_fails() -> None:
    client, world = stored()
    client.deaf = True
    world.add("b", PROMPT)
    output, work = world.schedule()
    assert [(load.request, load.lease) for load in work.loads] == [("b", 0)]
    assert len(client.released) == 1
    world.finish(output, received=["b"], failed=["b"])
    output, _ = world.schedule()
    assert output.num_scheduled_tokens == {"b": 100}, "computed instead"
    world.finish(output)
    world.run(client)
    settled(client, world)


def test_what_is_still_loading_when_its_request_is_aborted_is_not_stored() -> None:
    """The engine has the first chunk itself, so that nothing of the prompt counts as stored."""
    client, world = stored(tails=True)
    world.add("first", PROMPT[:33], max_tokens=1)
    world.run(client)
    client.reserves.clear()
    request = world.add("b", PROMPT)
    output, work = world.schedule()
    assert (len(work.loads), request.num_computed_tokens) == (1, 96)
    world.abort("b")
    world.finish(output, received=["b"])
    for _ in range(3):
        world.step()
    assert client.reserves == []


@pytest.mark.parametrize("end", ["load", "abort"])
def test_a_load_that_vllm_defers_begins_when_it_says_so(end: str) -> None:
    """For HiSparse vLLM 0.33 tells of the blocks only when earlier steps are over."""
    client, world = stored(asynchronous=True)
    if not hasattr(world.scheduler, "deferred_loads"):
        pytest.skip("this vLLM defers no loads")
    world.scheduler.defer_block_free = world.scheduler.defer_async_loads = True
    world.add("a", range(200, 240))
    earlier, _ = world.schedule()
    world.add("b", PROMPT)
    output, work = world.schedule()
    assert list(world.scheduler.deferred_loads) == ["b"]
    assert work.loads == []
    if end == "abort":
        world.abort("b")
    world.finish(earlier)
    world.finish(output)
    assert not world.scheduler.deferred_loads
    output, work = world.schedule()
    assert [load.request for load in work.loads] == ["b"] * (end == "load")
    assert all(load.lease in client.handed for load in work.loads)
    world.finish(output, received=[load.request for load in work.loads])
    world.run(client)
    settled(client, world)


def test_a_miss_is_looked_up_again_when_blocks_came_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the request waits for them, another engine stores what it needs."""
    monkeypatch.setattr(planner, "ASK_AGAIN_S", 1e9)
    client, _ = stored()
    rows = set(client.rows)
    small = SchedulerHarness(client, blocks=9)
    small.add("a", range(1000, 1100), max_tokens=20)
    small.step()
    client.rows.clear()
    asked = len(client.lookups)
    small.add("b", PROMPT)
    for _ in range(5):
        small.step()
    assert len(client.lookups) == asked + 1, "its miss stays one"
    client.rows |= rows
    small.abort("a")
    _, work = small.schedule()
    assert [load.request for load in work.loads] == ["b"]
