"""Shadow mode in vLLM's real schedulers: the engine is never told of a hit and never waits, each
lease is handed over or released, and the figures are right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.connectors.vllm.adapt import KVConnectorRole
from kvass.connectors.vllm.entry import KvassConnector
from kvass.connectors.vllm.shadow_connector import ShadowConnector
from kvass.engine.request_state import Answer
from kvass.engine.shadow import FIRST_LENGTH, UNPRICED, ShadowHit, SpeedByLength
from kvass.engine.step_work import Compared, GroupCompared, Load, comparable
from kvass.errors import ConfigError
from kvass.messages import ShadowReport
from kvass.types import Slots
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import SchedulerHarness, make_configs, read_setup, rig

PROMPT = range(100)
HIT = 96
"""All whole chunks of the prompt."""
SHADOW: dict[str, object] = {"kvass.shadow": True}


def stored(**options: Any) -> tuple[FakeClient, SchedulerHarness]:
    """A world in shadow mode whose daemon holds all whole chunks of the prompt."""
    client, world = rig(options={**SHADOW, **options.pop("options", {})}, **options)
    world.add("writer", PROMPT, max_tokens=1)
    world.run(client)
    assert world.scheduler.reset_prefix_cache()
    client.lookups.clear()
    client.handed.clear()
    return client, world


def settled(client: FakeClient, world: SchedulerHarness) -> None:
    """Nothing is owed, held or used any more."""
    assert not client.held
    assert not client.taken
    assert world.free_blocks == world.pool.num_gpu_blocks - 1


def report(client: FakeClient) -> ShadowReport:
    """The last report."""
    assert client.shadow is not None
    return client.shadow


def compare_once(
    client: FakeClient, world: SchedulerHarness, name: str, found: GroupCompared
) -> None:
    """A request whose hit was compared with that result."""
    world.add(name, PROMPT, max_tokens=1)
    output, _ = world.schedule()
    result = Compared(name, 0, load_bytes=300, load_s=0.25, groups=(found,))
    world.finish(output, reported=list(world.open_steps), compared=[result])
    world.run(client)
    assert world.scheduler.reset_prefix_cache()


def test_noise_is_no_warning_and_each_doubling_of_wrong_rows_is_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvass")
    client, world = stored()
    caplog.clear()
    noise = GroupCompared(rows=3, differing_rows=3, largest_difference=1.0, at_value=64.0, chunk=1)
    wrong = replace(noise, wrong_rows=1, worst_wrong=(0.88, 0.89, 2))
    compare_once(client, world, "a", noise)
    assert not [line for line in caplog.records if line.levelname == "WARNING"]
    for number in range(4):
        compare_once(client, world, f"b{number}", wrong)
    told = [line.message for line in caplog.records if line.levelname == "WARNING"]
    assert len(told) == 3, "the first, the second and the fourth"
    assert "differs from computed KV by up to 0.88, at a value of 0.89" in told[0]
    assert "chunk 2 of request b0" in told[0]
    assert told[0].endswith(": see docs/wrong-tokens.md")
    shown = report(client).groups[0]
    assert (shown.wrong_rows, shown.largest_difference, shown.at_value) == (4, 1.0, 64.0)


def test_the_daemon_learns_of_the_mode_with_the_first_step() -> None:
    client, world = rig(options=SHADOW)
    world.add("a", PROMPT)
    world.schedule()
    assert report(client).lookups == 1


def test_figures_of_the_last_second_are_sent_when_the_last_store_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvass.engine.shadow.time", SimpleNamespace(monotonic=lambda: 1000.0))
    client, world = stored(options={"kvass.shadow": 0.0001})
    before = report(client).lookups
    world.add("b", range(2000, 2100), max_tokens=1)
    output, work = world.schedule()
    client.commit(store.reservation for store in work.stores)
    world.finish(output)
    output, _ = world.schedule()  # of no tokens: the store is awaited
    assert report(client).lookups == before, "the last report is not a second old"
    world.finish(output, reported=list(world.open_steps))
    assert not world.scheduler.has_requests(), "the engine makes no more steps"
    assert report(client).lookups == before + 1


def test_an_engine_that_ends_sends_its_last_figures() -> None:
    client, world = stored()
    world.add("b", PROMPT, max_tokens=8)
    world.step()
    client.shadow = None
    world.connector.shadow.lookups.allocated(None, Answer(0, 3, None, asked=7), 0)
    world.connector.shutdown()
    assert report(client).lookup_tokens == 2 * HIT + 7


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_hit_is_computed_and_its_blocks_are_compared(asynchronous: bool) -> None:
    client, world = stored(asynchronous=asynchronous)
    counted = Counter[str]()
    world.planner.traffic.count = lambda name, number=1: counted.update({name: number})
    world.add("b", PROMPT)
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"b": 100}
    assert work.loads == []
    (check,) = work.checks
    table = world.scheduler.kv_cache_manager.get_block_ids("b")[0]
    assert check.load.blocks == (tuple(table[:6]),)
    assert (check.chunks, check.computed, check.step) == (3, work.number, work.step)
    assert client.handed == [check.load.lease]
    held = world.free_blocks
    world.finish(output)
    world.abort("b")
    assert world.free_blocks - held < 7, "the blocks of the check stay held"
    found = (GroupCompared(3, 300, differing_rows=1, largest_difference=0.5, wrong_rows=1),)
    result = Compared("b", 0, load_bytes=300, load_s=0.25, groups=found)
    output, _ = world.schedule()
    world.finish(output, reported=list(world.open_steps), compared=[result])
    world.run(client)
    shown = report(client)
    assert (shown.lookups, shown.lookup_tokens, shown.hit_tokens) == (2, 2 * HIT, HIT)
    assert (shown.loads, shown.load_bytes, shown.load_s, shown.not_compared) == (1, 300, 0.25, 0)
    assert (shown.groups[0].differing_rows, shown.groups[0].largest_difference) == (1, 0.5)
    rows = {"shadow_differing_rows": 1, "shadow_wrong_rows": 1}
    loads = {"shadow_loads": 1, "shadow_load_bytes": 300, "shadow_load_seconds": 0.25}
    asked = {"shadow_lookups": 1, "shadow_lookup_tokens": HIT, "shadow_hit_tokens": HIT}
    assert counted.pop("shadow_saved_seconds") == shown.saved_s > 0
    assert counted == rows | loads | asked
    settled(client, world)


def test_the_check_waits_for_the_step_that_computes_the_hits_end() -> None:
    client, world = stored(batched=64)
    world.add("b", PROMPT)
    output, work = world.schedule()
    assert (output.num_scheduled_tokens, work.checks) == ({"b": 64}, [])
    assert client.held
    world.finish(output, reported=list(world.open_steps))
    _, work = world.schedule()
    assert len(work.checks) == 1
    assert not client.held


def test_a_pending_lookup_delays_nothing_and_is_compared_later() -> None:
    client, world = stored()
    client.pending = 3
    world.add("b", PROMPT, max_tokens=8)
    seen = []
    for _ in range(8):
        output, work = world.schedule()
        seen.append((sum(output.num_scheduled_tokens.values()), len(work.checks)))
        world.finish(output, reported=list(world.open_steps))
    assert seen[0] == (100, 0)
    assert sum(checks for _, checks in seen) == 1
    world.run(client)
    assert report(client).hit_tokens == HIT
    settled(client, world)


def test_a_request_that_ends_before_its_hit_is_computed_gives_its_lease_back() -> None:
    client, world = stored(batched=32)
    world.add("b", PROMPT)
    world.step()
    assert client.held
    world.abort("b")
    world.run(client)
    world.add("c", range(1000, 1010), max_tokens=1)
    world.run(client)
    assert report(client).not_compared == 1
    settled(client, world)


def test_a_step_that_could_not_be_handed_over_has_no_checks() -> None:
    client, world = stored()
    client.deaf = True
    world.add("b", PROMPT, max_tokens=2)
    _, work = world.schedule()
    assert work.checks == work.stores == []
    assert len(client.released) == 1
    assert not client.taken


def test_a_sample_of_no_hits_is_compared_and_all_are_counted() -> None:
    client, world = stored(options={"kvass.shadow": 0.4})
    checks = 0
    for number in range(5):
        world.add(f"r{number}", PROMPT, max_tokens=1)
        work = world.step()
        checks += len(work.checks)
        world.run(client)
        assert world.scheduler.reset_prefix_cache()
    assert checks == 2
    assert report(client).hit_tokens == 5 * HIT
    settled(client, world)


def test_a_check_holds_a_quarter_of_the_blocks_at_most() -> None:
    client, world = stored(blocks=17)
    world.add("b", PROMPT, max_tokens=2)
    _, work = world.schedule()
    (check,) = work.checks
    table = world.scheduler.kv_cache_manager.get_block_ids("b")[0]
    assert check.load.blocks == (tuple(table[2:6]),), "the last two of three rows"
    assert [len(slots) for slots in check.load.slots] == [2]
    assert client.handed == [check.load.lease]


def test_a_hit_of_which_nothing_may_be_compared_gives_its_lease_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvass.engine.held_blocks.POOL_SHARE", 1 << 20)  # not one row has room
    client, world = stored()
    world.add("b", PROMPT, max_tokens=1)
    _, work = world.schedule()
    assert work.checks == []
    assert len(client.released) == 1
    assert not client.taken


def test_a_rank_that_could_not_load_counts_as_not_compared() -> None:
    client, world = stored()
    world.add("b", PROMPT, max_tokens=1)
    output, _ = world.schedule()
    failed = [Compared("b", rank, error="late") for rank in range(2)]
    world.finish(output, reported=list(world.open_steps), compared=failed)
    world.run(client)
    assert (report(client).not_compared, report(client).loads) == (1, 0)


def test_the_engine_gets_the_shadow_connector_and_keeps_its_policy() -> None:
    config, caches = make_configs(options=SHADOW)
    config.kv_transfer_config.kv_load_failure_policy = "fail"
    world = SchedulerHarness(FakeClient(), configs=(config, caches))
    assert type(world.connector) is ShadowConnector
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"


def test_a_subclass_that_would_load_is_refused() -> None:
    class Own(KvassConnector):
        pass

    config, caches = make_configs(options=SHADOW)
    with pytest.raises(ConfigError, match=r"kvass\.shadow does not work with Own, which loads"):
        Own(config, KVConnectorRole.SCHEDULER, caches)


@pytest.mark.parametrize("value", [1.5, -0.1, "yes"])
def test_another_share_is_an_error(value: object) -> None:
    with pytest.raises(ConfigError, match="shadow"):
        read_setup(*make_configs(options={"kvass.shadow": value}))


def test_shadow_mode_excludes_blend() -> None:
    with pytest.raises(ConfigError, match=r"kvass\.shadow does not work with kvass\.blend"):
        read_setup(*make_configs(options={**SHADOW, "kvass.blend": "all"}))


def test_the_speed_is_measured_by_position() -> None:
    speed = SpeedByLength()
    assert not speed.known
    for now_s, tokens, position in (
        *((0.0, 500, 100), (1.0, 0, 0), (2.0, 0, 0)),  # 500 tokens a second at the beginning
        *((2.0, 500, 3 * FIRST_LENGTH), (7.0, 0, 0), (9.0, 0, 0)),  # 100 further on
    ):
        speed.step(tokens, position, now_s)
    assert speed.seconds(0, 500) == 1.0
    late = 2 * FIRST_LENGTH
    assert speed.seconds(late, late + 100) == 1.0
    assert speed.seconds(16 * FIRST_LENGTH, 16 * FIRST_LENGTH + 200) == 2.0, "the nearest range"


def test_what_a_request_has_stored_itself_is_no_hit() -> None:
    client, world = rig(options=SHADOW)
    client.pending = 3  # a tier is slow: it is answered when the request's own rows are there
    world.add("b", PROMPT, max_tokens=8)
    world.run(client)
    assert client.rows, "the control: its chunks were stored before the answer"
    assert (report(client).lookups, report(client).lookup_tokens) == (1, HIT)
    assert report(client).hit_tokens == 0
    settled(client, world)


def test_a_late_answer_counts_what_others_have_stored() -> None:
    client, world = rig(options=SHADOW)
    world.add("writer", range(40), max_tokens=1)  # one chunk
    world.run(client)
    assert world.scheduler.reset_prefix_cache()
    client.pending = 3
    world.add("b", PROMPT, max_tokens=8)
    world.run(client)
    assert report(client).hit_tokens == 32


def test_a_preempted_request_is_looked_up_once() -> None:
    client, world = rig(options=SHADOW, blocks=18)
    for name, first in (("a", 0), ("b", 1000)):
        world.add(name, range(first, first + 100), max_tokens=60)
    world.run(client, limit=400)
    assert len(client.lookups) == len({name for name, _ in client.lookups})
    assert (report(client).lookups, report(client).hit_tokens) == (2, 0)


def test_the_rows_of_a_check_keep_their_blocks_if_the_last_one_is_not_full() -> None:
    slots = Slots(((0,),), bytes(6), b"".join(row.to_bytes(4, "little") for row in range(3)))
    load = Load("a", slots=(slots,), blocks=(tuple(range(1, 10)),), skip=(0,))
    part = comparable(load, 8, (4,))  # rows of blocks 1 to 4, 5 to 8, and 9 alone
    assert part.blocks == ((5, 6, 7, 8, 9),)
    assert part.slots == (slots.last(2),)


def test_idle_time_is_no_time_of_a_step() -> None:
    speed = SpeedByLength()
    for start_s in (0.0, 3600.0, 7200.0):
        speed.step(100, 50, start_s)
        speed.idle(start_s + 1)
    assert speed.seconds(0, 100) == 1.0


def test_saved_time_leaves_out_the_time_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("kvass.engine.shadow.time", SimpleNamespace(monotonic=lambda: now_s))
    client, world = stored(options={"kvass.shadow": 0.0001})  # nothing keeps the engine stepping
    for number in range(3):
        world.add(f"r{number}", PROMPT, max_tokens=1)
        output, _ = world.schedule()
        now_s += 1
        world.finish(output, reported=list(world.open_steps))
        world.run(client)
        assert world.scheduler.reset_prefix_cache()
        now_s += 3600
    world.add("last", range(2000, 2010), max_tokens=2)
    world.run(client)
    assert report(client).hit_tokens == 3 * HIT
    assert report(client).saved_s < 5


def test_hits_that_wait_for_a_speed_are_limited() -> None:
    _, world = stored()
    shadow = world.connector.shadow
    assert len(shadow._unpriced) <= 1
    shadow._speed = SpeedByLength()
    for number in range(UNPRICED + 10):
        shadow._hits[f"r{number}"] = ShadowHit(0, 32, checked=False)
        shadow.forget(f"r{number}")
    assert len(shadow._unpriced) == UNPRICED
