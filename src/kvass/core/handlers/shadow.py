"""The report of an engine in shadow mode. Such an engine looks up, loads and compares, but computes
every token itself. The core keeps the last report of each engine and shows it in the status."""

from __future__ import annotations

from typing import Any

from kvass.core.clients.registry import ClientSession, Instance
from kvass.core.handlers.checks import check_boot, scheduler_of
from kvass.core.state import State
from kvass.messages import ShadowReport


def shadow_report(state: State, session: ClientSession, msg: ShadowReport) -> None:
    """Keep the engine's figures."""
    check_boot(state, msg.boot)
    scheduler_of(state, session).shadow = msg


def shadow_fields(instance: Instance, kinds: list[str]) -> dict[str, Any] | None:
    """The last report as fields of the status; None if the engine is not in shadow mode.

    ``kinds``: the kind of each layer group of its namespace, if it has one.
    """
    report = instance.shadow
    if report is None:
        return None
    groups = [
        {
            "group": number,
            "kind": kinds[number] if number < len(kinds) else "",
            "rows": group.rows,
            "compared_bytes": group.bytes,
            "differing_rows": group.differing_rows,
            "largest_difference": group.largest_difference,
            "at_value": group.at_value,
            "not_compared": group.not_compared,
        }
        for number, group in enumerate(report.groups)
    ]
    return {
        "sampled": report.sampled,
        "lookups": report.lookups,
        "lookup_tokens": report.lookup_tokens,
        "hit_tokens": report.hit_tokens,
        "saved_s": round(report.saved_s, 3),
        "loads": report.loads,
        "load_bytes": report.load_bytes,
        "load_s": round(report.load_s, 3),
        "not_compared": report.not_compared,
        "compared_bytes": sum(group.bytes for group in report.groups),
        "differing_rows": sum(group.differing_rows for group in report.groups),
        "groups": groups,
    }
