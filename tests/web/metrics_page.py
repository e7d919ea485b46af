"""Writes the list of metrics into ``docs/monitoring.md``: ``python -m tests.web.metrics_page``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from prometheus_client.core import Metric

from kvass.core.histogram import Histogram
from kvass.core.metrics import MISSES
from kvass.web.metrics import StatusCollector

PAGE: Final = Path(__file__).parents[2] / "docs" / "monitoring.md"
HEAD: Final = "| metric | labels | meaning |\n|---|---|---|\n"

FIELDS: Final[dict[str, Any]] = {"version": "", "messages": {"": 0}}
"""The least that a status has; each table once, its figures all 0."""


class _Zeros(dict[str, Any]):
    """Has every figure that it is asked for."""

    def __missing__(self, name: str) -> Any:
        if name == "hit_tokens_tiers":
            return [0]
        if name.endswith("_seconds"):
            return Histogram().fields()
        if name == "forgotten":
            return []
        if name == "engines":
            return [_Zeros(model="", missing_ranks=[])]
        if name in ("histograms", "counters"):
            return _Zeros()
        if name == "miss_tokens":
            return dict.fromkeys(MISSES, 0)
        lists = "namespaces", "tiers", "groups", "tenants"
        return [_Zeros(model="", kind="", shadow=_Zeros())] if name in lists else 0

    def __contains__(self, name: object) -> bool:
        return True


def row(family: Metric) -> str:
    """One metric."""
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = ", ".join(f"`{label}`" for label in family.samples[0].labels if label != "le")
    return f"| `{name}` | {labels} | {family.documentation} |\n"


def page(text: str) -> str:
    """``text`` with the list as it should be."""
    fields = _Zeros(FIELDS, tiers=[_Zeros(tier="", tenants={"": _Zeros()})])
    table = HEAD + "".join(row(family) for family in StatusCollector(fields).collect())
    return text[: text.index("METRICS" if "METRICS" in text else HEAD)] + table


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
