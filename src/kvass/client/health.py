"""The troubles of a daemon and of its tiers, and what else an operator must know of them, read from
the fields of its status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvass.types import Size, small_l1

REFUSED_S: Final = 60.0
"""Seconds for which a refusal is listed. A refused engine tries again at least every 30 s."""

RESTING_S: Final = 60.0
"""Engines say within as many seconds of a daemon's start that they are done with the last one's
rows."""

FAILED_LOADS: Final = 5
FAILED_SHARE: Final = 0.1
"""At least so many failed loads are a trouble, if they are this share of the last minute's. So are
those since the start, if they are half of all and some of the last minute failed, too, as large a
share of it; or if none went well. How many of a minute go well must not decide: a minute with few
loads, or none, would then be a trouble again and again after all is mended."""
FAILING_ROWS: Final = 16
"""A tier that fails to store this many rows in a row is in trouble."""
FAILED_S: Final = 600.0
"""So long after the last failure a tier that failed to store most rows is in trouble, or until one
is stored if that is later: a disk that was full for a night may not have stored as many again for
days."""


def troubles(fields: Mapping[str, Any]) -> list[str]:
    found = [*fields.get("problems", [])]
    for engine in fields.get("engines", []):
        if missing := engine["missing_ranks"]:
            ranks = ", ".join(map(str, missing[:8]))
            found.append(f"engine {engine['instance']} waits for its ranks {ranks}")
        if why := engine.get("uncached"):
            found.append(f"engine {engine['instance']} runs uncached: {why}")
    found += [
        f"engine {refusal['instance']} was refused: {refusal['text']}"
        for refusal in fields.get("refusals", [])
        if refusal["age_s"] < REFUSED_S
    ]
    found += filter(None, map(_wrong_rows, fields.get("namespaces", [])))
    found += _arena(fields.get("arena", {}), fields.get("up_s", 0.0))
    found += [line for ns in fields.get("namespaces", []) if (line := load_trouble(ns))]
    lines = {tier["tier"]: tier_trouble(tier) for tier in used_tiers(fields.get("tiers", []))}
    return found + [f"tier {name}: {line}" for name, line in lines.items() if line]


def _wrong_rows(namespace: Mapping[str, Any]) -> str:
    """What shadow mode found wrong since the namespace was cleared, as one line; empty: nothing."""
    wrong = (namespace.get("shadow") or {}).get("wrong_rows", 0)
    if not wrong:
        return ""
    return (
        f"shadow mode found {wrong:,} wrong row{'s' * (wrong > 1)} of {namespace['model'] or '?'} "
        f"(namespace {namespace['namespace'][:8]}): loaded and computed KV differ by as much as "
        "the values; see docs/wrong-tokens.md"
    )


def notes(fields: Mapping[str, Any]) -> list[str]:
    """What an operator must know though nothing is wrong, one line each."""
    found, tiers = [*fields.get("notes", [])], used_tiers(fields.get("tiers", []))
    small = small_l1(fields.get("l1_capacity_bytes", 0), fields.get("engine_cache_bytes", 0))
    if small and not tiers:
        found.append(small)
    return found + [f"tier {tier['tier']}: {text}" for tier in tiers if (text := _no_room(tier))]


def _no_room(tier: Mapping[str, Any]) -> str:
    """The line of a tier whose disk has less room than the tier may take; empty: it has enough."""
    lacks, capacity = tier.get("lacking_bytes", 0), tier.get("capacity_bytes", 0)
    if not lacks:
        return ""
    there = Size(max(0, capacity - lacks)).rounded()
    return (
        f"its disk has room for {there} of its capacity of {Size(capacity).rounded()}: free some, "
        "or give it less"
    )


def _arena(arena: Mapping[str, Any], up_s: float) -> list[str]:
    """What is wrong with an L1 that outlives the daemon."""
    found = []
    if arena.get("resting_pids") and up_s > RESTING_S:
        pids = ", ".join(map(str, arena["resting_pids"][:8]))
        found.append(
            f"arena: {Size(arena['resting_bytes']).rounded()} rest since the last daemon's end: "
            f"the engines' processes {pids} may still write to them, and have not said that they "
            "are done; restart them"
        )
    if arena.get("lacks_index"):
        found.append(
            "arena: L1 is not used to its full size, because there is no memory for more of its "
            "index: give less, or mount a larger tmpfs"
        )
    return found


def load_trouble(ns: Mapping[str, Any]) -> str:
    """The trouble of the loads of a namespace, as one line; empty: none."""
    spans = ("minute_", "in the last minute", FAILED_SHARE), ("", "since the start", 0.5)
    recent = ns.get("minute_failed_loads", 0)
    fails = recent and recent >= FAILED_SHARE * ns.get("minute_loads", 0)
    for prefix, when, share in spans:
        failed, loads = ns.get(f"{prefix}failed_loads", 0), ns.get(f"{prefix}loads", 0)
        if failed >= FAILED_LOADS and failed >= share * loads and (fails or failed == loads):
            name = f"{ns.get('model') or '?'} ({ns['namespace'][:8]})"
            return f"{failed:,} of {loads:,} loads failed {when}: {name}; the engines' logs say why"
    return ""


def used_tiers(tiers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tiers that are not removed, in the order in which lookups ask them."""
    used = [tier for tier in tiers if tier.get("place") != 0]
    return sorted(used, key=lambda tier: tier.get("place", 1))


def tier_state(tier: dict[str, Any]) -> str:
    """The state of a tier: ``up``, ``degraded`` or ``down``."""
    return ("degraded" if tier_trouble(tier) else "up") if tier.get("up") else "down"


def tier_note(tier: dict[str, Any]) -> str:
    """What to know of a tier that is no trouble, as a few words; empty: nothing."""
    refused = tier.get("refused_records", 0)
    found = (
        "over its write budget" if tier.get("over_budget") else "",
        f"{refused:,} requests for records refused" if refused else "",
    )
    return ", ".join(filter(None, found))


def tier_trouble(tier: dict[str, Any]) -> str:
    """The trouble of a tier, as one line; empty: none."""
    if not tier.get("up"):
        return f"down: {tier.get('trouble') or 'it has not been opened yet'}"
    failed, stored = tier["store_failures"], tier["stored_rows"]
    failing = tier.get("failing_rows", 0)
    why = ", the disk is full" if tier.get("full") else ""
    if not why and tier.get("too_large"):
        why = ", a row is larger than what the tier, or its tenant's part of it, may hold"
    if failing >= FAILING_ROWS:
        return f"stores fail: the last {failing:,} rows were not stored{why}"
    lately = failing or tier.get("last_failure_s", 0.0) < FAILED_S
    if failed and failed >= stored and lately:
        return f"stores fail: {failed:,} failed, {stored:,} did not{why}"
    return str(tier.get("trouble", ""))
