"""The troubles of a daemon and of its tiers, read from the fields of its status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

REFUSED_S: Final = 60.0
"""Seconds for which a refusal is listed. A refused engine tries again at least every 30 s."""

FAILING_ROWS: Final = 16
"""A tier that fails to store this many rows in a row is in trouble."""


def troubles(fields: Mapping[str, Any]) -> list[str]:
    """The troubles of the daemon, one line each."""
    found = []
    for engine in fields.get("engines", []):
        if missing := engine["missing_ranks"]:
            ranks = ", ".join(map(str, missing[:8]))
            found.append(f"engine {engine['instance']} waits for its ranks {ranks}")
    found += [
        f"engine {refusal['instance']} was refused: {refusal['text']}"
        for refusal in fields.get("refusals", [])
        if refusal["age_s"] < REFUSED_S
    ]
    found += filter(None, map(_wrong_rows, fields.get("namespaces", [])))
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


def used_tiers(tiers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tiers that are not removed, in the order in which lookups ask them."""
    used = [tier for tier in tiers if tier.get("place") != 0]
    return sorted(used, key=lambda tier: tier.get("place", 1))


def tier_state(tier: dict[str, Any]) -> str:
    """The state of a tier: ``up``, ``degraded`` or ``down``."""
    return ("degraded" if tier_trouble(tier) else "up") if tier.get("up") else "down"


def tier_note(tier: dict[str, Any]) -> str:
    """What to know of a tier that is no trouble, as a few words; empty: nothing."""
    return "over its write budget" if tier.get("over_budget") else ""


def tier_trouble(tier: dict[str, Any]) -> str:
    """The trouble of a tier, as one line; empty: none."""
    if not tier.get("up"):
        return f"down: {tier.get('trouble') or 'it has not been opened yet'}"
    failed, stored = tier["store_failures"], tier["stored_rows"]
    failing = tier.get("failing_rows", 0)
    if failing >= FAILING_ROWS:
        full = ", the disk is full" if tier.get("full") else ""
        return f"stores fail: the last {failing:,} rows were not stored{full}"
    if failed and failed >= stored:
        full = ", the disk is full" if tier.get("full") else ""
        return f"stores fail: {failed:,} failed, {stored:,} did not{full}"
    return str(tier.get("trouble", ""))
