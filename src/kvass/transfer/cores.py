"""The CPUs that an engine's own threads leave free, for the threads that copy.

An engine on a CPU binds each of its compute threads to a CPU. The OpenMP library does that, and it
binds the thread that loaded it, too; every thread that is started later inherits that one CPU. So
without a choice of their own all copies would run on a CPU that the engine computes on.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import Final

NAME: Final = "kvass-copy"
"""How the names of threads that copy begin. They may be those of another mover."""
FEWEST: Final = 2
MOST: Final = 8
"""Threads that copy loads at once. One copied 6 to 19 GB/s where it was measured; so eight read and
write up to 300 GB/s, which is about what a socket has."""


def spare_cpus() -> set[int]:
    """The CPUs that this process was started with and that no thread of it is bound to. Empty if
    the calling thread was not bound, if there is none, or if the kernel does not tell."""
    try:
        own, ours = os.sched_getaffinity(0), os.sched_getaffinity(os.getppid())
        threads = {*os.listdir("/proc/self/task")} if own < ours else set[str]()
    except OSError:  # the parent ended a moment ago, or a sandbox hides it
        return set()
    copying = {str(t.native_id) for t in threading.enumerate() if t.name.startswith(NAME)}
    bound = set[int]()
    for thread in threads - copying:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            cpus = os.sched_getaffinity(int(thread))
            bound |= cpus if len(cpus) == 1 else set()
    return ours - own - bound if threads else set()


def threads_on(spare: set[int]) -> int:
    """How many threads copy a load, where ``spare`` are their CPUs: one on each of them, or
    ``FEWEST`` that run wherever the engine does."""
    return min(MOST, max(FEWEST, len(spare)))


def run_on(cpus: set[int]) -> None:
    """Let the calling thread run on ``cpus`` alone, if there are any. It goes on where it is if the
    kernel refuses."""
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)
