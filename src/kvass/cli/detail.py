"""Prints every field of a daemon's status: its name, its value and its meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any, Final

from kvass.cli.report import WIDTH, size
from kvass.core import metrics
from kvass.types import printable

_MEANINGS: Final[dict[str, dict[str, str]]] = {
    "": metrics.GAUGES | {"messages": metrics.MESSAGES, "l1_node_bytes": metrics.NODES},
    "counters": metrics.COUNTERS,
    "histograms": metrics.HISTOGRAMS | metrics.LOOP_HISTOGRAMS,
    "namespaces": metrics.NAMESPACE_COUNTERS | metrics.NAMESPACE_GAUGES,
    "groups": metrics.GROUP_GAUGES,
    "shadow": metrics.SHADOW,
    "tenants": metrics.TENANT_COUNTERS | metrics.TENANT_MISSES | metrics.TENANT_GAUGES,
    "engines": metrics.ENGINE_FIELDS,
    "tiers": metrics.TIER_COUNTERS | metrics.TIER_GAUGES | metrics.TIER_HISTOGRAMS,
}
"""The meanings of fields by table of the status; ``""`` is for the fields outside of tables."""


def detail(fields: Mapping[str, Any]) -> Iterator[str]:
    """The lines to print, of at most ``WIDTH`` characters unless a value is longer. Fields that are
    0 or empty are left out, except the daemon's own gauges."""
    return map(printable, _table("", "daemon", fields))


def _table(name: str, title: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a table: first its own fields, then the tables in it."""
    meanings = _MEANINGS.get(name, {})
    tables = {n: v for n, v in fields.items() if v and (n in _MEANINGS or _is_rows(v))}
    shown = {n: v for n, v in fields.items() if n not in tables and _shows(v, not name)}
    if shown:
        yield from ("", title)
    for field, value in shown.items():
        line = f"  {field:<26} {_value(field, value)}"
        meaning = meanings.get(field, "")
        if meaning and len(line) + 2 + len(meaning) <= WIDTH:
            yield f"{line}  {meaning}"
        else:
            yield line
            yield from wrap(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    for of, table in tables.items():
        rows = table if isinstance(table, list) else [table]
        for number, row in enumerate(rows, 1):
            yield from _table(of, f"{of} {number}" if table is rows else of, row)


def _shows(value: Any, zero: bool) -> bool:
    """Whether a field is printed. ``zero``: also if it is 0."""
    if isinstance(value, dict) and "counts" in value:
        return any(value["counts"])
    return bool(value) or (zero and value == 0)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(row, dict) for row in value)


def _value(name: str, value: Any) -> str:
    if isinstance(value, dict) and "counts" in value:  # a histogram
        times = sum(value["counts"])
        return f"{times:,} times, {value['sum'] / times:.3g} s on average"
    if isinstance(value, dict) and name.endswith("_bytes"):
        return ", ".join(f"{key}: {size(number)}" for key, number in value.items())
    if isinstance(value, dict):
        return ", ".join(f"{key} {number:,}" for key, number in value.items() if number)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if name == "pid" or isinstance(value, bool | str):
        return str(value)
    if name.endswith(("_bytes", "bytes_s")) or name.startswith("bytes_"):
        return size(value) + "/s" * name.endswith("_s")
    return f"{value:,.4g} s" if name.endswith("_s") else f"{value:,}"
