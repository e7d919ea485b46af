"""What is wrong with a daemon, from the fields of its status."""

from __future__ import annotations

from typing import Any


def troubles(fields: dict[str, Any]) -> list[str]:
    """What is wrong, a line each; empty: nothing."""
    found = []
    for engine in fields.get("engines", []):
        if missing := engine["missing_ranks"]:
            ranks = ", ".join(map(str, missing[:8]))
            found.append(f"engine {engine['instance']} waits for its ranks {ranks}")
    lines = {tier["tier"]: tier_trouble(tier) for tier in fields["tiers"]}
    return found + [f"tier {name}: {line}" for name, line in lines.items() if line]


def tier_trouble(tier: dict[str, Any]) -> str:
    """What is wrong with a tier, or nothing."""
    if not tier.get("up"):
        return f"down: {tier.get('trouble') or 'it has not been opened yet'}"
    failed, stored = tier["store_failures"], tier["stored_rows"]
    if failed and failed >= stored:
        full = ", the disk is full" if tier.get("full") else ""
        return f"stores fail: {failed:,} failed, {stored:,} did not{full}"
    return str(tier.get("trouble", ""))
