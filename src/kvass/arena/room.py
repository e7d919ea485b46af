"""How much memory there is for an arena: the machine's, or less if a cgroup limits it.

``root`` is the folder that has proc and sys. Files that cannot be read are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

SAFE_SHARE: Final = 0.8
"""The share of a machine's available memory that an arena may take. With more, the machine may
swap, or the kernel may kill a process."""
_BESIDE: Final = 128 << 20
_TABLES: Final = 512
"""In a cgroup with a limit, which is made for a daemon, an arena may take all but ``_BESIDE``, for
the processes, and a part in ``_TABLES`` of itself, for page tables."""
_ROOT: Final = Path("/")


class _Files(NamedTuple):
    """The files of one version of cgroups: its folder, and the names of files or fields in it."""

    root: str
    limit: str
    used: str
    prefix: str


_V1: Final = _Files(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
)
_V2: Final = _Files("sys/fs/cgroup", "memory.max", "memory.current", "")
_PAGE_CACHE: Final = ("inactive_file", "active_file")


class Room(NamedTuple):
    """Sizes of memory in bytes; None is unknown. ``limit`` is the lowest limit of the cgroups that
    this process is in; None if there is none. ``available`` is what could be used now, the page
    cache included; ``safe`` how much of it an arena may take without a warning; ``with_shared``
    what could be used if nobody had shared memory any more."""

    total: int | None
    limit: int | None
    available: int | None
    safe: int | None = None
    with_shared: int | None = None


def room(root: Path = _ROOT) -> Room:
    """The memory that this process has now."""
    total, available, shared = (
        _meminfo(root, name) for name in ("MemTotal", "MemAvailable", "Shmem")
    )
    groups = [one for one in _groups(root) if total is None or one.limit < total]
    left = [
        (one.left, max(0, (one.left - _BESIDE) * _TABLES // (_TABLES + 1)), one.left + one.shared)
        for one in groups
    ]
    if available is not None:
        left.append((available, int(SAFE_SHARE * available), available + (shared or 0)))
    return Room(
        total,
        min((one.limit for one in groups), default=None),
        *(min((one[i] for one in left), default=None) for i in range(3)),
    )


def physical_bytes() -> int:
    """The memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_bytes() -> int:
    """The memory that this process may use: all of the machine's, or less if a cgroup limits it."""
    physical = physical_bytes()
    return min(physical, room().limit or physical)


def committable(root: Path = _ROOT) -> int | None:
    """How many bytes can still be committed, if the kernel does not overcommit
    (``vm.overcommit_memory=2``). None if it does."""
    if _number(root / "proc/sys/vm/overcommit_memory") != 2:
        return None
    limit, promised = (_meminfo(root, name) for name in ("CommitLimit", "Committed_AS"))
    return None if limit is None or promised is None else max(0, limit - promised)


class _Group(NamedTuple):
    """A cgroup with a limit: the limit, how much of it is left, and how much is shared memory."""

    limit: int
    left: int
    shared: int


def _groups(root: Path) -> Iterator[_Group]:
    """The cgroups of this process that have a limit."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        inner = PurePosixPath("/" if ".." in path else path)
        for folder in (inner, *inner.parents):
            here = root / files.root / str(folder).lstrip("/")
            if (limit := _number(here / files.limit)) is not None:
                used = _number(here / files.used) or 0
                names = (*_PAGE_CACHE, "shmem")
                *cache, shared = (
                    _number(here / "memory.stat", rf"{files.prefix}{name} (\d+)$") or 0
                    for name in names
                )
                yield _Group(limit, min(limit, max(0, limit - used + sum(cache))), shared)


def _meminfo(root: Path, name: str) -> int | None:
    kib = _number(root / "proc/meminfo", rf"{name}: +(\d+) kB")
    return None if kib is None else kib << 10


def _number(path: Path, pattern: str = r"(\d+)$") -> int | None:
    found = re.search(f"^{pattern}", text_of(path), re.MULTILINE)
    return int(found[1]) if found else None


def text_of(path: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
