"""The events between two statuses of the daemon, one line each: engines, tiers, clears,
refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kvass.client.health import tier_trouble, used_tiers

Fields = dict[str, Any]

_FAILURES: Final = {
    "refused_": "requests refused",
    "ended_": "sessions ended by the daemon",
    "discarded_": "stores discarded",
    "lapsed_leases": "leases ended at their deadline",
    "flushes_lost": "rows evicted before a tier had them",
}
"""Beginnings of the names of counters whose growth is an event, and what the counters count."""
_NORMAL: Final = {"ended_closed", "discarded_cancelled"}
"""Counters with such a name whose growth is no event."""


def changes(before: Fields | None, after: Fields | None) -> Iterator[str]:
    """The events between the statuses ``before`` and ``after``. ``None``: the daemon is down."""
    if after is None:
        if before is not None:
            yield "the daemon is gone"
        return
    if before is None or before["boot"] != after["boot"]:
        yield f"a daemon is up: version {after['version']}, pid {after['pid']}"
        before = {"engines": [], "namespaces": [], "tiers": [], "counters": {}}
    yield from _engines(before, after)
    yield from _tiers(before["tiers"], after["tiers"])
    epochs = {ns["namespace"]: ns["epoch"] for ns in before["namespaces"]}
    for ns in after["namespaces"]:
        if ns["epoch"] > epochs.get(ns["namespace"], ns["epoch"]):
            yield f"namespace {ns['namespace'][:8]} ({ns['model']}) was cleared"
    for name, count in after["counters"].items():
        meaning = next((line for start, line in _FAILURES.items() if name.startswith(start)), None)
        more = count - before["counters"].get(name, 0)
        if meaning and more > 0 and name not in _NORMAL:
            reason = name.partition("_")[2] if name.startswith(("ref", "end", "dis")) else ""
            yield f"{more:,} {meaning}{f': {reason}' if reason else ''}"


def _engines(before: Fields, after: Fields) -> Iterator[str]:
    old, new = ({e["instance"]: e for e in side["engines"]} for side in (before, after))
    for name in new.keys() - old.keys():
        yield f"engine {name} came: {new[name]['model'] or 'no model named'}"
    for name in old.keys() - new.keys():
        yield f"engine {name} is gone"
    for name in new.keys() & old.keys():
        missing = new[name]["missing_ranks"]
        if missing and not old[name]["missing_ranks"]:
            yield f"engine {name} lost ranks {', '.join(map(str, missing[:8]))}"


def _tiers(before: list[Fields], after: list[Fields]) -> Iterator[str]:
    was = {tier["tier"]: tier_trouble(tier) for tier in used_tiers(before)}
    names = [tier["tier"] for tier in used_tiers(after)]
    if was:
        yield from (f"tier {name} was added" for name in names if name not in was)
    yield from (f"tier {name} was removed" for name in was if name not in names)
    for tier in used_tiers(after):
        line = tier_trouble(tier)
        known = was.get(tier["tier"], "")
        if line and not known:
            yield f"tier {tier['tier']}: {line}"
        elif known and not line:
            yield f"tier {tier['tier']} is well again"
