"""What is wrong with a daemon, from the fields of its status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

REFUSED_S: Final = 60.0
"""So long a refused engine is a trouble: it asks again after pauses of up to half a minute."""

FAILING_ROWS: Final = 16
"""So many rows that a tier could not store, one after the other, are no accident."""


def troubles(fields: Mapping[str, Any]) -> list[str]:
    """What is wrong, a line each; empty: nothing."""
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
    lines = {tier["tier"]: tier_trouble(tier) for tier in used_tiers(fields.get("tiers", []))}
    return found + [f"tier {name}: {line}" for name, line in lines.items() if line]


def used_tiers(tiers: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without removed ones, in the order in which they are asked."""
    used = [tier for tier in tiers if tier.get("place") != 0]
    return sorted(used, key=lambda tier: tier.get("place", 1))


def tier_state(tier: dict[str, Any]) -> str:
    """In a word."""
    return ("degraded" if tier_trouble(tier) else "up") if tier.get("up") else "down"


def tier_trouble(tier: dict[str, Any]) -> str:
    """What is wrong with a tier, or nothing."""
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
