"""``kvass serve``: from a configuration to a running daemon and back.

Law of this file: every error of the configuration is reported before the ``ready`` line, on one
line. The ``ready`` line means that clients can connect.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final

import numpy.ma  # np.unique would import it, in the middle of a request
import numpy.random  # noqa: F401 - nodes.by_node would import it, while engines connect

from kvass._version import __version__
from kvass.arena import nodes
from kvass.arena.memory import Arena
from kvass.config import Config, Size, quotas
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.daemon.l1_size import l1_size
from kvass.daemon.lasting import L1Memory, check_place, open_memory
from kvass.daemon.listen import Access, listening
from kvass.daemon.live import LiveConfig
from kvass.daemon.loop import Server
from kvass.daemon.notices import Notices
from kvass.daemon.recording import Recorder
from kvass.daemon.tier_set import TierSet
from kvass.errors import ConfigError
from kvass.tiers.url import tier_name
from kvass.types import PAGE, Timing

BOOT_BYTES: Final = 16
_M_MMAP_THRESHOLD: Final = -3  # malloc.h
_log: Final = logging.getLogger("kvass")


def serve(
    config: Config,
    announce: Callable[[str], None],
    read_again: Callable[[], Config] | None = None,
    beside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Serve until SIGTERM or SIGINT. Calls ``announce`` with the ``ready`` line once clients can
    connect.

    ``read_again`` reads the configuration again on SIGHUP (``LiveConfig``). ``beside``: what runs
    while the path is locked, such as the web process. Raises ``ConfigError`` for a configuration
    that cannot be served.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the handler that reloads is installed
    _raise_descriptor_limit()
    check_place(config.arena, config.huge_pages)
    _named_nodes(config.numa, nodes.nodes())
    access = Access(config)
    notices = Notices()
    # The lock first: a living daemon has the memory and the port too, and is the cause to name.
    with listening(config.socket, access) as listener, beside():
        access.look_at(config.socket, notices)
        size, said = l1_size(config)
        if said:
            notices.note("l1_size", said)
        l1 = open_memory(config.arena, size, config.huge_pages)
        if l1.place is None and l1.cold:
            said = f"arena {config.arena}: not used: {l1.cold}; L1 ends with this daemon"
            notices.problem("arena", said)
        _spread(l1.arena, config.numa, notices)
        core = core_config(config, size)
        began_s = time.monotonic()
        machine = CacheMachine(core, l1.index)
        found = _adopted(l1, machine, time.monotonic() - began_s)
        _return_freed_memory()
        fd = l1.arena.fileno()
        tiers = TierSet(config.tier, fd, size, config.log_format, l1.inherited)
        ready = (
            f"ready socket={config.socket} l1={Size(size).rounded()} l1_bytes={size}"
            f" pages={_pages(l1)}{f' tiers={len(tiers)}' if tiers else ''}"
            f"{found} boot={core.boot.hex()}"
        )
        live = LiveConfig(config, access, notices, read_again)
        recorder = _recorder(config, notices)
        server = Server(machine, l1, listener, live, tiers, notices, recorder)
        try:
            server.run(lambda: announce(ready))
            machine.end()
        finally:
            l1.release()
            if recorder is not None:
                recorder.close()
        if l1.place is None:
            l1.arena.close()  # while the path is locked: the next daemon needs the memory
    l1.arena.close()  # 0.1 to 0.3 s per GiB, for which no daemon waits that has the same memory


def _adopted(l1: L1Memory, machine: CacheMachine, took_s: float) -> str:
    """Log what was found in the place of L1. Returns the words about it in the ``ready`` line."""
    found = machine.adoption
    if l1.place is None or found is None:
        return ""
    if l1.cold:
        _log.info("arena %s: L1 starts empty: %s", l1.place.name, l1.cold)
    else:
        _log.info(
            "arena %s: adopted %d rows, %s, in %.2f s; %d rows that were lent rest until their "
            "leases have ended, and %d slots until their engines have ended or said that they are "
            "done",
            *(l1.place.name, found.rows, Size(found.bytes).rounded(), took_s),
            *(found.lent + found.dropped, found.resting),
        )
    return f" adopted={found.rows}"


def _recorder(config: Config, notices: Notices) -> Recorder | None:
    """Make the recorder for the file ``config.record``. Return None if no file is configured, or if
    it exists already: a restarted daemon does not overwrite a recording. Raises ``ConfigError``."""
    if not config.record:
        return None
    try:
        return Recorder(config.record, config.record_size, notices)
    except FileExistsError:
        said = f"record {config.record}: it is there already, so nothing is recorded"
        notices.note("record", said)
        return None


def core_config(config: Config, arena_bytes: int) -> CoreConfig:
    """Make the configuration of the core. The boot id is new: leases and reservations of another
    run of the daemon mean nothing."""
    timing = Timing(
        lease_s=config.lease_s,
        reserve_s=config.reserve_s,
        lost_engine_grace_s=config.lost_engine_grace_s,
        lookup_budget_ms=config.lookup_budget_ms,
    )
    return CoreConfig(
        boot=os.urandom(BOOT_BYTES),
        seed=os.urandom(BOOT_BYTES),
        arena_bytes=arena_bytes,
        timing=timing,
        version=__version__,
        pid=os.getpid(),
        lasting=bool(config.arena),
        host=socket.gethostname(),
        started_s=time.monotonic(),
        tiers=tuple(tier_name(url) for url in config.tier),
        flush=config.flush,
        keep_loaded=config.keep_loaded,
        keep_share=config.keep_share,
        skip_slow_loads=config.skip_slow_loads,
        quotas=quotas(config),
    )


def _spread(arena: Arena, numa: str, notices: Notices) -> None:
    """Spread the arena over the nodes that ``numa`` names, or over all. Nothing is done where there
    is one node, and none is named. Raises ``ConfigError`` if the named ones cannot be used."""
    there = nodes.nodes()
    named = _named_nodes(numa, there)
    if not named and len(there) == 1:
        return
    try:
        nodes.place(arena, named or there)
    except OSError as error:
        why = f"mbind: {error.strerror}; in a container add the capability SYS_NICE"
        if named:
            raise ConfigError(f"numa {numa}: {why}") from error
        notices.note("numa", f"L1 is not spread evenly over the {len(there)} NUMA nodes: {why}")


def _named_nodes(numa: str, there: Collection[int]) -> set[int]:
    """The nodes that ``numa`` names, all of which must be ``there``. Raises ``ConfigError``."""
    try:
        named = nodes.numbers(numa)
    except ValueError:
        raise ConfigError(f"numa {numa}: give numbers of nodes, like 0 or 0,2-3") from None
    if not named <= {*there}:
        raise ConfigError(
            f"numa {numa}: the nodes with memory here are {', '.join(map(str, there))}"
        )
    return named


def _pages(l1: L1Memory) -> str:
    """What the pages of L1 are, for the ``ready`` line. Asks for transparent huge pages."""
    if l1.arena.page_bytes > PAGE:
        return Size(l1.arena.page_bytes).rounded()
    return "huge" if l1.huge() else "4KiB"


def _return_freed_memory() -> None:
    """Fix glibc's mmap threshold at a low value, so that freed tables go back to the system. By
    default the threshold rises to the size of the largest freed block.

    Only now, because each of the many large arrays of an adoption would be faulted in anew.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # absent in musl
        libc.mallopt(_M_MMAP_THRESHOLD, 256 << 10)
        libc.malloc_trim(0)


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of file descriptors to the hard one. Each connection needs a descriptor,
    and the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # ``fs.nr_open`` is lower by now, or a sandbox refuses
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
