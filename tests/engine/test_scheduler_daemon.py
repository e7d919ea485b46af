"""Both sides of the connector against a real daemon, with vLLM's real scheduler and no engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvass.engine.changes import WeightChanges
from kvass.engine.copier import COPY_WAIT_S, Copier
from kvass.engine.planner import Planner
from kvass.testing.daemon import Daemon
from tests.engine import conftest
from tests.engine.conftest import empty
from tests.support.vllm.ranks import CopyGate, StubModelEngine, making, until

PROMPT = list(range(100))

daemon = conftest.own_daemon


@pytest.fixture
def engine(daemon: Daemon, pages: Iterator[dict[str, Any]]) -> Iterator[Any]:
    def make(**options: Any) -> StubModelEngine:
        return StubModelEngine(daemon.socket, daemon, **next(pages), **options)

    with making(make) as engine:
        yield engine


def test_the_check_sees_a_page_that_was_not_loaded(engine: Any) -> None:
    a, b = engine(), engine()
    a.generate("a", PROMPT)
    request, _ = b.load("b", PROMPT)
    b.rank.page(0, 0, b.tables("b")[0][3])[:] = 0
    with pytest.raises(AssertionError, match=r"block 3 .*rank 0, layer 0"):
        b.verify(request, 96)


@pytest.mark.parametrize("counted", [True, False])
def test_a_late_load_is_a_failed_load(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """Also if counting it fails."""
    a, b = engine(), engine()
    a.generate("a", PROMPT)
    real = b.world.planner._make.load

    def late(*args: Any) -> Any:
        import dataclasses

        return dataclasses.replace(real(*args), deadline_s=time.monotonic() - 1)

    monkeypatch.setattr(b.world.planner._make, "load", late)
    if not counted:
        monkeypatch.setattr(b.rank.connector._boundary, "count", lambda *_: 1 / 0)
    _, found = b.load("b", PROMPT)
    assert found == 0, "everything is computed"
    assert b.rank.connector._boundary.counters["load_late" if counted else "_ended"] >= 1
    empty(daemon)


def test_a_slot_outside_the_arena_is_a_failed_load(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = engine(), engine()
    a.generate("a", PROMPT)
    real = b.world.planner._make.load

    def astray(*args: Any) -> Any:
        import dataclasses

        from kvass.types import Slots

        load = real(*args)
        slots = Slots(((1 << 40,),), load.slots[0].set_, load.slots[0].slot)
        return dataclasses.replace(load, slots=(slots,))

    monkeypatch.setattr(b.world.planner._make, "load", astray)
    _, found = b.load("b", PROMPT)
    assert found == 0
    assert b.rank.connector._boundary.counters["load_refused"] == 1
    empty(daemon)


def test_a_daemon_that_died_between_match_and_load_is_a_miss(daemon: Daemon, engine: Any) -> None:
    a, b = engine(), engine()
    a.generate("a", PROMPT)
    request = b.world.add("b", PROMPT)
    output, work = b.world.schedule()
    assert len(work.loads) == 1
    daemon.restart()
    b.wait_connected()
    until(
        lambda: b.copier._client.arena(work.loads[0].boot) is None,
        "the worker to see another boot",
    )
    b.world.finish(output, **b.ranks.run(work))
    until(lambda: b.step() and request.is_finished(), "the request's end")
    assert request.num_tokens == 104
    empty(daemon)


def test_a_load_that_cannot_even_be_refused_has_failed(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = engine(), engine()
    a.generate("a", PROMPT)
    monkeypatch.setattr(b.copier, "_begin", lambda load: 1 / 0)
    monkeypatch.setattr(b.copier._client, "release", lambda *_: 1 / 0)
    _, found = b.load("b", PROMPT)
    assert found == 0, "everything is computed"
    assert b.rank.connector._boundary.counters["_refuse"] == 1


def test_stores_that_cannot_even_be_refused_are_over(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = engine()
    a.daemon = None  # what was granted stays reserved until it lapses: nobody could say otherwise
    monkeypatch.setattr(a.copier, "_begin", lambda store: 1 / 0)
    monkeypatch.setattr(a.copier._client, "abort", lambda *_: 1 / 0)
    a.generate("a", PROMPT)
    assert a.world.free_blocks == a.world.pool.num_gpu_blocks - 1
    assert a.rank.connector._boundary.counters["_refuse"] >= 1


def test_nothing_of_ours_raises_into_the_worker(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvass.engine.step_work import StepWork

    a = engine()
    for name in ("load", "store", "results", "take_report"):
        monkeypatch.setattr(Copier, name, lambda *_: 1 / 0)
    answer = a.ranks.run(StepWork())
    assert not any(answer.values())
    assert answer.keys() == {"reported", "received", "failed", "adapters", "wrong"}
    assert a.rank.connector._boundary.counters.total() == 4


def test_nothing_of_ours_raises_into_the_scheduler(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = engine()
    a.world.tolerant = True
    for name in ("ensure_load", "plan", "storing"):
        monkeypatch.setattr(Planner, name, lambda *_: 1 / 0)
    request = a.generate("a", PROMPT)
    assert request.num_tokens == 102
    assert a.world.connector.has_pending_push_work() is False
    a.world.connector.update_state_after_alloc(request, None, 32)
    counters = a.world.connector._boundary.counters
    assert counters["<lambda>"] >= 3


def test_a_step_that_computes_nothing_waits_a_moment_for_a_copy(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in its caller's own process would keep the GIL from the copy thread."""
    a, b = engine(), engine()
    a.generate("a", PROMPT)
    waits: list[float] = []
    gate, drain = CopyGate(b.rank, shut=True), b.copier._mover.drain

    def wait(timeout_s: float) -> Any:
        waits.append(timeout_s)
        gate.open()
        return drain(30)

    monkeypatch.setattr(b.copier._mover, "drain", wait)
    b.world.add("other", range(200, 210), max_tokens=1)
    request = b.world.add("b", PROMPT)
    output, work = b.world.schedule()
    assert work.loads
    assert output.num_scheduled_tokens == {"other": 10}
    b.world.finish(output, **b.ranks.run(work))
    assert waits == [], "a step that computes does not wait"
    output, work = b.world.schedule()
    assert output.num_scheduled_tokens == {}
    ended = b.ranks.run(work, False)
    assert waits == [COPY_WAIT_S]
    assert ended["received"] == {"b"}, "it ended meanwhile, and is reported in this step"
    b.world.finish(output, **ended)
    until(lambda: b.step() and request.is_finished(), "the request's end")


