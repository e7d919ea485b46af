"""vLLM resets its prefix cache without a word to the connector, as after new weights: from then on
nothing of before is loaded, and nothing that old weights computed is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.vllm.fake_client import FakeClient
from tests.support.vllm.scheduler import FIXED, SchedulerHarness, make_multi_configs, rig

PROMPT = range(100)
OFTEN: dict[str, object] = {"kvass.fixed_weights": False}
"""The default: the weights may be replaced."""


def stored(**options: Any) -> tuple[FakeClient, SchedulerHarness]:
    """A world whose daemon holds all whole chunks of ``PROMPT``; nothing was reset yet."""
    client, world = rig(**{"options": OFTEN, **options})
    world.add("writer", PROMPT, max_tokens=1)
    world.run(client)
    assert len(client.rows) == 3
    assert client.generations == 0
    return client, world


@pytest.mark.parametrize("inside", ["alone", "MultiConnector"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_after_a_plain_reset_everything_is_computed_and_stored_anew(
    inside: str, asynchronous: bool
) -> None:
    configs = make_multi_configs() if inside == "MultiConnector" else None
    client, world = stored(asynchronous=asynchronous, configs=configs)
    assert world.scheduler.reset_prefix_cache()
    world.add("b", PROMPT, max_tokens=1)
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"b": 100}
    assert work.loads == []
    assert client.generations == 1
    assert client.rows == set()
    client.commit(store.reservation for store in work.stores)
    world.finish(output, reported=list(world.open_steps))
    world.run(client)
    assert len(client.rows) == 3
    assert client.generations == 1, "one reset is one generation"


def test_with_fixed_weights_a_reset_says_nothing() -> None:
    """The control, and what the other tests of this folder rely on."""
    client, world = stored(options=FIXED)
    assert world.scheduler.reset_prefix_cache()
    world.add("b", PROMPT)
    assert len(world.step().loads) == 1
    world.step(received=["b"])
    world.run(client)
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    assert client.rows == set()
    assert client.generations == 0


def test_the_connectors_own_reset_is_one_generation_too() -> None:
    client, world = stored()
    assert world.scheduler.reset_prefix_cache(reset_connector=True)
    assert client.generations == 1
    world.add("b", PROMPT)
    world.run(client)
    assert client.generations == 1
    assert world.scheduler.reset_prefix_cache()
    assert world.scheduler.reset_prefix_cache()
    world.add("c", PROMPT)
    assert client.generations == 2, "of two resets that nobody used anything between, one is seen"


def new_request(world: SchedulerHarness, request: Any, step: Any) -> None:
    world.connector.on_new_request(request)


def matching(world: SchedulerHarness, request: Any, step: Any) -> None:
    assert world.connector.get_num_new_matched_tokens(request, 0) == (0, False)


def planning(world: SchedulerHarness, request: Any, step: Any) -> None:
    world.connector.build_connector_meta(step)


@pytest.mark.parametrize("hook", [new_request, matching, planning])
def test_the_first_hook_after_a_reset_notices_it(hook: Callable[..., None]) -> None:
    client, world = stored()
    step, _ = world.schedule()  # there is nothing to do
    request = world.add("b", PROMPT)
    assert world.scheduler.reset_prefix_cache()
    assert client.generations == 0
    hook(world, request, step)
    assert client.generations == 1


def test_a_reset_does_not_fail_at_blocks_of_an_unanswered_offer() -> None:
    """Without it an engine in one's own process, which stops stepping with its last request, would
    go on with the rows of the old weights."""
    client, world = stored()
    client.silent = True
    world.add("b", range(200, 300), max_tokens=1)
    world.step()
    assert not world.scheduler.running
    assert world.connector.has_pending_push_work(), "the offer's blocks are held"
    assert world.scheduler.reset_prefix_cache()
    assert client.given_up == 1
    world.add("c", PROMPT)
    assert client.generations == 1


def test_a_defect_while_a_reset_is_noticed_loses_no_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    for explicit in (False, True):
        client, world = stored()
        world.tolerant = True
        monkeypatch.setattr(client, "give_back", lambda request: 1 / 0)
        world.add("b", range(200, 300))
        world.scheduler.reset_prefix_cache(reset_connector=explicit)
        world.add("c", PROMPT)
        assert client.generations == 1
        assert client.rows == set()


def test_a_match_of_before_is_given_back_and_not_loaded() -> None:
    client, world = stored()
    world.pool.evict_blocks(set(range(world.pool.num_gpu_blocks)))
    request = world.add("b", PROMPT)
    assert world.connector.get_num_new_matched_tokens(request, 0) == (96, True)
    lease = client.held["b"].lease
    assert world.scheduler.reset_prefix_cache()
    output, work = world.schedule()
    assert output.num_scheduled_tokens == {"b": 100}
    assert work.loads == []
    assert client.released == [lease]


def test_requests_that_are_computed_again_are_stored_by_the_new_weights() -> None:
    """vLLM takes the blocks of running requests away, and computes all of these anew."""
    client, world = stored()
    request = world.add("b", range(200, 300), max_tokens=50)
    world.step()
    world.step()
    rows = len(client.writing)
    assert world.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    work = world.step()
    assert client.generations == 1
    (store,) = work.stores
    assert len(store.slots[0]) == 3
    assert len(client.writing) == rows + 1


@pytest.mark.parametrize(
    ("options", "explicit"), [(OFTEN, False), (OFTEN, True), (FIXED, True)], ids=str
)
def test_what_runs_on_across_a_reset_is_never_stored(
    options: dict[str, object], explicit: bool
) -> None:
    """vLLM refuses, and keeps the blocks of what runs. What is computed next attends to KV of the
    old weights. ``explicit``: of the connector's cache too."""
    client, world = stored(options=options)
    world.add("b", range(200, 264), max_tokens=64)
    world.step()
    reserves = len(client.reserves)
    assert not world.scheduler.reset_prefix_cache(reset_connector=explicit), "blocks are in use"
    for _ in range(50):
        world.step()
    assert client.generations == (options is OFTEN)
    assert len(client.reserves) == reserves
    assert client.rows == set()
