"""Each alert of ``deploy/alerts.yml`` fires when a real daemon has its cause, and only then.

The daemon is scraped before and after the cause. Prometheus' own ``promtool`` evaluates the rules
over series in which what happened between two scrapes happens every minute.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from bench.rows import Rows
from kvass.cli.bench.rig import WIDTH
from kvass.errors import Refused
from kvass.messages import (
    HandedOver,
    Lookup,
    LookupResult,
    Ping,
    ShadowGroup,
    ShadowReport,
)
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.browser import debian
from tests.support.waiting import eventually
from tests.web.test_deploy import DEPLOY
from tests.web.test_metrics import Samples, samples
from tests.web.test_server import children, free_port

ROW: Final = 64 << 10
HOURS: Final = 2
_COUNTERS: Final = ("_total", "_bucket", "_count", "_sum")


def series(*phases: tuple[Samples, Samples, int]) -> list[dict[str, str]]:
    """``phases``: two scrapes each, and for how many minutes what lies between them is repeated."""
    found = []
    for name, labels in phases[-1][1]:
        values, level = [], phases[0][0].get((name, labels), 0.0)
        for before, after, minutes in phases:
            step = after[name, labels] - before.get((name, labels), 0.0)
            if name.endswith("_age_seconds"):  # an open lease grows old
                level, step = after[name, labels], 60.0 if after[name, labels] else 0.0
            elif not name.endswith(_COUNTERS):
                level, step = after[name, labels], 0.0
            values.append(f"{level!r}+{step!r}x{minutes}")
            level += step * (minutes + 1)
        text = ",".join(f"{k}='{v}'" for k, v in (*labels, ("job", "kvass"), ("instance", "a")))
        found.append({"series": f"{name}{{{text}}}", "values": " ".join(values)})
    return found


def target(node: str, values: str) -> dict[str, str]:
    """Whether Prometheus could scrape a node, minute by minute; ``_``: it is no target any more."""
    return {"series": f"up{{job='kvass',instance='{node}'}}", "values": values}


def fired(folder: Path, *phases: tuple[Samples, Samples, int], up: str = "1") -> set[str]:
    """The alerts that fire at the end. ``up``: of the node whose daemon is scraped."""
    minutes = sum(phase[2] for phase in phases)
    return evaluated(folder, [*series(*phases), target("a", f"{up}x{2 * minutes}")], minutes)


def evaluated(folder: Path, given: list[dict[str, str]], minutes: int) -> set[str]:
    """The alerts that fire after so many minutes, by promtool's word."""
    asked = {"expr": "ALERTS{alertstate='firing'}", "eval_time": f"{minutes}m", "exp_samples": []}
    tests = [{"interval": "1m", "input_series": given, "promql_expr_test": [asked]}]
    rules = {
        "rule_files": [str(DEPLOY / "alerts.yml")],
        "evaluation_interval": "1m" if minutes < 300 else "10m",
    }
    (folder / "test.yml").write_text(yaml.safe_dump({**rules, "tests": tests}))
    command = [str(debian("promtool")), "test", "rules", str(folder / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    names = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    said = done.stdout + done.stderr
    assert "SUCCESS" in said or "got:" in said, said
    return {rule["alert"] for rule in names if f'alertname="{rule["alert"]}"' in said}


def prompt(measured: Samples) -> Samples:
    """``measured`` by a daemon that never waited for this machine, which has other work: no lookup
    and no turn of the loop took it any time."""
    found = dict(measured)
    for name, labels in measured:
        timed, bucket, _ = name.partition("_bucket")
        if bucket and timed in ("kvass_lookup_seconds", "kvass_event_loop_lag_seconds"):
            rest = tuple(label for label in labels if label[0] != "le")
            found[name, labels] = measured[f"{timed}_count", rest]
    return found


def keys(count: int) -> list[bytes]:
    return [os.urandom(WIDTH) for _ in range(count)]


class Scene:
    """A daemon with an engine, scraped at the beginning."""

    def __init__(self, daemon: Daemon, rows: Rows, folder: Path) -> None:
        self.daemon, self.rows, self.folder = daemon, rows, folder
        self.before = self.scrape()

    def scrape(self) -> Samples:
        """As Prometheus sees it now, on a machine without other work."""
        return prompt(samples(self.daemon.status()))

    def use(self, times: int = 1) -> None:
        """Traffic that hits."""
        for _ in range(times):
            stored = keys(4)
            self.rows.store(stored)
            self.rows.release(self.rows.find(stored))

    def fired(self) -> set[str]:
        """What fires if things go on as since the beginning."""
        return fired(self.folder, (self.before, self.scrape(), HOURS * 60))


@contextmanager
def scene(folder: Path, l1_size: str = "16MiB", **options: Any) -> Iterator[Scene]:
    with running_daemon(folder, l1_size, **options) as daemon, ExitStack() as ending:
        yield Scene(daemon, Rows(daemon.socket, "mine", ROW, ending), folder)


def disk(folder: Path) -> list[str]:
    (folder / "disk").mkdir()
    return [f"disk:{folder}/disk?capacity=64MiB"]


def test_nothing_fires_while_all_is_well(tmp_path: Path) -> None:
    with scene(tmp_path, tier=disk(tmp_path)) as one:
        eventually(lambda: one.scrape()["kvass_tier_up", (("tier", "disk"),)] == 1)
        one.use(3)
        assert one.fired() == set()


def test_a_daemon_that_is_down(tmp_path: Path) -> None:
    down = samples(None)
    assert fired(tmp_path, (down, down, 10)) == {"KvassDown"}


@pytest.mark.parametrize(
    ("nodes", "alerts"),
    [
        ({"a": "1x30", "b": "1x10 0x20"}, {"KvassDown"}),
        ({"a": "1x30", "b": "1x10 _x20"}, {"KvassGone"}),
        ({"a": "1x10 _x20"}, {"KvassDown", "KvassGone"}),
        ({}, {"KvassDown"}),
        ({"a": "1x30", "b": "1x30"}, set()),
        ({"a": "1x30", "b": "1x10 _x90"}, set()),  # nobody waits for a node that left long ago
    ],
)
def test_a_node_that_cannot_be_scraped_or_is_gone(
    nodes: dict[str, str], alerts: set[str], tmp_path: Path
) -> None:
    minutes = 100 if "_x90" in nodes.get("b", "") else 30
    given = [target(node, values.replace("1x30", f"1x{minutes}")) for node, values in nodes.items()]
    assert evaluated(tmp_path, given or [target("x", "_x30")], minutes) == alerts


def test_a_tier_that_is_down(tmp_path: Path) -> None:
    with scene(tmp_path, tier=[f"redis:127.0.0.1:{free_port()}"]) as one:
        assert eventually(lambda: one.scrape()["kvass_tier_up", (("tier", "redis"),)] == 0)
        assert one.fired() == {"KvassTierDown"}


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    with scene(tmp_path, tier=disk(tmp_path)) as one:
        (tier,) = children(one.daemon.pid)
        resource.prlimit(tier, resource.RLIMIT_FSIZE, (ROW, ROW))  # no file may grow further
        one.use(2)
        name = ("kvass_tier_store_failures_total", (("tier", "disk"),))
        assert eventually(lambda: one.scrape()[name] == 8)
        assert one.fired() == {"KvassTierStoresFail"}


def test_a_write_budget_that_is_spent(tmp_path: Path) -> None:
    """Eight rows take more than the six hours' worth with which it begins. Near its end a budget is
    over at one scrape and not at the next; then the rows that are left out tell."""
    (tier,) = disk(tmp_path)
    is_over = ("kvass_tier_over_budget", (("tier", "disk"),))
    left_out = ("kvass_tier_rows_over_budget_total", (("tier", "disk"),))
    with scene(tmp_path, tier=[f"{tier}&write={32 * ROW}/day"]) as one:
        assert eventually(lambda: one.scrape().get(is_over) == 0)
        one.before = one.scrape()
        assert one.before["kvass_tier_write_budget_bytes", (("tier", "disk"),)] == 32 * ROW
        assert one.fired() == set()
        one.rows.store(keys(8))
        assert eventually(lambda: one.scrape()[is_over] == 1)
        assert one.fired() == {"KvassTierOverBudget"}
        one.rows.store(keys(4))
        assert eventually(lambda: one.scrape()[left_out] == 4)
        now = one.scrape() | {is_over: 0.0}
        assert fired(tmp_path, (one.before, now, HOURS * 60)) == {"KvassTierOverBudget"}
        assert fired(tmp_path, (now, now, HOURS * 60)) == set(), "and then no more"


def test_shadow_mode_finds_wrong_rows(tmp_path: Path) -> None:
    with scene(tmp_path) as one:
        group = ShadowGroup(rows=2, differing_rows=2, wrong_rows=1)
        assert one.rows.scheduler.post(ShadowReport(boot=one.daemon.boot, groups=(group,)))
        name = ("kvass_shadow_wrong_rows", (("model", "kvass bench"),))
        assert eventually(lambda: one.scrape().get(name) == 1)
        assert one.fired() == {"KvassWrongRows"}


def test_the_hit_rate_falls(tmp_path: Path) -> None:
    """A day of hits, then an hour of misses: 100 chunks a minute. A day of all series is slow."""
    names = ("kvass_hit_tokens_total", "kvass_lookup_tokens_total", "kvass_up")

    def scrape() -> Samples:
        return {k: n for k, n in one.scrape().items() if k[0] in names}

    with scene(tmp_path, "64MiB") as one:
        stored = keys(100)
        one.rows.store(stored)
        start = scrape()
        one.rows.release(one.rows.find(stored))
        good = scrape()
        one.rows.find(keys(100))
        bad = scrape()
        day = 24 * 60
        assert fired(tmp_path, (start, good, day), (good, bad, 90)) == {"KvassHitRateFell"}
        assert fired(tmp_path, (start, good, day), (start, good, 90)) == set()


def test_loads_that_fail(tmp_path: Path) -> None:
    """Two of ten."""
    with scene(tmp_path) as one:
        boot = one.daemon.boot
        results = [LookupResult("r", 256, 0 if n < 2 else 256, failed=n < 2) for n in range(10)]
        one.rows.scheduler.post(HandedOver(boot=boot, results=tuple(results)))
        one.rows.scheduler.call(Ping(), 5.0)
        assert one.fired() == {"KvassLoadsFail"}
        well = one.scrape()
        one.rows.scheduler.post(HandedOver(boot=boot, results=tuple(results[2:])))
        one.rows.scheduler.call(Ping(), 5.0)
        assert fired(tmp_path, (well, one.scrape(), HOURS * 60)) == set()


def test_what_is_stored_is_evicted_unread(tmp_path: Path) -> None:
    with scene(tmp_path, "1MiB") as one:
        for _ in range(20):
            one.rows.store(keys(2))
        assert one.fired() == {"KvassEvictsUnread"}


def test_an_engine_that_keeps_its_lease(tmp_path: Path) -> None:
    with scene(tmp_path, lease_s=1000) as one:
        stored = keys(1)
        one.rows.store(stored)
        one.rows.find(stored)
        time.sleep(0.01)
        assert one.fired() == {"KvassLeaseOld"}


def test_leases_that_lapse(tmp_path: Path) -> None:
    """Ten a minute are too many."""
    with scene(tmp_path, lease_s=0.2) as one:
        stored = keys(1)
        one.rows.store(stored)
        for _ in range(10):
            one.rows.find(stored)
        assert eventually(lambda: one.scrape()["kvass_lapsed_leases_total", ()] == 10)
        assert one.fired() == {"KvassLeasesLapse"}


def test_an_engine_that_is_refused(tmp_path: Path) -> None:
    with scene(tmp_path) as one:
        with pytest.raises(Refused, match="bytes"):
            one.rows.scheduler.call(Lookup(request="r", digests=b"123", width=2), 5.0)
        assert one.fired() == {"KvassRefuses"}


def test_peers_that_speak_no_kvass(tmp_path: Path) -> None:
    with scene(tmp_path) as one:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(one.daemon.socket)
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
            peer.recv(1000)
        assert one.fired() == {"KvassRefuses"}


def test_a_daemon_that_is_slow(tmp_path: Path) -> None:
    """It is stopped for a second, in which its loop should have looked at its lag."""
    with scene(tmp_path) as one:
        one.use()
        before = samples(one.daemon.status())
        one.daemon.suspend()
        time.sleep(1.3)
        one.daemon.resume()
        late = ("kvass_event_loop_lag_seconds_sum", ())
        assert eventually(lambda: one.scrape()[late] - before[late] > 0.1)
        minutes = HOURS * 60
        assert fired(tmp_path, (before, samples(one.daemon.status()), minutes)) == {"KvassSlow"}
        assert one.fired() == set()


def test_every_alert_has_a_cause_here() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    text = Path(__file__).read_text()
    causes = [rule["alert"] for rule in rules if f'{{"{rule["alert"]}"}}' not in text]
    assert causes == []
