"""The check of ``kvass doctor`` whether L1 is larger than what the engines cache themselves.

What an engine's own KV cache has, it does not ask for. Both keep what was used last, so an L1 as
large as the engines' caches together has nothing that they lack.
"""

from __future__ import annotations

from kvass.cli.doctor.finding import Finding, note, ok, shown, warning
from kvass.cli.doctor.machine import Machine
from kvass.types import L1_OF_CACHES, Size


def beside_their_caches(m: Machine) -> Finding:
    caches = int((m.daemon or {}).get("engine_cache_bytes", 0))
    if m.daemon is None or not caches:
        do = "run kvass doctor again while the engines are connected"
        return note("no engine that tells its size is connected", "not checked", do=do)
    l1, least = int(m.daemon.get("l1_capacity_bytes", 0)), L1_OF_CACHES * caches
    found = f"L1 {shown(l1)}, the engines' own KV caches together {shown(caches)}"
    if l1 >= least:
        return ok(found, "what the engines' own caches no longer have")
    return warning(
        f"{found}: less than twice as much",
        "what the engines' own caches no longer have, which is little",
        "few hits; none if L1 is no larger than their caches",
        f"kvass serve --l1-size {Size(least).rounded()} or more, or a tier behind L1",
    )
