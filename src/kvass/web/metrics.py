"""Prometheus metrics from the daemon's status. Names and meanings come from ``kvass.core.metrics``.

Law of this file: the number of a label's values is bounded. They are ``MODELS`` models, the
configured tiers, fixed codes and reasons, and tenants that have a quota. No label has a request's
id, a key, or a tenant's name that a client chose.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from kvass.core import metrics as declared
from kvass.core.histogram import BOUNDS

MODELS: Final = 16
"""The most models that have figures of their own. All further models are summed as ``other``."""

LABELLED: Final = {
    "refused_": ("kvass_refused", "code", "Requests refused, by reason."),
    "ended_": ("kvass_client_disconnects", "reason", "Sessions that ended, by reason."),
    "bytes_evicted_": ("kvass_evicted_bytes", "reason", "Bytes that left L1, by reason."),
    "evicted_": ("kvass_evicted_rows", "reason", "Rows evicted from L1, by reason."),
    "discarded_": ("kvass_discarded_reservations", "reason", "Reservations not stored, by reason."),
    "not_granted_": ("kvass_allocation_failures", "reason", "Chunks refused, by reason."),
    "promotions_": ("kvass_promotions_skipped", "reason", "Loads from tiers cut or skipped."),
}
"""Beginnings of counters' names. Counters with the same beginning are one metric; what follows the
beginning is the value of its label. Each has the metric, the label and the meaning."""

STATES: Final = ("rows", "rows_writing", "rows_loading")
"""Fields of a layer group that are numbers of rows in a state."""

TIER_REPORT: Final = {
    "up": "Whether the tier answers.",
    "errors": "Operations that failed.",
    "queued": "Operations that wait for a thread.",
    "restarts": "Times that the tier's process was replaced.",
    "bytes": "Bytes in the tier, if it reports them.",
    "capacity_bytes": "Capacity of the tier, if it has one.",
    "lacking_bytes": "Bytes of a disk tier's capacity for which its disk has no room.",
    "write_budget_bytes": "Bytes a day that the tier may write, if it has a write budget.",
    "over_budget": "Whether the tier is over its write budget.",
    "refused_records": "Requests for records that a store answered and refused; the tier is up.",
    "not_decrypted": "Records of an encrypted tier that were loaded but could not be decrypted.",
    "other_keys": "Keys that stored records in an encrypted tier and are not in its key file.",
}
"""Fields of a tier's status that the tier's process adds (gauges)."""

TIER_TENANTS: Final = {
    "bytes": "Bytes in the tier that the tenant pays for, if the tier has quotas.",
    "cap_bytes": "Most bytes of the tier that the tenant may have; absent without a cap.",
    "reserved_bytes": "Bytes of the tier that are reserved for the tenant.",
}
"""Fields of each entry of a tier's ``tenants`` (gauges)."""


class StatusCollector:
    """A Prometheus collector of one status. ``fields`` None: the daemon is down."""

    def __init__(self, fields: dict[str, Any] | None) -> None:
        self._fields = fields

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvass_up", "Whether the daemon answers.", self._fields is not None)
        if self._fields is None:
            return
        fields = self._fields
        info = GaugeMetricFamily("kvass_build_info", "The daemon's version.", labels=["version"])
        info.add_metric([fields["version"]], 1)
        yield info
        yield from _counters(fields["counters"])
        messages = CounterMetricFamily("kvass_messages", declared.MESSAGES, labels=["kind"])
        for kind, count in fields["messages"].items():
            messages.add_metric([kind], count)
        yield messages
        yield from _gauges(fields)
        names = tier_labels([tier["tier"] for tier in fields["tiers"]])
        yield from _traffic([*fields["forgotten"], *fields["namespaces"]], names)
        yield from _groups(fields["namespaces"])
        yield from _tenants(fields["tenants"])
        yield from _tiers(fields["tiers"], names)
        yield from _moved(fields, names)
        yield from _shadow([*fields["forgotten"], *fields["namespaces"]])
        yield from _histograms(fields, names)


