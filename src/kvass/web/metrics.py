"""Prometheus metrics from the daemon's status; names and meanings from ``kvass.core.metrics``.

Law of this file: a label's values are bounded in number: ``MODELS`` models, the configured tiers,
fixed codes and reasons, and tenants that have a quota. None is a request, a key or what a client
calls its tenant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvass.core import metrics as declared

MODELS: Final = 16
"""So many models have figures of their own; further ones are summed as ``other``."""

LABELLED: Final = {
    "refused_": ("kvass_refused", "code", "Requests refused, by reason."),
    "ended_": ("kvass_sessions_ended", "code", "Sessions that the daemon ended, by reason."),
    "evicted_": ("kvass_evicted_rows", "reason", "Rows evicted from L1, by reason."),
    "discarded_": ("kvass_discarded_reservations", "reason", "Reservations not stored, by reason."),
}
"""Counters whose names differ in their ends only: one metric with a label."""

TIER_REPORT: Final = {
    "up": "Whether the tier answers.",
    "errors": "Operations that failed.",
    "queued": "Operations that wait for a worker.",
    "restarts": "Times that the tier's process was replaced.",
    "bytes": "What the tier holds, where it can tell.",
    "capacity_bytes": "What the tier may hold, where it has a bound.",
    "records": "Records that the tier holds, where it can tell.",
}
"""Fields that a tier's process adds to its table (gauges)."""


class Status:
    """A collector of one status. ``fields`` None: the daemon is down."""

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
        for name, help_ in declared.GAUGES.items():
            yield GaugeMetricFamily(f"kvass_{name}", help_, fields[name])
        yield from _traffic(fields["namespaces"], tier_labels([t["tier"] for t in fields["tiers"]]))
        yield from _groups(fields["namespaces"])
        yield from _tenants(fields.get("tenants", []))
        yield from _tiers(fields["tiers"])


def exposition(fields: dict[str, Any] | None) -> bytes:
    """The text of ``/metrics``, in Prometheus' text format 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Status(fields))
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


def _models(namespaces: list[dict[str, Any]]) -> list[str]:
    """The label of each."""
    shown = list(dict.fromkeys(ns["model"] for ns in namespaces))[:MODELS]
    return [ns["model"] if ns["model"] in shown else "other" for ns in namespaces]


def _traffic(namespaces: list[dict[str, Any]], tiers: list[str]) -> Iterator[Metric]:
    """Lookups by model, and their hits by where the tokens were: in L1, or in which tier."""
    asked: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    hits: Counter[tuple[str, str]] = Counter()
    for model, ns in zip(_models(namespaces), namespaces, strict=True):
        asked[model] += ns["lookups"]
        tokens[model] += ns["lookup_tokens"]
        hits[model, "l1"] += ns["hit_tokens"] - sum(ns["hit_tokens_tiers"])
        for tier, count in zip(tiers, ns["hit_tokens_tiers"], strict=True):
            hits[model, tier] += count
    help_ = declared.NAMESPACE_COUNTERS
    for name, counts in (("lookups", asked), ("lookup_tokens", tokens)):
        family = CounterMetricFamily(f"kvass_model_{name}", help_[name], labels=["model"])
        for model, count in counts.items():
            family.add_metric([model], count)
        yield family
    family = CounterMetricFamily(
        "kvass_model_hit_tokens", help_["hit_tokens"], labels=["model", "tier"]
    )
    for labels, count in hits.items():
        family.add_metric(labels, count)
    yield family


def _groups(namespaces: list[dict[str, Any]]) -> Iterator[Metric]:
    sums: dict[str, Counter[tuple[str, str, str]]] = {n: Counter() for n in declared.GROUP_GAUGES}
    for model, ns in zip(_models(namespaces), namespaces, strict=True):
        for group in ns["groups"]:
            for name, counter in sums.items():
                counter[model, str(group["group"]), group["kind"]] += group[name]
    for name, counter in sums.items():
        family = GaugeMetricFamily(
            f"kvass_group_{name}", declared.GROUP_GAUGES[name], labels=["model", "group", "kind"]
        )
        for labels, value in counter.items():
            family.add_metric(labels, value)
        yield family


def _tenants(tenants: list[dict[str, Any]]) -> Iterator[Metric]:
    """Names that an operator gave a quota, and ``default``; of all others, which clients choose,
    only the sum. A gauge is absent where there is no cap."""
    for kind, meanings in (
        (CounterMetricFamily, declared.TENANT_COUNTERS),
        (GaugeMetricFamily, declared.TENANT_GAUGES),
    ):
        for field, help_ in meanings.items():
            counts: Counter[str] = Counter()
            for tenant in tenants:
                if tenant[field] is not None:
                    known = tenant["quota"] or tenant["tenant"] == "default"
                    counts[tenant["tenant"] if known else "other"] += tenant[field]
            family = kind(f"kvass_tenant_{field}", help_, labels=["tenant"])
            for name, count in counts.items():
                family.add_metric([name], count)
            yield family


def _tiers(tiers: list[dict[str, Any]]) -> Iterator[Metric]:
    names = tier_labels([tier["tier"] for tier in tiers])
    for kind, meanings in (
        (CounterMetricFamily, declared.TIER_COUNTERS),
        (GaugeMetricFamily, declared.TIER_GAUGES | TIER_REPORT),
    ):
        for field, help_ in meanings.items():
            family = kind(f"kvass_tier_{field}", help_, labels=["tier"])
            for label, tier in zip(names, tiers, strict=True):
                if field in tier:
                    family.add_metric([label], float(tier[field]))
            yield family


def tier_labels(names: list[str]) -> list[str]:
    """``disk``, ``redis``, ...; a second one of a kind is ``disk-2``."""
    seen: Counter[str] = Counter()
    labels = []
    for name in names:
        kind = name.split(":", 1)[0]
        seen[kind] += 1
        labels.append(kind if seen[kind] == 1 else f"{kind}-{seen[kind]}")
    return labels
