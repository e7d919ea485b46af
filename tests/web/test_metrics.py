"""The Prometheus text against the declared metrics and a real daemon's status."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.rows import Rows, flushed, wait_tier
from kvass.cli.bench.rig import CHUNK_TOKENS, WIDTH
from kvass.core import metrics as declared
from kvass.testing.daemon import Daemon, running_daemon
from kvass.web.metrics import (
    BY_MODEL,
    LABELLED,
    MODELS,
    SHOWN_BY_LABEL,
    SPLIT,
    exposition,
    tier_labels,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
ROW = 64 << 10
TIERS = ("l1", "disk")


def samples(fields: dict[str, Any] | None) -> Samples:
    """By name and labels. The text is read by Prometheus' own parser."""
    text = exposition(fields).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(seen: Samples, name: str, **labels: str) -> float:
    """The sum of all samples of that name that have these labels."""
    return sum(
        value
        for (sample, own), value in seen.items()
        if sample == name and labels.items() <= dict(own).items()
    )


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "disk").mkdir()
    tier = [f"disk:{folder}/disk?capacity=16MiB"]
    with running_daemon(folder, "16MiB", tier=tier) as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", ROW, ending)
        keys = [os.urandom(WIDTH) for _ in range(3)]
        rows.store(keys)
        wait_tier(rows.scheduler, flushed(3), "the flush")
        rows.find([*keys, os.urandom(WIDTH)])
        yield daemon


def test_every_declared_metric_is_there(daemon: Daemon) -> None:
    fields = daemon.status()
    (namespace,) = fields["namespaces"]
    saved = "kvass_saved_prefill_seconds_total"
    assert namespace["saved_prefill_s"] is None
    assert saved not in {name for name, _ in samples(fields)}, "it is not known yet"
    namespace["saved_prefill_s"] = 1.5
    assert samples(fields)[saved, (("model", "kvass bench"),)] == 1.5
    names = {name for name, _ in samples(fields)}
    for counter in declared.COUNTERS:
        prefix = next((p for p in LABELLED if counter.startswith(p)), None)
        assert (LABELLED[prefix][0] if prefix else f"kvass_{counter}") + "_total" in names
    for name in declared.GAUGES.keys() - SHOWN_BY_LABEL:
        assert (SPLIT[name][0] if name in SPLIT else f"kvass_{name}") in names
    assert {f"kvass_{metric}_total" for metric in BY_MODEL.values()} <= names
    for name in ("lookup", "transfer", "age_at_eviction", "reuse_gap", "event_loop_lag"):
        assert f"kvass_{name}_seconds_bucket" in names
    assert {f"kvass_group_{name}" for name in declared.GROUP_GAUGES} <= names
    assert {f"kvass_tier_{name}" for name in declared.TIER_GAUGES} <= names
    assert {f"kvass_tier_{name}_total" for name in declared.TIER_COUNTERS} <= names


def test_what_shadow_mode_found_has_metrics(daemon: Daemon) -> None:
    fields = daemon.status()
    assert not any("shadow" in name for name, _ in samples(fields))
    figures = dict.fromkeys(declared.SHADOW, 3)
    for largest in (0.5, 0.25):
        groups = [{"group": 1, "largest_difference": largest}]
        shadow = {**figures, "groups": groups}
        fields["namespaces"].append({**fields["namespaces"][0], "model": "m", "shadow": shadow})
    fields["forgotten"].append({**fields["namespaces"][-1], "shadow": shadow})
    seen, model = samples(fields), ("model", "m")
    assert seen["kvass_shadow_hit_tokens", (model,)] == 9
    assert seen["kvass_shadow_saved_seconds", (model,)] == 9
    assert seen["kvass_shadow_wrong_rows", (model,)] == 9
    assert total(seen, "kvass_shadow_largest_difference", model="m", group="1") == 0.5


