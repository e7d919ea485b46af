"""vLLM resets its prefix cache without a word to the connector, as after new weights: from then on
nothing of before is loaded, and nothing that old weights computed is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from kvass.connectors.vllm import rest
from kvass.connectors.vllm.adapt import StepReport
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


# ---------------------------------------------------------------- what waits for a step


class Resting(NamedTuple):
    """An engine in its user's process, whose steps ``world`` makes. ``asked``: how often its worker
    was asked for its report."""

    client: FakeClient
    world: SchedulerHarness
    core: Any
    engine: Any
    asked: list[float]

    def leave(self, *, max_tokens: int = 1, granted: bool = True) -> None:
        """Make one step of a request, whose store is then not copied yet, or not granted."""
        self.client.silent = not granted
        self.world.add("b", range(200, 300), max_tokens=max_tokens)
        output, work = self.world.schedule()
        self.client.commit(store.reservation for store in work.stores)
        self.world.finish(output)
        self.client.silent = False


def resting(
    monkeypatch: pytest.MonkeyPatch,
    *,
    in_process: bool = True,
    hangs: bool = False,
    options: Mapping[str, object] = FIXED,
) -> Resting:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    client, world = stored(options=options)
    core, engine = EngineCore.__new__(EngineCore), InprocClient.__new__(InprocClient)
    executor = UniProcExecutor.__new__(UniProcExecutor)
    executor.driver_worker = SimpleNamespace(shutdown=lambda: None)
    core.scheduler, core.model_executor = world.scheduler, executor
    core.vllm_config = world.connector._vllm_config
    core.post_step = lambda computed: None
    asked: list[float] = []

    def step() -> tuple[dict[int, Any], bool]:
        output, work = world.schedule()
        client.commit(store.reservation for store in work.stores)
        world.finish(output, reported=list(world.open_steps))
        return {}, output.total_num_scheduled_tokens > 0

    def report(most_s: float) -> StepReport | None:
        asked.append(most_s)
        return None if hangs else StepReport(dict.fromkeys(world.open_steps, 1))

    core.step_fn = step
    connector = world.connector
    one = rest.Rest(core, "one", connector._boundary)
    one.planner = world.planner
    if in_process:
        one.make_steps(engine)
    monkeypatch.setattr(connector, "_rest", one)
    monkeypatch.setitem(rest.workers, "one", lambda: report)
    return Resting(client, world, core, engine, asked)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_reset_waits_for_copies_that_alone_would_make_it_fail(
    monkeypatch: pytest.MonkeyPatch, running: bool, hangs: bool
) -> None:
    """In any engine; here in a process of its own. The control: without a report it fails."""
    one = resting(monkeypatch, in_process=False, hangs=hangs)
    free = one.world.free_blocks
    one.leave(max_tokens=60 if running else 1)
    if hangs and running:
        with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
            one.world.scheduler.reset_prefix_cache(reset_running_requests=True)
    else:
        assert one.world.scheduler.reset_prefix_cache(reset_running_requests=running) is not hangs
        assert hangs or one.world.free_blocks == free
    (asked,) = one.asked
    assert 0 < asked <= rest.FINISH_S


def test_a_reset_that_fails_anyway_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = resting(monkeypatch)
    one.leave(max_tokens=60)
    assert not one.world.scheduler.reset_prefix_cache(), "a request is running"
    assert one.asked == []
    assert one.world.scheduler.running


@pytest.mark.parametrize("how", ["asked", "reset", "shutdown"])
@pytest.mark.parametrize("granted", [False, True])
def test_an_engine_in_its_users_process_ends_its_stores(
    monkeypatch: pytest.MonkeyPatch, how: str, granted: bool
) -> None:
    one = resting(monkeypatch)
    one.leave(granted=granted)
    assert len(one.client.rows) == 3 + 3 * granted
    if how == "asked":
        while one.engine.dp_engines_running():
            one.core.step_fn()
    elif how == "reset":
        assert one.world.scheduler.reset_prefix_cache()
    else:
        one.core.model_executor.shutdown()
    assert len(one.client.rows) == 6
    assert not one.world.planner.storing()
    assert one.world.scheduler.reset_prefix_cache()
    assert one.asked == []


@pytest.mark.parametrize(("overdue_s", "most_s"), [(0.0, rest.ANSWER_S), (0.1, rest.COPIED_S)])
def test_a_silent_daemon_keeps_a_resting_engine_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, overdue_s: float, most_s: float
) -> None:
    one, now = resting(monkeypatch), [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(rest, "time", clock)
    one.leave(granted=False)
    one.client.silent, one.client.silent_s = True, overdue_s
    now[0] += most_s - 0.01
    assert one.engine.dp_engines_running()
    assert one.client.given_up == 0
    now[0] += 0.02
    assert not one.engine.dp_engines_running()
    assert one.client.given_up == 1, "so a late grant is aborted"
    assert one.world.scheduler.reset_prefix_cache()


def test_answers_that_come_one_by_one_are_waited_for_in_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, now, offers = resting(monkeypatch), [100.0], iter(range(100, 0, -1))
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(rest, "time", clock)
    one.leave(granted=False)
    monkeypatch.setattr(one.world.planner.stores, "offers", lambda: next(offers))
    while one.engine.dp_engines_running():
        now[0] += rest.ANSWER_S - 0.1
    assert rest.ANSWERS_S < now[0] - 100 <= rest.ANSWERS_S + rest.ANSWER_S


def test_a_running_engine_is_not_stepped_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.interface import PauseState

    one = resting(monkeypatch)
    monkeypatch.setattr(one.core, "step_fn", lambda: 1 / 0)
    one.leave(max_tokens=60)
    assert not one.engine.dp_engines_running()
    one.world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not one.engine.dp_engines_running(), "vLLM says that it has no unfinished request"
    one.core.model_executor.shutdown()
    assert not one.world.connector._boundary.counters


def test_before_a_reset_that_is_a_change_the_old_weights_namespace_gets_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = resting(monkeypatch, options=OFTEN)
    one.leave(granted=False)
    assert one.world.scheduler.reset_prefix_cache()
    assert (len(one.client.rows), one.client.generations) == (6, 0)
    one.world.add("c", PROMPT)
    assert (len(one.client.rows), one.client.generations) == (0, 1)


@pytest.mark.parametrize("how", ["asked", "reset", "shutdown"])
def test_after_a_change_of_weights_nothing_of_before_is_stored(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    one = resting(monkeypatch)
    one.leave(granted=False)
    one.world.planner.weights_may_change("update_weights", False)
    reserves = len(one.client.reserves)
    if how == "reset":
        assert one.world.scheduler.reset_prefix_cache()
    elif how == "shutdown":
        one.core.model_executor.shutdown()
    assert not one.engine.dp_engines_running()
    assert (len(one.client.rows), one.client.generations) == (0, 1)
    assert len(one.client.reserves) == reserves
