"""Stores planned by vLLM's real schedulers: when a chunk is offered, how long blocks are held."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvass.connectors.vllm.adapt import VllmBlockPool, VllmRequest, VllmStep
from kvass.engine import offers, stores
from kvass.engine.adapters import NoSalt
from kvass.engine.held_blocks import HUNG_S, POOL_SHARE
from kvass.engine.offers import OfferMaker
from kvass.engine.stores import StorePlanner
from tests.support.vllm.fake_client import FakeClient, split
from tests.support.vllm.scheduler import BLOCK, CHUNK, SchedulerHarness, multi_connector, rig

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def offered(client: FakeClient) -> list[tuple[int, int]]:
    """``(first, chunks)`` of every item ever offered."""
    return [(item.first, len(item.digests) // 32) for items in client.reserves for item in items]


def unstored(world: SchedulerHarness) -> float:
    """Requests of which something was not stored, since vLLM last asked."""
    counts: dict[str, float] = world.connector._planner.traffic.take()
    return counts.get("unstored_requests", 0)


def expected(request: Any, chunk: int) -> bytes:
    return bytes(request.block_hashes[(chunk + 1) * CHUNK // BLOCK - 1])


@BOTH
def test_a_prompt_is_stored_in_the_step_that_computes_it(asynchronous: bool) -> None:
    client, world = rig(asynchronous=asynchronous)
    request = world.add("a", range(100))
    output, work = world.schedule()
    (item,) = client.reserves[0]
    assert output.num_scheduled_tokens == {"a": 100}
    assert split(item.digests, 32) == [expected(request, c) for c in range(3)]
    assert (item.request, item.first, item.groups) == ("a", 0, 1)
    (store,) = work.stores
    table = world.scheduler.kv_cache_manager.get_block_ids("a")[0]
    assert store.blocks == (tuple(table[:6]),)
    assert store.step == work.step == 1
    assert client.handed == [store.reservation], "handed over before schedule() returned"


@pytest.mark.parametrize("options", [{}, multi_connector({}, 1)], ids=["alone", "in another one"])
def test_blocks_are_held_in_a_vllm_that_binds_no_block_pool(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """An open change of vLLM removes ``bind_gpu_block_pool`` (vllm 53067). In all tested versions
    vLLM calls ``bind_kv_cache_manager``, which is what leads there."""
    for kind in (KVConnectorBase_V1, MultiConnector):
        monkeypatch.delattr(kind, "bind_gpu_block_pool")
    monkeypatch.setattr(KVConnectorBase_V1, "bind_kv_cache_manager", lambda self, manager: None)
    _, world = rig(**options)
    world.add("a", range(100))
    world.schedule()
    blocks = world.scheduler.kv_cache_manager.get_block_ids("a")[0]
    assert [world.pool.blocks[i].ref_cnt for i in blocks] == [2] * 6 + [1]


def test_only_a_step_that_computes_nothing_waits_for_its_grant() -> None:
    client, world = rig(tails=True)
    world.add("a", range(50), max_tokens=34)
    world.run(client)
    assert client.waits == [False, False, True], "a prompt, a chunk, and a tail after the end"


def test_chunked_prefill_offers_each_chunk_once() -> None:
    client, world = rig(batched=48)
    world.add("a", range(128))
    steps = [[len(store.blocks[0]) for store in world.step().stores] for _ in range(4)]
    assert steps == [[2], [4], [2], []], "48, 96 and 128 tokens complete 1, 3 and 4 chunks"
    assert offered(client) == [(0, 1), (1, 3), (3, 4)]


@pytest.mark.parametrize("tokens", [31, 32, 33, 63, 64, 65])
def test_prompts_around_a_boundary_store_whole_chunks_only(tokens: int) -> None:
    client, world = rig()
    world.add("a", range(tokens), max_tokens=1)
    world.run(client)
    assert len(client.rows) == tokens // CHUNK


def test_generated_tokens_are_stored_when_their_chunk_is_computed() -> None:
    client, world = rig()
    request = world.add("a", range(30), max_tokens=8)
    for _ in range(2):
        world.step()
    assert request.num_tokens == 32, "the chunk's last token is sampled: its hash exists ..."
    assert client.reserves == [], "... but its KV does not"
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"a": 1}
    assert len(work.stores) == 1
    assert client.reserves[0][0].digests == expected(request, 0)


def test_between_two_chunks_a_step_looks_at_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most steps of most requests: they must cost next to nothing."""
    client, world = rig()
    world.add("a", range(33), max_tokens=40)
    world.step()
    looked = []

    def looking(request: VllmRequest) -> int:
        looked.append(request.computed_tokens)
        return len(request.vllm.block_hashes)

    monkeypatch.setattr(VllmRequest, "hashed_blocks", property(looking))
    for _ in range(35):
        world.step()
    assert offered(client) == [(0, 1), (1, 2)]
    assert set(looked) == {63}, "and in the step that completes the next chunk it does"


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_are_not_looked_at_change_nothing(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Requests come, go on, are aborted and end; grants come at once or later, or never."""

    quiet = StorePlanner._completes_nothing

    def history(shortcut: bool) -> tuple[list[Any], int]:
        chance, went, (client, world) = random.Random(seed), 0, rig(tails=seed % 2 == 0)

        def goes_on(planner: StorePlanner, step: Any) -> bool:
            nonlocal went
            went += (on := shortcut and quiet(planner, step))
            return on

        monkeypatch.setattr(StorePlanner, "_completes_nothing", goes_on)
        seen, live = list[Any](), list[str]()
        for number in range(250):
            client.late, client.silent = chance.choice([0, 0, 1, 2]), chance.random() < 0.02
            client.missing = chance.random() < 0.02
            if chance.random() < 0.04:
                live.append(f"r{number}")
                first, length = chance.choice([(0, 17), (100, 33), (200, 65), (300, 150)])
                length -= chance.choice([0, 0, chance.randrange(length)])  # or vLLM has all but one
                world.add(
                    live[-1], range(first, first + length), max_tokens=chance.randrange(200) + 1
                )
            if live and chance.random() < 0.01:
                world.abort(live.pop(chance.randrange(len(live))))
            live = [name for name in live if name in world.scheduler.requests]
            work = world.step()
            copied = [(store.request, store.blocks, store.computed) for store in work.stores]
            seen.append((len(client.reserves), copied))
        items = [[(i.request, i.first, i.digests, i.blocks) for i in r] for r in client.reserves]
        return [seen, items], went

    (plain, none), (quick, most) = history(False), history(True)
    assert quick == plain
    assert none == 0
    assert most > 100, "most steps"


def test_what_was_offered_in_vain_is_offered_again_between_two_chunks() -> None:
    client, world = rig()
    client.silent, client.patience = True, 100
    world.add("a", range(33), max_tokens=28)
    for _ in range(3):
        world.step()
    client.silent = False
    world.connector._planner.stores.abandon_pending()
    for _ in range(4):
        world.step()
    assert offered(client) == [(0, 1), (0, 1)]


def test_a_state_that_comes_between_two_chunks_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, world = rig()
    world.add("a", range(33), max_tokens=40)
    for _ in range(5):
        world.step()
    asked = []
    monkeypatch.setattr(VllmStep, "boundary_states", {"a": [(0, 1, CHUNK)]})
    monkeypatch.setattr(VllmBlockPool, "caches", lambda *known: asked.append(known))
    world.step()
    assert len(asked) == 1


def test_a_tail_of_which_the_daemon_gave_no_answer_is_offered_again() -> None:
    client, world = rig(tails=True)
    client.missing = True
    world.add("a", range(BLOCK + 1), max_tokens=8)
    world.step()
    client.missing = False
    for _ in range(5):
        world.step()
    tails = [item.blocks for items in client.reserves for item in items]
    assert len(tails) == 2
    assert tails[0] == tails[1] != b""


@pytest.mark.parametrize("limit", ["KEYS_PER_STEP", "ITEMS_PER_STEP"])
def test_a_tail_that_a_step_has_no_room_for_is_offered_in_a_later_one(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """Each prompt has two chunks and a block more: an item with seven hashes."""
    monkeypatch.setattr(offers, limit, 8 if limit == "KEYS_PER_STEP" else 1)
    client, world = rig(tails=True)
    for number in range(3):
        world.add(str(number), range(1000 * number, 1000 * number + 84), max_tokens=8)
    world.run(client)
    blocks = [(item.request, len(item.blocks) // 32) for (item,) in client.reserves]
    assert blocks == [("0", 5), ("1", 5), ("2", 5)]


def test_a_tail_whose_chunk_is_complete_meanwhile_is_waited_for_no_more() -> None:
    """Else each later step of the request would be looked at."""
    client, world = rig(tails=True)
    client.missing = True
    world.add("a", range(BLOCK + 1), max_tokens=60)
    world.step()
    planner = world.connector._planner.stores
    planner._backoff.steps_left = 16
    for _ in range(16):
        world.step()
    client.missing = False
    asked = len(client.reserves)
    for _ in range(3):
        world.step()
    assert len(client.reserves) == asked + 1
    assert planner._quiet_steps > 10


def test_asynchronously_a_generated_chunk_waits_for_its_hash() -> None:
    client, world = rig(asynchronous=True)
    request = world.add("a", range(30), max_tokens=8)
    first, second = world.schedule()[0], world.schedule()[0]
    world.finish(first)
    world.schedule()
    assert request.num_computed_tokens == 32, "the chunk's last token is being computed ..."
    assert request.num_tokens == 31
    assert client.reserves == [], "... but nobody knows yet which one it is"
    world.finish(second)
    assert len(world.schedule()[1].stores) == 1
    assert client.reserves[0][0].digests == expected(request, 0)


def test_rejected_drafts_are_never_stored() -> None:
    client, world = rig(drafts=3)
    request = world.add("a", range(30), max_tokens=8)
    world.step()
    for _ in range(2):
        world.draft("a", [9, 9, 9])
        output, work = world.schedule()
        assert output.num_scheduled_tokens == {"a": 4}, "positions 30..33 hold drafts"
        if not work.stores:
            world.finish(output, tokens=[7])
    assert request.num_tokens == 32
    assert len(work.stores) == 1, "chunk 0 ends at the last confirmed token"
    assert client.reserves[0][0].digests == expected(request, 0)


def test_accepted_drafts_are_stored_a_step_later() -> None:
    _, world = rig(drafts=3)
    request = world.add("a", range(30), max_tokens=8)
    world.step()
    world.draft("a", [5, 6, 7])
    assert world.step(tokens=[5, 6, 7, 8]).stores == [], "30..33 are drafts until confirmed"
    assert request.num_tokens == 35
    assert len(world.step().stores) == 1


def test_placeholders_of_asynchronous_drafts_are_never_stored() -> None:
    client, world = rig(asynchronous=True, drafts=3)
    request = world.add("a", range(24), max_tokens=16)
    inflight = [world.schedule()[0]]
    for _ in range(12):
        output, work = world.schedule()
        inflight.append(output)
        assert all(request.num_tokens >= CHUNK for _ in work.stores)
        if work.stores:
            break
        world.finish(inflight.pop(0), tokens=[7])
    assert len(work.stores) == 1
    assert request.num_computed_tokens > request.num_tokens, "drafts were in flight all along"
    assert client.reserves[0][0].digests == expected(request, 0)
    assert len(client.reserves) == 1


def test_a_refused_chunk_is_not_offered_again() -> None:
    client, world = rig()
    client.refuse = True
    world.add("a", range(64), max_tokens=40)
    for _ in range(20):
        world.step()
    assert offered(client) == [(0, 2)]
    client.refuse = False
    for _ in range(14):
        world.step()
    assert offered(client) == [(0, 2), (2, 3)]


def test_a_silent_daemon_is_asked_again_once_it_answers() -> None:
    client, world = rig()
    client.silent = True
    world.add("a", range(64), max_tokens=60)
    for _ in range(40):
        assert world.step().stores == []
    assert len(client.reserves) == 1
    client.silent = False
    stored = [len(store.blocks[0]) for _ in range(2) for store in world.step().stores]
    assert stored == [6], "with the chunk that was computed meanwhile"


def test_a_reserve_refused_whole_is_repeated_ever_more_rarely() -> None:
    client, world = rig()
    client.missing = True
    world.add("a", range(64), max_tokens=60)
    asked = []
    for step in range(40):
        before = len(client.reserves)
        world.step()
        asked += [step] * (len(client.reserves) - before)
    assert asked == [0, 1, 3, 7, 15, 24, 33]
    client.missing = False
    assert [len(store.blocks[0]) for _ in range(9) for store in world.step().stores] == [6]


@pytest.mark.parametrize("late", [0, 1])
def test_what_the_daemon_puts_off_is_asked_for_again(late: int) -> None:
    """Until all is stored, also if each answer comes in a later step and the requests are gone."""
    client, world = rig(batched=1000, blocks=400)
    client.most_items, client.late = 2, late
    free = world.free_blocks
    for i in range(5):
        world.add(f"r{i}", range(200 * i, 200 * i + 100), max_tokens=1)
    world.run(client)
    assert [len(items) for items in client.reserves] == [5, 3, 1]
    assert len(client.rows) == 15
    assert world.free_blocks == free
    assert not client.writing


def test_a_daemon_that_puts_off_everything_is_not_asked_for_ever() -> None:
    client, world = rig()
    client.most_items = 0
    free = world.free_blocks
    world.add("a", range(64), max_tokens=1)
    world.step()
    assert len(client.reserves) == 1
    world.run(client)
    assert world.free_blocks == free


def test_after_a_restart_a_running_request_is_offered_from_its_first_chunk() -> None:
    client, world = rig()
    world.add("a", range(64), max_tokens=60)
    client.commit(store.reservation for store in world.step().stores)
    client.rows.clear()
    client.boot = b"next"
    stored = []
    for _ in range(40):
        work = world.step()
        client.commit(store.reservation for store in work.stores)
        stored += [len(store.blocks[0]) for store in work.stores]
    assert stored == [2, 4], "chunk 2 shows that the daemon is another; then what it lacks"
    assert len(client.rows) == 3


def test_a_local_hit_that_no_daemon_holds_is_offered_from_its_first_chunk() -> None:
    client, world = rig()
    world.add("a", range(96))
    world.run(client)
    client.rows.clear()
    world.add("b", range(100))
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"b": 4}, "vLLM has the rest"
    assert [len(store.blocks[0]) for store in work.stores] == [6]


def test_a_consumer_stores_nothing() -> None:
    client, world = rig(kv_role="kv_consumer")
    world.add("a", range(64))
    world.run()
    assert client.reserves == []


# ---------------------------------------------------------------- blocks held and freed


@BOTH
@pytest.mark.parametrize("end", ["finish", "abort"])
def test_blocks_are_held_until_reported(asynchronous: bool, end: str) -> None:
    _, world = rig(asynchronous=asynchronous)
    free = world.free_blocks
    world.add("a", range(100), max_tokens=1)
    output, work = world.schedule()
    if end == "abort":
        world.abort("a")
    world.finish(output)
    assert free - world.free_blocks == 6, "three chunks; the rest of the request's blocks is free"
    assert not world.scheduler.reset_prefix_cache()
    assert world.scheduler.has_requests(), "the engine keeps stepping to hear of the store"
    output, _ = world.schedule()
    world.finish(output, reported=[work.step])
    assert world.free_blocks == free
    assert world.scheduler.reset_prefix_cache()
    world.run()
    assert not world.connector.has_pending_push_work()


def test_blocks_of_several_steps_are_freed_step_by_step() -> None:
    _, world = rig(batched=32)
    free = world.free_blocks
    world.add("a", range(64), max_tokens=1)
    first, work_1 = world.schedule()
    world.finish(first)
    second, work_2 = world.schedule()
    world.finish(second, reported=[work_2.step])
    assert free - world.free_blocks == 2
    third, _ = world.schedule()
    world.finish(third, reported=[work_1.step])
    assert free == world.free_blocks


def test_blocks_of_a_preempted_request_stay_held_and_are_waited_for() -> None:
    client, world = rig(blocks=9)
    a = world.add("a", range(32), max_tokens=90)
    b = world.add("b", range(50, 82), max_tokens=60)
    output, work = world.schedule()
    stored = {i for store in work.stores for i in store.blocks[0]}
    assert len(stored) == 4
    world.finish(output)
    for _ in range(100):
        output, _ = world.schedule()
        if not output.num_scheduled_tokens:
            break
        world.finish(output)
        grown = set(world.scheduler.kv_cache_manager.get_block_ids("a")[0][2:])
        assert not grown & stored, "a block that is being copied went to someone else"
    assert b.num_preemptions == 1
    assert world.connector.has_pending_block_frees(), "two blocks wait for the store alone ..."
    assert a.num_preemptions == 0, "... which is better than preempting once more"
    world.finish(output, reported=list(world.open_steps))
    assert not world.connector.has_pending_block_frees()
    world.run(client)
    assert (a.num_tokens, b.num_tokens) == (122, 92)
    assert world.free_blocks == 8


def test_a_store_that_hangs_costs_its_blocks_and_not_the_engine() -> None:
    """No rank ever reports it; the engine neither waits for its blocks nor goes on stepping."""
    client, world = rig(blocks=11)
    client.deadline_s = time.monotonic() - HUNG_S
    a = world.add("a", range(32), max_tokens=90)
    b = world.add("b", range(50, 82), max_tokens=60)
    output, hanging = world.schedule()
    stored = {i for store in hanging.stores for i in store.blocks[0]}
    assert len(stored) == 4
    client.refuse = True
    world.finish(output)
    for _ in range(400):
        if not world.scheduler.has_requests():
            break
        output, _ = world.schedule()
        grown = set(world.scheduler.kv_cache_manager.get_block_ids("a")[0][2:])
        assert not grown & stored, "a block that may still be read went to someone else"
        world.finish(output)
    assert not world.scheduler.has_requests(), "it stopped, as for SIGTERM, a pause or sleep"
    assert (a.num_tokens, b.num_tokens) == (122, 92)
    assert b.num_preemptions >= 1
    assert world.free_blocks == 10 - 4
    world.add("late", range(200, 210), max_tokens=1)
    output, _ = world.schedule()
    world.finish(output, reported=[hanging.step])
    assert world.free_blocks == 10, "and if it was only very slow they come back"


def test_a_step_counts_only_when_every_rank_reported_it() -> None:
    from kvass.connectors.vllm.adapt import StepReport

    both = StepReport({1: 1, 2: 1}).aggregate(StepReport({2: 1, 3: 1}))
    assert both.steps == {1: 1, 2: 2, 3: 1}


# ---------------------------------------------------------------- grants that come late


LATE = pytest.mark.parametrize("late", [1, 3])


def all_free(world: SchedulerHarness) -> bool:
    return bool(world.free_blocks == world.pool.num_gpu_blocks - 1)


@BOTH
@LATE
@pytest.mark.parametrize("end", ["finish", "abort"])
def test_a_grant_that_comes_after_the_request_is_used(
    asynchronous: bool, late: int, end: str
) -> None:
    client, world = rig(asynchronous=asynchronous)
    client.late = late
    world.add("a", range(100), max_tokens=1)
    output, work = world.schedule()
    assert work.stores == []
    table = world.scheduler.kv_cache_manager.get_block_ids("a")[0]
    if end == "abort":
        world.abort("a")
    world.finish(output)
    for _ in range(late):
        assert not world.scheduler.requests or asynchronous
        assert world.scheduler.has_requests(), "the engine keeps stepping"
        assert len(client.handed) == 0
        assert world.pool.num_gpu_blocks - 1 - world.free_blocks == 6, "three chunks are held"
        output, work = world.schedule()
        world.finish(output)
    (store,) = work.stores
    assert store.blocks == (tuple(table[:6]),)
    assert (store.computed, work.number) == (1, 1 + late)
    assert client.handed == [store.reservation]
    assert not all_free(world)
    client.commit(client.handed)
    world.run(client)
    assert all_free(world)
    assert len(client.rows) == 3
    assert offered(client) == [(0, 3)]


@LATE
def test_later_chunks_are_offered_while_earlier_ones_await_their_grant(late: int) -> None:
    client, world = rig(batched=48)
    client.late = late
    world.add("a", range(128))
    world.run(client)
    assert offered(client) == [(0, 1), (1, 3), (3, 4)], "each once"
    assert len(client.rows) == 4
    assert all_free(world)


def test_a_preempted_request_is_stored_from_the_blocks_that_it_had() -> None:
    """vLLM takes them away while no copy has begun: nobody else gets them until it is over."""
    client, world = rig(blocks=12)
    client.late = client.patience = 3
    world.add("a", range(32), max_tokens=2)
    output, _ = world.schedule()
    table = list(world.scheduler.kv_cache_manager.get_block_ids("a")[0])
    world.finish(output)
    (request,) = world.scheduler.running
    world.scheduler.running.remove(request)
    world.scheduler._preempt_request(request, 0.0)
    world.add("b", range(500, 516), max_tokens=1)
    stores = []
    for _ in range(4):
        output, work = world.schedule()
        stores += work.stores
        world.finish(output)
    assert stores[0].blocks == (tuple(table[:2]),)
    world.run(client)
    assert all_free(world)


def test_a_request_that_ends_while_it_loads_leaves_nothing() -> None:
    """It was preempted amid its prompt, and loads into new blocks what it had computed before, and
    more: until the load is over these blocks may hold anything."""
    client, world = rig(batched=80, tails=True)
    request = world.add("a", range(200))
    world.step()
    client.commit(list(client.writing))
    world.scheduler.running.remove(request)
    world.scheduler._preempt_request(request, 0.0)
    world.scheduler.reset_prefix_cache()
    client.rows.update(expected(request, chunk) for chunk in range(6))
    asked = len(client.reserves)
    (load,) = world.step().loads
    assert load.request == "a"
    assert request.num_computed_tokens == 192
    world.abort("a")
    world.step()
    assert client.reserves[asked:] == [], "block 4 is computed no more, and not loaded yet"


@pytest.mark.parametrize("limit", ["KEYS_PER_STEP", "ENDED_PER_STEP"])
def test_what_many_ended_requests_leave_fits_a_message(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """The daemon refuses a reserve of too many hashes whole. What does not fit waits a step."""
    if limit == "KEYS_PER_STEP":
        monkeypatch.setattr(offers, limit, 8)
    else:
        monkeypatch.setattr(stores, limit, 2)
    client, world = rig(tails=True)
    for name in "abc":
        world.add(name, range(84), max_tokens=30)
    world.run(client)
    left = [
        sum(len(item.digests) // 32 == item.first == 3 for item in items)
        for items in client.reserves
    ]
    assert left[-2:] == [2, 1], "each leaves a block of its fourth chunk"
    blobs = [[item.digests + item.blocks for item in items] for items in client.reserves]
    if limit == "KEYS_PER_STEP":
        assert max(len(b"".join(each)) // 32 for each in blobs) <= 8
    assert unstored(world) == 0
    assert all_free(world)


@pytest.mark.parametrize("tails", [True, False])
def test_what_waited_longest_for_its_grant_is_kept_when_too_much_waits(tails: bool) -> None:
    """A daemon that answers eight steps late, and a quarter of the pool is four prompts."""
    client, world = rig(blocks=65, batched=64, tails=tails)
    client.late, client.patience = 8, 100
    counted = Counter[str]()
    take = world.connector.get_kv_connector_stats

    def asked() -> Any:
        if (stats := take()) is not None:
            counted.update(stats.to_dict())
        return stats

    world.connector.get_kv_connector_stats = asked
    requests = [world.add(str(n), range(1000 * n, 1000 * n + 64), max_tokens=1) for n in range(24)]
    world.run(client)
    stored = [expected(request, 1) in client.rows for request in requests]
    assert stored[0]
    assert sum(stored) >= 8
    assert counted["unstored_requests"] == len(stored) - sum(stored)
    assert all_free(world)


def test_what_ends_while_a_daemon_that_refused_is_not_asked_is_offered_then() -> None:
    client, world = rig(tails=True)
    client.missing = True
    world.add("a", range(64), max_tokens=60)
    for _ in range(4):
        world.step()
    assert len(client.reserves) == 3
    client.missing = False
    b = world.add("b", range(1000, 1064), max_tokens=1)
    c = world.add("c", range(2000, 2064), max_tokens=1)
    world.run(client)
    assert {expected(b, 1), expected(c, 1)} <= client.rows
    assert all_free(world)


@pytest.mark.parametrize("what", ["lost", "hung"])
@BOTH
def test_without_an_answer_the_blocks_come_back(asynchronous: bool, what: str) -> None:
    client, world = rig(asynchronous=asynchronous)
    client.silent = True
    world.add("gone", range(1000, 1064), max_tokens=1)
    alive = world.add("a", range(64), max_tokens=60)
    world.step()
    world.step()
    assert world.pool.num_gpu_blocks - 1 - world.free_blocks >= 8
    if what == "lost":
        client.connected = False
        world.step()
    else:
        while not client.given_up:
            world.step()
    used = len(world.scheduler.kv_cache_manager.get_block_ids("a")[0])
    assert world.pool.num_gpu_blocks - 1 - world.free_blocks == used, "the other's are free"
    assert not world.connector.has_pending_push_work()
    assert alive.num_tokens < 75
    client.connected, client.silent = True, False
    world.run(client)
    assert client.rows >= {expected(alive, 0), expected(alive, 1)}, "offered again"
    assert all_free(world)


def test_a_tail_without_an_answer_is_offered_again() -> None:
    """A short prompt has nothing else to store."""
    client, world = rig(tails=True)
    client.silent = True
    world.add("a", range(16), max_tokens=12)
    while not client.given_up:
        world.step()
    client.silent = False
    asked = len(client.reserves)
    world.run(client)
    assert [len(item.blocks) // 32 for items in client.reserves[asked:] for item in items] == [1]
    assert all_free(world)


def test_vllm_gets_the_blocks_when_it_has_too_few() -> None:
    """It preempts nobody for a grant that may come."""
    client, world = rig(blocks=11)
    client.silent, client.patience = True, 10_000
    world.add("gone", range(1000, 1032), max_tokens=1)
    a = world.add("a", range(32), max_tokens=110)
    world.step()
    assert a.num_preemptions == 0
    world.step()
    assert world.free_blocks == 10 - 2 - 3, "two of the request that is gone are held"
    while world.scheduler.requests:
        world.step()
    assert a.num_tokens == 142, "it needed nine of the ten"
    assert a.num_preemptions == 0
    client.silent = False
    world.run(client)
    assert all_free(world)


def test_when_blocks_are_short_a_grant_of_the_next_step_is_awaited() -> None:
    """Else an engine with little memory would store nothing of requests that end."""
    client, world = rig(blocks=8)
    client.late = 1
    world.add("gone", range(1000, 1032), max_tokens=1)
    a = world.add("a", range(80), max_tokens=20)
    world.step()
    assert world.free_blocks == 0, "two of the request that is gone await a grant"
    output, work = world.schedule()
    assert not output.num_scheduled_tokens, "one step without a"
    assert [store.request for store in work.stores] == ["gone", "a"]
    world.finish(output, reported=list(world.open_steps))
    world.run(client)
    assert (a.num_tokens, a.num_preemptions, client.given_up) == (100, 0, 0)
    assert all_free(world)


def test_when_blocks_are_short_nobody_waits_for_the_digest_of_an_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, world = rig(blocks=8, tails=True)
    world.add("gone", range(1000, 1032), max_tokens=1)
    a = world.add("a", range(80), max_tokens=20)
    known = OfferMaker.adapter_of
    pending = lambda self, state: NoSalt.PENDING  # noqa: E731
    monkeypatch.setattr(OfferMaker, "adapter_of", pending)
    for _ in range(5):
        world.step()
    assert a.num_tokens > 82
    assert a.num_preemptions == 0
    monkeypatch.setattr(OfferMaker, "adapter_of", known)
    world.run(client)
    assert all_free(world)


def test_waiting_for_grants_keeps_only_a_share_of_the_blocks_from_being_free() -> None:
    client, world = rig(blocks=65)
    client.silent, client.patience = True, 10_000
    for number in range(20):
        world.add(str(number), range(1000 * number, 1000 * number + 64), max_tokens=1)
        world.step()
        assert 64 - world.free_blocks <= 64 // POOL_SHARE + 4
    assert client.given_up
    client.silent = False
    world.run(client)
    assert all_free(world)


def test_reset_cache_awaits_no_grant_of_before() -> None:
    client, world = rig()
    client.late = 2
    world.add("a", range(64), max_tokens=1)
    world.step()
    assert world.connector.reset_cache() is True
    assert all_free(world)
    assert client.given_up == 1
    world.run(client)
    assert client.handed == []


# ---------------------------------------------------------------- clearing, and defects of our own


def test_without_a_daemon_the_cache_is_reset_too() -> None:
    """The client owes the daemon a Clear from now on."""
    client, world = rig()
    client.connected = False
    assert world.connector.reset_cache() is True


def test_a_defect_while_planning_stores_costs_the_store_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, world = rig()
    monkeypatch.setattr(client, "begin_reserve", lambda items, width, wait: 1 / 0)
    world.tolerant = True
    request = world.add("a", range(64), max_tokens=4)
    world.run()
    assert request.num_tokens == 68
    assert client.steps >= 4
    assert world.connector._boundary.counters["plan"] >= 4
    assert len([r for r in caplog.records if r.name == "kvass.engine"]) == 1, "logged once"


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_defect_amid_the_grants_gives_back_what_it_did_not_plan(
    monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    client, world = rig()
    world.tolerant = True
    planner = world.connector._planner
    plan, planned = planner._spans.to_store, []

    def break_one(*args: Any) -> Any:
        planned.append(args)
        return plan(*args) if len(planned) != broken + 1 else 1 / 0

    monkeypatch.setattr(planner._spans, "to_store", break_one)
    for number, name in enumerate("abc"):
        world.add(name, range(1000 * number, 1000 * number + 64), max_tokens=1)
    output, work = world.schedule()
    stores = [store.reservation for store in work.stores]
    assert len(client.reserves[0]) == 3
    assert len(stores) == broken
    assert list(client.writing) == client.handed == stores, "the rest is aborted, once"
    client.commit(stores)
    world.finish(output, reported=list(world.open_steps))
    world.run(client)
    assert client.writing == {}
    assert world.free_blocks == world.pool.num_gpu_blocks - 1


@BOTH
def test_a_store_that_cannot_be_handed_over_is_off(asynchronous: bool) -> None:
    client, world = rig(asynchronous=asynchronous)
    client.deaf = True
    world.add("a", range(100), max_tokens=1)
    output, work = world.schedule()
    assert (work.stores, work.step) == ([], 0)
    assert client.writing == {}, "aborted"
    world.finish(output)
    world.run(client)
    assert world.free_blocks == world.pool.num_gpu_blocks - 1
