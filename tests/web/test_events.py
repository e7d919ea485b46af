"""The history and the events of the dashboard: what they say, and that they are bounded."""

from __future__ import annotations

from typing import Any

import pytest

from kvass.testing.daemon import Daemon
from kvass.web import source as module
from kvass.web.events import changes
from kvass.web.source import COLUMNS, EVENTS, SAMPLES, Source
from tests.web.test_metrics import daemon as daemon  # the fixture

ENGINE = {"instance": "e", "model": "m", "missing_ranks": []}
NAMESPACE = {"namespace": "a" * 32, "model": "m", "epoch": 0}
TIER = {"tier": "disk:/d", "up": True, "trouble": "", "store_failures": 0, "stored_rows": 0}


def fields(**more: Any) -> dict[str, Any]:
    least: dict[str, Any] = {"engines": [], "namespaces": [], "tiers": [], "counters": {}}
    return {"boot": "b", "version": "1", "pid": 7, **least, **more}


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        (None, fields(), ["a daemon is up: version 1, pid 7"]),
        (fields(boot="a"), fields(), ["a daemon is up: version 1, pid 7"]),
        (fields(), None, ["the daemon is gone"]),
        (None, None, []),
        (fields(), fields(engines=[ENGINE]), ["engine e came: m"]),
        (fields(engines=[ENGINE]), fields(), ["engine e is gone"]),
        (
            fields(engines=[ENGINE]),
            fields(engines=[{**ENGINE, "missing_ranks": [1, 2]}]),
            ["engine e lost ranks 1, 2"],
        ),
        (
            fields(tiers=[TIER]),
            fields(tiers=[{**TIER, "up": False, "trouble": "gone"}]),
            ["tier disk:/d: down: gone"],
        ),
        (
            fields(tiers=[{**TIER, "up": False}]),
            fields(tiers=[TIER]),
            ["tier disk:/d is well again"],
        ),
        (
            fields(tiers=[TIER]),
            fields(tiers=[{**TIER, "place": 0, "up": False}, {**TIER, "tier": "redis:h"}]),
            ["tier redis:h was added", "tier disk:/d was removed"],
        ),
        (
            fields(namespaces=[NAMESPACE]),
            fields(namespaces=[{**NAMESPACE, "epoch": 1}]),
            ["namespace aaaaaaaa (m) was cleared"],
        ),
        (
            fields(counters={"refused_limit": 1, "ended_closed": 1}),
            fields(counters={"refused_limit": 3, "ended_closed": 9, "lapsed_leases": 1}),
            ["2 requests refused: limit", "1 leases ended at their deadline"],
        ),
    ],
)
def test_what_changed_is_said(before: Any, after: Any, lines: list[str]) -> None:
    assert list(changes(before, after)) == lines
    assert list(changes(after, after)) == []


def test_a_daemon_that_is_older_is_named(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(daemon.socket)
    monkeypatch.setattr(source.client, "status", lambda _: {"version": "0.0.9"})
    assert source.status() == (None, "the daemon is older than this (0.0.9): restart it")
    source.client.close()


def test_history_and_events_are_bounded(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models come and go, and the daemon is another one at each look."""
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    source, seen = Source(daemon.socket), daemon.status()
    (one,) = seen["namespaces"]
    looks = iter(range(1 << 30))

    def status(_: float) -> dict[str, Any]:
        n = next(looks)
        return {**seen, "boot": str(n), "namespaces": [{**one, "model": f"m{n}"}]}

    monkeypatch.setattr(source.client, "status", status)
    for _ in range(SAMPLES + 100):
        source.sample()
    history = source.history()
    assert len(history["samples"]) == SAMPLES
    assert len(history["columns"]) == COLUMNS == len(history["samples"][-1]) - 1
    assert len(history["events"]) == EVENTS
    source.client.close()
