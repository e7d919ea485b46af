"""What the answer to a request with ``kvass.report`` tells its client, with vLLM's real scheduler.

The client must not find out whether somebody else computed its prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvass.client.client import Client
from kvass.client.explanation import REASONS
from kvass.connectors.vllm.hints import REPORT
from kvass.core.metrics import MISSES
from kvass.core.rows import causes
from kvass.testing.daemon import Daemon
from tests.engine import conftest
from tests.support.vllm.ranks import StubModelEngine, making, until
from tests.support.vllm.scheduler import SchedulerHarness, rig

PROMPT = range(100)
TOLD = {
    *("", "own_hit"),  # a client sees a hit by its latency, too
    *("too_short", "too_little", "too_long", "no_hashes", "not_read", "load_limit"),  # its own
    *("no_daemon", "no_answer", "refused", "not_sent", "clearing", "ranks_missing", "loads_off"),
    *("weights_unnamed", "weights_changed"),
}
NOT_TOLD = {
    *("absent", "evicted", "over_quota", "cleared", "not_stored", "engine_busy", "no_window_here"),
    *("other_namespace", "other_salt", "other_adapter"),
    *("tier_down", "not_waited", "not_worth_it", "no_room", "load_failed", "late"),
    # it matched, so somebody had computed it
    *("load_failed_here", "not_loaded", "cheaper_to_compute", "other_node"),
    "adapter_unknown",  # else somebody has used the adapter
}

daemon = conftest.own_daemon


@pytest.fixture
def engine(daemon: Daemon, pages: Iterator[dict[str, Any]]) -> Iterator[StubModelEngine]:
    with making(StubModelEngine) as make:
        yield make(daemon.socket, daemon, **next(pages))


def reports(world: SchedulerHarness) -> list[Any]:
    """What the answers to requests that end from now on say."""
    told: list[Any] = []
    real = world.connector.request_finished_all_groups

    def finished(*args: Any) -> Any:
        _, report = answer = real(*args)
        told.append(report)
        return answer

    world.connector.request_finished_all_groups = finished
    return told


def test_nobody_learns_whether_others_computed_a_prompt(
    engine: StubModelEngine, daemon: Daemon
) -> None:
    """Under another salt, without one, or before a clear."""
    told = reports(engine.world)

    def ask(name: str, first: int, salt: str | None = "mine") -> None:
        tokens = range(first, first + 100)
        request = engine.world.add(name, tokens, max_tokens=2, salt=salt, params={REPORT: True})
        until(lambda: engine.step() and request.is_finished(), "the request's end")
        until(lambda: engine.step() and not engine.world.scheduler.has_requests(), "its stores")
        daemon.wait_until(reservations=0)

    ask("victim", 0, salt="yours")
    ask("victim without a salt", 200, salt=None)
    ask("before", 400)
    assert engine.world.scheduler.reset_prefix_cache()
    with closing(Client(daemon.socket)) as operator:
        operator.clear(everything=True)
        told.clear()
        for name, first in (("a", 0), ("b", 200), ("c", 400), ("nobody's", 600)):
            ask(name, first)
        why = [lookup["why"] for lookup in operator.explain(limit=4)]
    assert why == ["other_salt", "other_salt", "cleared", "absent"], "the control"
    report = {"hit_tokens": 0, "kept_tokens": 0, "missed_because": "not_found"}
    assert told == 4 * [{"kvass": report}]


def test_of_each_reason_it_is_decided_whether_a_client_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new reason must be put into one of the two sets; until then it is not told."""
    assert {*MISSES, *REASONS, *causes.CAUSES.values()} == TOLD | NOT_TOLD
    assert not TOLD & NOT_TOLD
    client, world = rig()
    said = reports(world)
    whys = {str(n): why for n, why in enumerate([*sorted(TOLD | NOT_TOLD), "of a later version"])}
    monkeypatch.setattr(client, "ended_by", whys.__getitem__)
    for name in whys:
        first = 1000 * int(name)
        world.add(name, range(first, first + 100), max_tokens=1, params={REPORT: True})
        world.run(client)
    found = [report["kvass"]["missed_because"] for report in said]
    assert found == [why if why in TOLD else "not_found" for why in whys.values()]
