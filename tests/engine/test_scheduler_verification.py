"""A rank found a wrong copy: vLLM's real scheduler gets no hit any more, nothing is stored, and
what was stored before is cleared."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvass.connectors.vllm.adapt import StepReport
from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import FIXED, SchedulerHarness, make_multi_configs, rig

PROMPT = range(100)
WRONG = ["rank 1: its difference"]


def stored(**options: Any) -> tuple[FakeClient, SchedulerHarness]:
    """A world whose daemon holds all whole chunks of ``PROMPT``, and whose own cache is empty."""
    client, world = rig(**options)
    world.add("writer", PROMPT, max_tokens=1)
    world.run(client)
    assert len(client.rows) == 3
    assert world.scheduler.reset_prefix_cache()
    return client, world


def ends_uncached(client: FakeClient, world: SchedulerHarness) -> None:
    """Whatever runs now is computed, looks up nothing and stores nothing; nothing is held."""
    world.run(client)
    client.lookups.clear()
    client.reserves.clear()
    client.rows.clear()  # another engine may store
    assert world.scheduler.reset_prefix_cache()
    later = world.add("later", PROMPT, max_tokens=40)
    output, _ = world.schedule()
    assert output.num_scheduled_tokens == {"later": 100}
    world.finish(output)
    world.run(client)
    assert later.num_tokens == 140
    assert (client.lookups, client.reserves, client.held, client.taken) == ([], [], {}, {})
    assert world.free_blocks == world.pool.num_gpu_blocks - 1
    assert not world.connector.has_pending_push_work()


@pytest.mark.parametrize("inside", ["alone", "MultiConnector"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_after_a_wrong_copy_the_engine_is_uncached_and_the_namespace_empty(
    inside: str, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    configs = make_multi_configs(FIXED) if inside == "MultiConnector" else None
    client, world = stored(asynchronous=asynchronous, configs=configs)
    world.add("a", PROMPT)
    output, work = world.schedule()
    assert [bool(load.lease) for load in work.loads] == [True]
    world.finish(output, failed=["a"], wrong=WRONG)
    assert client.rows == set()
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"a": 100}, "it computes what was not loaded"
    world.finish(output, wrong=["rank 0: another one"])
    ends_uncached(client, world)
    (line,) = [r for r in caplog.records if "kvass is off" in r.getMessage()]
    assert line.levelno == logging.ERROR
    assert WRONG[0] in line.getMessage()
    assert line.getMessage().endswith(client.uncached), "kvass status says it, too"
    assert WRONG[0] in client.uncached
    (note,) = [n for n in client.notes if n.request.startswith("later")]
    assert note.why == "loads_off"


def test_a_match_that_is_held_is_given_back() -> None:
    """vLLM was told of a hit, and has no room for it yet."""
    client, world = stored(blocks=10)
    world.add("hog", range(500, 596), max_tokens=8)
    world.step()
    world.add("waits", PROMPT)
    for _ in range(3):
        world.step()
    assert client.held.keys() == {"waits"}
    world.step(wrong=WRONG)
    assert client.held == {}
    ends_uncached(client, world)


def test_a_load_that_was_planned_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between vLLM's call that allocates its blocks and the step that sends it."""
    client, world = stored()
    world.add("a", PROMPT)
    allocated = world.connector.update_state_after_alloc

    def told(*args: Any) -> None:
        world.connector._planner.copied_wrong(StepReport(wrong=WRONG))
        allocated(*args)

    monkeypatch.setattr(world.connector, "update_state_after_alloc", told)
    output, work = world.schedule()
    monkeypatch.undo()
    assert [(load.request, load.lease) for load in work.loads] == [("a", 0)]
    world.finish(output, failed=["a"])
    ends_uncached(client, world)


@pytest.mark.parametrize("late", [0, 2])
def test_stores_that_are_granted_or_asked_for_end(late: int) -> None:
    """What was granted is copied and reported. An offer without an answer is given up, and what
    ended requests left is not offered."""
    client, world = rig(tails=True)
    client.late = late
    world.add("a", PROMPT, max_tokens=40)
    output, work = world.schedule()
    assert bool(work.stores) == (late == 0)
    world.finish(output, wrong=WRONG)
    assert client.given_up == (late > 0)
    world.run()
    assert world.free_blocks == world.pool.num_gpu_blocks - 1
    client.writing.clear()
    client.late = 0
    ends_uncached(client, world)


def test_shadow_mode_ends_too() -> None:
    client, world = stored(options={"kvass.shadow": True})
    world.add("a", PROMPT)
    world.step(wrong=WRONG)
    ends_uncached(client, world)


def test_reports_of_all_ranks_are_added_up() -> None:
    both = StepReport(wrong=["a"]).aggregate(StepReport({1: 1}, wrong=["b"]))
    assert (both.wrong, both.steps) == (["a", "b"], {1: 1})
