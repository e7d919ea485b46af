"""Whether the engine's weights may have been replaced in place. SGLang tells a storage backend
nothing of it, but it flushes its cache afterwards.

Laws of this file:

- After a flush no page that was stored before it is read, and none that is stored after it has the
  old name. From then on the engine shares with nobody, unless ``kvass.fixed_weights`` is set.
- All ranks of an engine take the same generation for the same number of flushes, because the ranks
  of an MLA model share pages. A rank that cannot count the flushes takes one of its own.

A flush ends SGLang's storage threads, clears each host pool and starts other threads. The calls of
a pool's ``clear`` are counted. A thread that called before and has ended is a flush as well, if
no pool was cleared. Threads are told apart as objects, because their numbers are used again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any, Final

from kvass.engine.boundary import log
from kvass.processes import start_time

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Generation:
    """The generation of the weights in this process. ``current``: its token; empty for the weights
    that the namespace names. ``fixed``: flushes mean nothing. Used from any thread."""

    def __init__(self, fixed: bool) -> None:
        self._fixed = fixed
        self._lock = threading.Lock()
        self._callers: set[threading.Thread] = set()
        self._flushes = 0
        self._own = b""
        """Random, if this rank cannot count the engine's flushes."""
        self.current = b""

    def watch(self, pool: Any) -> None:
        """Count the calls of ``pool.clear``, which each flush makes."""
        cleared = pool.clear

        def clear(*args: Any, **kwargs: Any) -> Any:
            self._flushed()
            return cleared(*args, **kwargs)

        if not self._fixed:
            pool.clear = clear

    def seen(self) -> None:
        """Call it at the beginning of each call of a storage thread."""
        if self._fixed:
            return
        with self._lock:
            if not all(thread.is_alive() for thread in self._callers):
                self._callers.clear()
                self._own = os.urandom(16)
                self._begin("SGLang ended a storage thread and cleared no host pool")
            self._callers.add(threading.current_thread())

    def attached_later(self) -> None:
        """The backend was made at run time: the weights may have been replaced before. Ranks of an
        MLA model then share no pages, because each may have seen another number of flushes."""
        if not self._fixed:
            with self._lock:
                self._own = os.urandom(16)
                self._begin("kvass was attached at run time")

    def _flushed(self) -> None:
        with self._lock:
            self._callers = {thread for thread in self._callers if thread.is_alive()}
            self._begin("the cache was flushed")

    def _begin(self, why: str) -> None:
        self._flushes += 1
        parts = (self._own or _engine()) + self._flushes.to_bytes(8, "little")
        self.current = hashlib.sha256(parts).digest()[:16]
        log.warning(
            "%s, so the weights may be others: from here on this engine shares with no other one; "
            "kvass.fixed_weights says that its weights are never replaced",
            why,
        )


def _engine() -> bytes:
    """What the ranks of one engine on this machine have in common, and no other engine has: the
    process that started them, by its number and start, in this boot of the machine. Random if
    ``/proc`` does not show that process, as to the first one of a container."""
    try:
        boot = _BOOT_ID.read_text()
    except OSError:
        return os.urandom(16)
    parent = os.getppid()
    started = start_time(parent)
    return f"{boot} {parent} {started}".encode() if started else os.urandom(16)