def test_figures_are_the_status(daemon: Daemon) -> None:
    fields = daemon.status()
    seen = samples(fields)
    assert seen["kvass_up", ()] == 1
    assert seen["kvass_lookup_chunks_total", ()] == 4
    assert total(seen, "kvass_lookup_seconds_count", stage="core") == 1
    assert total(seen, "kvass_clients") == fields["sessions"] == 3
    assert total(seen, "kvass_rows", tier="l1") == 3
    assert total(seen, "kvass_transfer_bytes_total", tier="disk", dir="in") == 3 * ROW
    assert total(seen, "kvass_leases", kind="read") == fields["leases"]
    assert seen["kvass_hit_chunks_total", ()] == 3
    model = ("model", "kvass bench")
    assert seen["kvass_lookup_tokens_total", (model,)] == 4 * CHUNK_TOKENS
    hits = [seen["kvass_hit_tokens_total", (model, ("tier", tier))] for tier in TIERS]
    assert hits == [3 * CHUNK_TOKENS, 0]
    assert seen["kvass_tier_stored_rows_total", (("tier", "disk"),)] == 3
    assert seen["kvass_tier_up", (("tier", "disk"),)] == 1
    used = [v for (name, _), v in seen.items() if name == "kvass_group_used_bytes"]
    assert sum(used) == total(seen, "kvass_l1_used_bytes") == fields["l1_used_bytes"] == 3 * ROW


def test_the_sums_agree_after_churn(tmp_path: Path) -> None:
    """L1 has room for 16 rows of the 40; a third of them is looked for again."""
    (tmp_path / "disk").mkdir()
    tier = [f"disk:{tmp_path}/disk?capacity=16MiB"]
    with running_daemon(tmp_path, "1MiB", tier=tier) as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", ROW, ending)
        keys = [os.urandom(WIDTH) for _ in range(40)]
        for i in range(0, 40, 2):
            rows.store(keys[i : i + 2])
            wait_tier(rows.scheduler, flushed(i + 2), "the flush")
            rows.release(rows.find([keys[i // 3], os.urandom(WIDTH)]))
        seen = samples(daemon.status())
    asked, hit = total(seen, "kvass_lookup_tokens_total"), total(seen, "kvass_hit_tokens_total")
    assert asked == 40 * CHUNK_TOKENS
    assert 0 < hit < asked
    assert hit + total(seen, "kvass_miss_tokens_total") == asked
    came = total(seen, "kvass_transfer_bytes_total", tier="l1", dir="in")
    left = total(seen, "kvass_evicted_bytes_total")
    assert came >= 40 * ROW > left > 0
    assert came - left == total(seen, "kvass_l1_used_bytes", state="held")
    assert 0 < total(seen, "kvass_unread_bytes_evicted_total") < left


def test_a_daemon_that_is_down_is_one_zero() -> None:
    assert samples(None) == {("kvass_up", ()): 0}


def test_models_beyond_the_bound_are_one(daemon: Daemon) -> None:
    fields = daemon.status()
    (one,) = fields["namespaces"]
    fields["namespaces"] = [{**one, "model": f"m{i}"} for i in range(MODELS + 10)]
    rows = {
        dict(labels)["model"]: value
        for (name, labels), value in samples(fields).items()
        if name == "kvass_group_rows"
    }
    assert len(rows) == MODELS + 1
    assert rows["other"] == 10 * rows["m0"] == 30


def test_tenants_that_clients_invent_are_one(daemon: Daemon) -> None:
    fields = daemon.status()
    default, other = fields["tenants"]
    assert default["l1_bytes"] >= 3 * ROW
    listed = {**other, "tenant": "team-a", "quota": True, "cap_bytes": 5}
    invented = [{**other, "tenant": f"<{i}>", "lookups": 2} for i in range(30)]
    fields["tenants"] += [listed, *invented]
    seen = samples(fields)
    lookups = {
        dict(labels)["tenant"]: value
        for (name, labels), value in seen.items()
        if name == "kvass_tenant_lookups_total"
    }
    assert lookups == {"default": 1, "team-a": 0, "other": 60}
    assert seen["kvass_tenant_cap_bytes", (("tenant", "team-a"),)] == 5
    assert ("kvass_tenant_cap_bytes", (("tenant", "other"),)) not in seen, "there is no cap"


def test_tiers_of_one_kind_are_told_apart() -> None:
    assert tier_labels(["disk:/a", "redis://h", "disk:/b"]) == ["disk", "redis", "disk-2"]


def test_an_older_daemon_has_no_shadow_mode(daemon: Daemon) -> None:
    fields = daemon.status()
    for ns in fields["namespaces"]:
        del ns["shadow"]
    assert total(samples(fields), "kvass_up") == 1
