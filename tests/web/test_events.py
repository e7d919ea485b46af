"""The history and the events of the dashboard: what they say, and that they are bounded."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.testing.daemon import Daemon
from kvass.web import source as module
from kvass.web.events import changes
from kvass.web.source import COLUMNS, EVENTS, FOR_ROOM, SAMPLES, Source, figures
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


def test_a_sample_has_what_was_saved_and_why_tokens_missed() -> None:
    """By model and by tenant. A tenant whose name a client chose is one of the others."""
    traffic = {"lookup_tokens": 9, "hit_tokens": 4, "miss_tokens": {"absent": 5, "late": 0}}
    ns = {"model": "a/b", "hit_tokens_tiers": [], "saved_prefill_s": 1.5, **traffic}
    tenants = [
        {"tenant": "t", "quota": True, **traffic},
        {"tenant": "x", "quota": False, **traffic},
    ]
    counters = {"lookups": 3, "l1_in_bytes": 0, "l1_lent_bytes": 0}
    counters |= {f"bytes_evicted_{why}": 2 for why in FOR_ROOM}
    status = {"l1_used_bytes": 1, "leases": 0, "counters": counters, "tiers": [], "forgotten": []}
    seen = dict(figures({**status, "namespaces": [ns], "tenants": tenants}))
    assert (seen["saved/a/b"], seen["missed/absent/a/b"], seen["evicted"]) == (1.5, 5, 6)
    assert (seen["tenant-asked/t"], seen["tenant-hit/all/t"]) == (9, 4)
    assert seen["tenant-missed/absent/t"] == seen["tenant-missed/absent/other"] == 5
    assert not [name for name in seen if "late" in name or "x" in name]
    for tenant in tenants:
        del tenant["miss_tokens"]  # so it is with an older daemon
    assert "tenant-asked/t" in dict(figures({**status, "namespaces": [ns], "tenants": tenants}))


def test_a_status_without_a_field_does_not_end_the_history(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon of another version answered for a while. Each kind of error is logged once."""
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    source, good = Source(daemon.socket), daemon.status()
    bad = {name: value for name, value in good.items() if name != "forgotten"}
    none = {**good, "leases": None, "l1_used_bytes": None}
    answers = iter([good, bad, none, bad, none, bad, good])
    monkeypatch.setattr(source.client, "status", lambda _: next(answers))
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time)
    clock.sleep = lambda _: len(source.history()["samples"]) < 2 or 1 / 0
    monkeypatch.setattr(module, "time", clock)
    with pytest.raises(ZeroDivisionError):
        source.sample_for_ever()
    kinds = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert kinds == [KeyError, TypeError]
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
