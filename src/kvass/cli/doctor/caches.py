"""The checks of ``kvass doctor`` whether L1 is larger than what the engines cache themselves, and
what a token takes in it.

What an engine's own KV cache has, it does not ask for. Both keep what was used last, so an L1 as
large as the engines' caches together has nothing that they lack.
"""

from __future__ import annotations

from kvass.arena.room import room
from kvass.cli.doctor.beside import KV_SPACE, PROCESS_BYTES, VLLM_SHARE, on_cpu, whole_gib
from kvass.cli.doctor.finding import Finding, note, ok, shown, warning
from kvass.cli.doctor.machine import Machine
from kvass.cli.kinds import token_kinds
from kvass.client.health import used_tiers
from kvass.types import L1_OF_CACHES, Size


def beside_their_caches(m: Machine) -> Finding:
    caches = int((m.daemon or {}).get("engine_cache_bytes", 0))
    which = f"the engines' own KV caches together {shown(caches)}"
    if not caches:
        caches, how = _expected(m)
        which = f"an engine's own KV cache will have {shown(caches)} ({how})"
    if not caches:
        do = "--model FOLDER where an engine runs, or run it while the engines are connected"
        return note("no engine that tells its size is connected", "not checked", do=do)
    l1 = m.l1_bytes if m.daemon is None else int(m.daemon.get("l1_capacity_bytes", 0))
    found, used = f"L1 {shown(l1)}, {which}", "what the engines' own caches no longer have"
    least = L1_OF_CACHES * caches
    if l1 >= least:
        return ok(found, used)
    if used_tiers((m.daemon or {}).get("tiers", [])):
        return ok(f"{found}: less than twice as much, with a tier behind it", used)
    return warning(
        f"{found}: less than twice as much",
        f"{used}, which is little",
        "few hits; none if L1 is no larger than their caches",
        f"kvass serve --l1-size {Size(least).rounded()} or more, or a tier behind L1",
    )


def bytes_per_token(m: Machine) -> Finding:
    models = [
        f"{ns['model'] or ns['namespace'][:8]} {', '.join(token_kinds(ns))}"
        for ns in (m.daemon or {}).get("namespaces", [])
    ]
    if not models:
        return ok("no daemon with a model answers", "docs/sizing.md has a table of models")
    return ok("; ".join(models), "what a token takes in L1")


def _expected(m: Machine) -> tuple[int, str]:
    """The size of the KV cache of an engine of vLLM that takes what it takes by default, and how it
    was found. 0: the weights, or the memory that it is a part of, are not known."""
    space = whole_gib(m.environment.get(KV_SPACE, ""))
    if not m.gpus.devices and space:
        return space, KV_SPACE
    if m.model_bytes is None:
        return 0, ""
    if m.gpus.devices:
        memory, of, beside = sum(gpu.bytes for gpu in m.gpus.devices), "of all GPUs here", 0
    elif on_cpu(m):
        total, limit, *_ = room(m.root)
        memory = min((size for size in (total, limit) if size is not None), default=0)
        of, beside = "of memory", PROCESS_BYTES
    else:
        return 0, ""
    size = int(VLLM_SHARE * memory) - m.model_bytes - beside
    return max(0, size), (
        f"{VLLM_SHARE:.0%} of {shown(memory)} {of}, its default, without "
        f"{shown(m.model_bytes)} of weights"
    )
