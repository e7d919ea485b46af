"""The check of ``kvass doctor`` whether tiers compress their records, and what that brings."""

from __future__ import annotations

from sys import version_info
from typing import Final

from kvass.cli.doctor.finding import Finding, note, ok
from kvass.cli.doctor.machine import Machine
from kvass.client.health import used_tiers

_INSTALL: Final = "pip install 'kvass[compress]'"


def compression(m: Machine) -> Finding:
    own = "Python's own zstd" if version_info >= (3, 14) else ""
    there = f"zstandard {m.packages['zstandard']}" if "zstandard" in m.packages else own
    if not there:
        used, cost = "records of tiers as they are", "records in bfloat16 could be a third smaller"
        return note("not installed", used, cost, f"for tiers that are slow: {_INSTALL}")
    tiers = [t for t in used_tiers((m.daemon or {}).get("tiers", [])) if "compress" in t]
    found = "; ".join([there, *(f"{t['tier']}: {t['compress']}{_part(t)}" for t in tiers)])
    return ok(found, "for tiers that are slower than a core compresses", do="docs/tiers.md")


def _part(tier: dict[str, int]) -> str:
    """What became of the records that were compressed."""
    before, after = (int(tier.get(f"compressed_{which}_bytes", 0)) for which in ("from", "to"))
    return f" (records take {after / before:.2f} of their size)" if before else ""
