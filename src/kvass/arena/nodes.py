"""NUMA nodes: those of this machine, and on which of them an arena's pages lie.

The policy belongs to the shared memory, not to a mapping: whoever touches a page first, it comes
from the node that the policy says. Of reserved huge pages it belongs to the mapping, so it holds
for what the daemon populates. A policy names preferences: if a node has no memory left, pages come
from another one. A strict one (MPOL_BIND) would call the kernel's OOM killer.

The calls are made by their numbers, because libc has no functions for them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

import numpy as np

from kvass.arena.memory import Arena
from kvass.arena.room import text_of
from kvass.types import PAGE

SAMPLES: Final = 4096
"""Pages that ``by_node`` looks at. The shares of nodes are right to some 2 %."""
MOST: Final = 1 << 16
_PREFERRED: Final = 1  # MPOL_*, linux/mempolicy.h
_INTERLEAVE: Final = 3
_CALLS: Final = {
    "x86_64": (237, 279),
    "aarch64": (235, 239),
    "riscv64": (235, 239),
    "ppc64le": (259, 301),
    "s390x": (268, 310),
}
"""By machine: the numbers of mbind and move_pages."""
_MBIND, _MOVE_PAGES = _CALLS.get(platform.machine(), (-1, -1))
_ROOT: Final = Path("/")
_libc = ctypes.CDLL(None, use_errno=True)


def nodes(root: Path = _ROOT) -> dict[int, set[int]]:
    """The nodes whose memory this process may use, and the CPUs of each. Node 0 alone, of unknown
    CPUs, if the kernel tells of none. ``root`` is the folder that has proc and sys."""
    folder = root / "sys/devices/system/node"
    there = numbers(text_of(folder / "has_memory")) or {0}
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", text_of(root / "proc/self/status"), re.M)
    there = (there & numbers(allowed[1]) if allowed else there) or there
    return {node: numbers(text_of(folder / f"node{node}/cpulist")) for node in sorted(there)}


def numbers(text: str) -> set[int]:
    """The numbers of a list like ``0-2,5``. Raises ``ValueError`` if it is no such list."""
    found = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high < MOST:
            raise ValueError(f"no numbers of nodes or CPUs: {part}")
        found |= {*range(low, high + 1)}
    return found


def place(arena: Arena, where: Collection[int]) -> None:
    """Interleave the pages of ``arena`` that are not populated yet over the nodes ``where``, page
    by page. Raises ``OSError`` if the kernel refuses, as it does in many containers."""
    mode = _PREFERRED if len(where) == 1 else _INTERLEAVE
    mask = sum(1 << node for node in where)
    words = mask.bit_length() // 64 + 1
    bits = (ctypes.c_uint64 * words)(*(mask >> 64 * word & (1 << 64) - 1 for word in range(words)))
    address = ctypes.c_void_p(arena.buffer.ctypes.data)
    size, most = ctypes.c_size_t(arena.size), ctypes.c_ulong(64 * words)
    _call(_MBIND, address, size, ctypes.c_int(mode), bits, most, ctypes.c_uint(0))


def by_node(arena: Arena) -> dict[int, int]:
    """An estimate of the bytes of ``arena`` on each node, from a sample of its pages that this
    process has mapped; empty if the kernel refuses to say.

    ``/proc/self/numa_maps`` counts all pages, and locks this process's memory meanwhile: for
    seconds, with 1 TiB.
    """
    pages = arena.size // PAGE
    rng = np.random.default_rng(0)  # equal distances would hit one node of an interleaved arena
    sample = rng.integers(0, pages, SAMPLES, np.uint64) if pages > SAMPLES else np.arange(pages)
    addresses = np.uint64(arena.buffer.ctypes.data) + sample.astype(np.uint64) * np.uint64(PAGE)
    found = np.empty(len(addresses), np.int32)
    count = ctypes.c_ulong(len(addresses))
    at, into = (ctypes.c_void_p(each.ctypes.data) for each in (addresses, found))
    try:
        _call(_MOVE_PAGES, ctypes.c_int(0), count, at, None, into, ctypes.c_int(0))
    except OSError:
        return {}
    there = Counter(found[found >= 0].tolist())  # a negative number is an error: not mapped
    return {node: n * arena.size // len(found) for node, n in sorted(there.items())}


def _call(number: int, *arguments: object) -> None:
    if number < 0:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if _libc.syscall(ctypes.c_long(number), *arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