def raises() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("delay", [0, 1], ids=["granted at once", "granted in a later step"])
@pytest.mark.parametrize("aborted", [True, False], ids=["aborted", "goes on"])
@pytest.mark.parametrize("reached", [True, False], ids=["in the forward pass", "before any hook"])
def test_what_follows_a_step_that_raised_is_not_stored(
    daemon: Daemon, engine: Any, delay: int, aborted: bool, reached: bool
) -> None:
    """vLLM's own cache says that the step's blocks were computed, so others build on them. Emptying
    that cache ends this."""
    a = engine()
    a.delay_grants(lambda: delay)
    request = a.world.add("a", PROMPT, max_tokens=60)
    _, work = a.world.schedule()  # and its output never comes
    if reached:
        a.rank.forward = raises
        with pytest.raises(ZeroDivisionError):
            a.ranks.run(work)
        a.rank.forward = lambda: None
    a.world.tolerant = True  # the failure is counted
    if aborted:
        a.world.abort("a")
    else:  # as after a Ctrl-C in a notebook: the next call goes on with it
        request.append_output_token_ids(1)
        until(lambda: a.step() and request.is_finished(), "its end")
    a.tolerant = True
    other = a.world.add("b", [*PROMPT, *range(500, 600)], max_tokens=60)
    assert sum(a.step().num_scheduled_tokens.values()) == 104, "it builds on what nobody computed"
    until(lambda: a.step() and other.is_finished(), "its end")
    for _ in range(5):
        a.step()
    assert daemon.status()["rows"] == 0
    assert a.rank.connector._boundary.counters["steps_raised"] == 1
    if reached:  # else what it was to store is held
        assert a.world.scheduler.reset_prefix_cache()
        a.generate("c", PROMPT)
        assert daemon.status()["rows"] == 3


def test_a_step_whose_planning_failed_is_none_that_raised(
    daemon: Daemon, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = engine()
    a.generate("a", PROMPT)
    a.world.tolerant = True  # the failure is counted
    with monkeypatch.context() as defect:
        defect.setattr(WeightChanges, "notice", lambda _: 1 / 0)
        a.step()
    a.generate("b", range(500, 600))
    assert daemon.status()["rows"] == 6
    assert not a.rank.connector._boundary.counters


def test_what_was_computed_before_a_step_that_raised_is_stored(daemon: Daemon, engine: Any) -> None:
    a = engine()
    a.delay_grants(lambda: 2)
    a.world.add("a", PROMPT, max_tokens=60)
    a.step()
    a.rank.forward = raises
    with pytest.raises(ZeroDivisionError):
        a.step()
    a.rank.forward, a.world.tolerant = lambda: None, True
    a.world.abort("a")
    until(lambda: a.step() and not a.world.scheduler.has_requests(), "its stores")
    assert empty(daemon)["rows"] == 3


def test_a_caller_that_handles_an_exception_may_use_the_engine(daemon: Daemon, engine: Any) -> None:
    a = engine()
    try:
        raises()
    except ZeroDivisionError:
        a.generate("a", PROMPT)
    assert daemon.status()["rows"] == 3
    assert not a.rank.connector._boundary.counters