def exposition(fields: dict[str, Any] | None) -> bytes:
    """The text of ``/metrics``, in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(fields))
    return generate_latest(registry)


def _counters(counts: Mapping[str, int]) -> Iterator[Metric]:
    labelled: dict[str, CounterMetricFamily] = {}
    for name, help_ in declared.COUNTERS.items():
        prefix = next((p for p in LABELLED if name.startswith(p)), None)
        if prefix is None:
            yield CounterMetricFamily(f"kvass_{name}", help_, counts.get(name, 0))
            continue
        metric, label, meaning = LABELLED[prefix]
        family = labelled.setdefault(prefix, CounterMetricFamily(metric, meaning, labels=[label]))
        family.add_metric([name.removeprefix(prefix)], counts.get(name, 0))
    yield from labelled.values()


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    name: str,
    meaning: str,
    labels: Sequence[str],
    samples: Iterable[tuple[Sequence[str], float | None]],
) -> Metric:
    """A metric. Samples of the same labels are added up. None is not known, or there is none."""
    sums: dict[Sequence[str], float] = {}
    for values, number in samples:
        if number is not None:
            sums[values] = sums.get(values, 0) + number
    family = kind(name, meaning, labels=labels)
    for values, number in sums.items():
        family.add_metric(values, number)
    return family


SPLIT: Final = {
    "leases": ("kvass_leases", "kind", "read", "Open leases (read) and reservations (write)."),
    "reservations": ("kvass_leases", "kind", "write", ""),
    "lease_oldest_s": ("kvass_lease_oldest_age_seconds", "kind", "read", "Age of the oldest."),
    "reservation_oldest_s": ("kvass_lease_oldest_age_seconds", "kind", "write", ""),
}
"""Gauges that share a metric: the metric, its label, the label's value, the metric's meaning."""
SHOWN_BY_LABEL: Final = {"sessions", "rows", "l1_used_bytes", "l1_cleared_bytes"}
"""Gauges that other metrics show by label."""


def _gauges(fields: Mapping[str, Any]) -> Iterator[Metric]:
    for name, help_ in declared.GAUGES.items():
        if name not in SPLIT and name not in SHOWN_BY_LABEL:
            yield GaugeMetricFamily(f"kvass_{name}", help_, fields[name])
    split: dict[str, GaugeMetricFamily] = {}
    for name, (metric, label, value, help_) in SPLIT.items():
        family = split.setdefault(metric, GaugeMetricFamily(metric, help_, labels=[label]))
        family.add_metric([value], fields[name])
    yield from split.values()
    engines = fields["engines"]
    schedulers = sum(engine["scheduler"] for engine in engines)
    workers = sum(engine["ranks"] - len(engine["missing_ranks"]) for engine in engines)
    roles = {"scheduler": schedulers, "worker": workers}
    roles["other"] = fields["sessions"] - schedulers - workers
    clients = (((role,), count) for role, count in roles.items())
    yield _family(GaugeMetricFamily, "kvass_clients", "Connections.", ["role"], clients)
    yield _used(fields)


def _used(fields: Mapping[str, Any]) -> Metric:
    """The used bytes of L1, by the state of their rows. The states add up to what is used."""
    groups = [group for ns in fields["namespaces"] for group in ns["groups"]]
    held, writing, loading = (
        sum(group[state] * group["row_bytes"] for group in groups) for state in STATES
    )
    quarantined = sum(group["quarantined_bytes"] for group in groups)
    cleared = fields["l1_cleared_bytes"]
    parts = {"held": held, "writing": writing, "loading": loading}
    parts |= {"quarantined": quarantined, "cleared": cleared}
    parts["failed"] = fields["l1_used_bytes"] - sum(parts.values())
    samples = (((state,), number) for state, number in parts.items())
    help_ = "Slots in use, by the state of their row, and cleared memory."
    return _family(GaugeMetricFamily, "kvass_l1_used_bytes", help_, ["state"], samples)


def model_labels(namespaces: list[dict[str, Any]]) -> list[str]:
    names = [ns["model"] or "unnamed" for ns in namespaces]
    shown = list(dict.fromkeys(names))[:MODELS]
    return [name if name in shown else "other" for name in names]


BY_MODEL: Final = {
    "lookups": "lookup_requests",
    "lookup_tokens": "lookup_tokens",
    "stored_tokens": "stored_tokens",
    "loads": "loads",
    "failed_loads": "failed_loads",
    "answer_tokens": "answer_tokens",
    "repeated_tokens": "repeated_tokens",
    "saved_prefill_s": "saved_prefill_seconds",
}


def _traffic(namespaces: list[dict[str, Any]], tiers: list[str]) -> Iterator[Metric]:
    every = [*zip(model_labels(namespaces), namespaces, strict=True)]
    help_, kind = declared.NAMESPACE_COUNTERS, CounterMetricFamily
    for name, metric in BY_MODEL.items():
        samples = [((model,), ns[name]) for model, ns in every]
        yield _family(kind, f"kvass_{metric}", help_[name], ["model"], samples)
    hits, misses = list[tuple[Sequence[str], float]](), list[tuple[Sequence[str], float]]()
    for model, ns in every:
        hits.append(((model, "l1"), ns["hit_tokens"] - sum(ns["hit_tokens_tiers"])))
        of_tiers = zip(tiers, ns["hit_tokens_tiers"], strict=True)
        hits += [((model, tier), count) for tier, count in of_tiers]
        misses += [((model, why), count) for why, count in ns["miss_tokens"].items()]
    for name, label, counts in (("hit_tokens", "tier", hits), ("miss_tokens", "reason", misses)):
        yield _family(kind, f"kvass_{name}", help_[name], ["model", label], counts)


def _shadow(namespaces: list[dict[str, Any]]) -> Iterator[Metric]:
    """What engines in shadow mode found, summed by model."""
    shadows = [ns for ns in namespaces if ns.get("shadow") is not None]
    every = [*zip(model_labels(shadows), shadows, strict=True)]
    for name, help_ in declared.SHADOW.items():
        samples = [((model,), ns["shadow"][name]) for model, ns in every]
        metric = f"kvass_shadow_{name.removesuffix('_s')}{'_seconds' * name.endswith('_s')}"
        text = f"Shadow mode: {help_}"
        yield _family(GaugeMetricFamily, metric, text, ["model"], samples)
    largest: dict[tuple[str, str], float] = {}
    for model, ns in every:
        for group in ns["shadow"]["groups"]:
            key = model, str(group["group"])
            largest[key] = max(largest.get(key, 0.0), group["largest_difference"])
    metric, text = "kvass_shadow_largest_difference", f"Shadow mode: {declared.SHADOW_GROUP}"
    yield _family(GaugeMetricFamily, metric, text, ["model", "group"], largest.items())


def _moved(fields: Mapping[str, Any], names: list[str]) -> Iterator[Metric]:
    """Bytes moved by tier and direction, and rows by tier. L1 counts as a tier here."""
    counters, tiers = fields["counters"], fields["tiers"]
    moved = [(("l1", "in"), counters["l1_in_bytes"]), (("l1", "out"), counters["l1_lent_bytes"])]
    for name, tier in zip(names, tiers, strict=True):
        moved += [((name, "in"), tier["stored_bytes"]), ((name, "out"), tier["loaded_bytes"])]
    help_ = "Bytes written to (in) and read from (out) L1 or a tier."
    yield _family(CounterMetricFamily, "kvass_transfer_bytes", help_, ["tier", "dir"], moved)
    rows = [(("l1",), fields["rows"])]
    rows += [
        ((name,), tier["records"])
        for name, tier in zip(names, tiers, strict=True)
        if "records" in tier
    ]
    help_ = "Rows in L1, or in a tier that reports them."
    yield _family(GaugeMetricFamily, "kvass_rows", help_, ["tier"], rows)


def _histograms(fields: Mapping[str, Any], names: list[str]) -> Iterator[Metric]:
    shown, meanings = fields["histograms"], declared.HISTOGRAMS | declared.LOOP_HISTOGRAMS
    lookups = "Time of lookups: in the daemon (core); in all, if they waited for tiers (tiers)."
    family = HistogramMetricFamily("kvass_lookup_seconds", lookups, labels=["stage"])
    for stage in ("core", "tiers"):
        family.add_metric([stage], *_buckets(shown[f"lookup_{stage}_seconds"]))
    yield family
    for name in ("age_at_eviction_seconds", "reuse_gap_seconds", "event_loop_lag_seconds"):
        buckets, total = _buckets(shown[name])
        yield HistogramMetricFamily(f"kvass_{name}", meanings[name], buckets, total)
    help_ = "Time of each load from (out) or store to (in) a tier, of up to 16 MiB."
    family = HistogramMetricFamily("kvass_transfer_seconds", help_, labels=["tier", "dir"])
    for name, tier in zip(names, fields["tiers"], strict=True):
        family.add_metric([name, "in"], *_buckets(tier["store_seconds"]))
        family.add_metric([name, "out"], *_buckets(tier["load_seconds"]))
    yield family


def _buckets(histogram: Mapping[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """The cumulative buckets and the sum, as ``HistogramMetricFamily`` takes them."""
    upto = itertools.accumulate(histogram["counts"])
    names = [*map(floatToGoString, BOUNDS), "+Inf"]
    return list(zip(names, upto, strict=True)), histogram["sum"]


def _groups(namespaces: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ["model", "group", "kind"]
    every = [
        ((model, str(group["group"]), group["kind"]), group)
        for model, ns in zip(model_labels(namespaces), namespaces, strict=True)
        for group in ns["groups"]
    ]
    for name, help_ in declared.GROUP_GAUGES.items():
        samples = ((values, group[name]) for values, group in every)
        yield _family(GaugeMetricFamily, f"kvass_group_{name}", help_, labels, samples)


def tenant_label(tenant: Mapping[str, Any]) -> str:
    """The label ``tenant`` of a tenant. Names that clients choose are not shown."""
    known = tenant["quota"] or tenant["tenant"] == "default"
    return str(tenant["tenant"]) if known else "other"


def _tenants(tenants: list[dict[str, Any]]) -> Iterator[Metric]:
    """The figures of ``default`` and of each tenant with a quota. All other tenants, whose names
    clients choose, are summed as ``other``. A tenant without a cap has no gauge of it."""
    for kind, meanings in (
        (CounterMetricFamily, declared.TENANT_COUNTERS),
        (GaugeMetricFamily, declared.TENANT_GAUGES),
    ):
        for field, help_ in meanings.items():
            samples = (((tenant_label(tenant),), tenant[field]) for tenant in tenants)
            yield _family(kind, f"kvass_tenant_{field}", help_, ["tenant"], samples)


def _tiers(tiers: list[dict[str, Any]], names: list[str]) -> Iterator[Metric]:
    for kind, meanings in (
        (CounterMetricFamily, declared.TIER_COUNTERS),
        (GaugeMetricFamily, declared.TIER_GAUGES | TIER_REPORT),
    ):
        for field, help_ in meanings.items():
            there = [one for one in zip(names, tiers, strict=True) if field in one[1]]
            samples = (((label,), tier[field]) for label, tier in there)
            yield _family(kind, f"kvass_tier_{field}", help_, ["tier"], samples)
    for field, help_ in TIER_TENANTS.items():
        by_tenant = [
            ((label, tenant), figures[field])
            for label, tier in zip(names, tiers, strict=True)
            for tenant, figures in tier.get("tenants", {}).items()
            if field in figures
        ]
        name = f"kvass_tier_tenant_{field}"
        yield _family(GaugeMetricFamily, name, help_, ["tier", "tenant"], by_tenant)


def tier_labels(names: list[str]) -> list[str]:
    """The label ``tier`` of each tier: its kind, like ``disk``. A second disk is ``disk-2``."""
    seen: Counter[str] = Counter()
    labels = []
    for name in names:
        kind = name.split(":", 1)[0]
        seen[kind] += 1
        labels.append(kind if seen[kind] == 1 else f"{kind}-{seen[kind]}")
    return labels
