"""What is counted of lookups: what they came to, once for each time that a request got blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.client.client import Client
from kvass.client.health import troubles
from kvass.engine import planner
from kvass.testing.daemon import Daemon, running_daemon
from tests.engine.test_traffic import listen
from tests.support.vllm.ranks import CopyGate, StubModelEngine, making, until

FIGURES = ("lookups", "lookup_tokens", "hit_tokens")
FAILED = ("loads", "failed_loads", "minute_loads", "minute_failed_loads")
TOKENS = 600
MOST = TOKENS // 16 * 16
"""The most tokens of a prompt that can be looked up."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path) as daemon:
        yield daemon


def prompt(number: int) -> list[int]:
    return [number * 1000 + i for i in range(TOKENS)]


def namespace(daemon: Daemon) -> dict[str, Any]:
    found: list[dict[str, Any]] = daemon.status()["namespaces"]
    (ns,) = found
    return ns


def run_all(engine: StubModelEngine) -> None:
    """Steps until no request is left."""
    world = engine.world.scheduler
    until(lambda: engine.step() and not world.has_requests(), "the end of all requests")


def settled(daemon: Daemon, lookups: int) -> dict[str, Any]:
    """The namespace's figures once so many lookups are counted."""
    until(lambda: namespace(daemon)["lookups"] >= lookups, "the results")
    return namespace(daemon)


def test_lookups_of_requests_that_wait_for_blocks_count_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks for two requests, and 20 prompts of which 10 are stored. vLLM asks again in every step
    in which the first one that waits gets no blocks; the daemon is asked when some were freed."""
    monkeypatch.setattr(planner, "ASK_AGAIN_S", 1e9)
    with making(StubModelEngine) as make:
        first, engine = make(daemon.socket, daemon), make(daemon.socket, daemon, blocks=90)
        for number in range(10):
            first.generate(f"first {number}", prompt(number))
        before, asked = settled(daemon, 10), daemon.status()["messages"]["lookup"]
        counted = listen(engine)
        for number in range(20):
            engine.world.add(f"{number}", prompt(number), max_tokens=20)
        run_all(engine)
        seen = settled(daemon, 30)
        assert [seen[name] - before[name] for name in FIGURES] == [20, 20 * MOST, 10 * MOST]
        assert [counted[name] for name in FIGURES] == [20, 20 * MOST, 10 * MOST]
        messages = daemon.status()["messages"]["lookup"] - asked
        assert messages <= 60, "repeats wake the daemon"


def test_loads_that_fail_are_no_hits(daemon: Daemon) -> None:
    """20 matches of which a rank copies none in time. The control copies one."""
    short = 100
    with making(StubModelEngine) as make:
        first, engine = make(daemon.socket, daemon), make(daemon.socket, daemon)
        for number in range(20):
            first.generate(f"first {number}", prompt(number)[:short])
        before, counted = settled(daemon, 20), listen(engine)
        CopyGate(engine.rank, ahead_s=1e6)
        for number in range(20):
            engine.generate(f"{number}", prompt(number)[:short])
        seen, status = settled(daemon, 40), daemon.status()
        assert [seen[name] - before[name] for name in FIGURES] == [20, 20 * 96, 0]
        assert [seen[name] for name in FAILED] == [20, 20, 20, 20]
        assert seen["miss_tokens"]["load_failed_here"] == 20 * 96
        assert (seen["saved_prefill_s"], counted["hit_tokens"]) == (0.0, 0)
        assert status["engines"][1]["failed_loads"] == 20
        assert "20 of 20 loads failed" in " ".join(troubles(status))
        with Client(daemon.socket) as client:
            (entry,) = client.explain(status["engines"][1]["instance"], "19", 5)
        assert (entry["why"], entry["hit_tokens"]) == ("load_failed_here", 0)
        CopyGate(engine.rank)
        first.generate("one more", prompt(20)[:short])
        engine.generate("one more", prompt(20)[:short])
        seen = settled(daemon, 42)
        assert [seen[name] for name in (*FAILED, "hit_tokens")] == [21, 20, 21, 20, 96]
