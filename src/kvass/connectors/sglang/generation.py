"""Whether the engine's weights may have been replaced in place. SGLang tells a storage backend
nothing of it, but it flushes its cache afterwards.

Laws of this file:

- After a flush no page that was stored before it is read, and none that is stored after it has the
  old name. From then on the engine shares with nobody, unless ``kvass.fixed_weights`` is set.
- Ranks that share pages, those of an MLA model, take the same generation for the same number of
  flushes, and nobody else takes it: the token in it is drawn at random. A rank that cannot agree
  with the others, or that cannot count the flushes, draws one of its own and shares nothing.

A flush ends SGLang's storage threads, clears each host pool and starts other threads. The calls of
a pool's ``clear`` are counted. A thread that called before and has ended is a flush as well, if
no pool was cleared. Threads are told apart as objects, because their numbers are used again.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import Any, Final

from torch import distributed

from kvass.engine.boundary import log

TOKEN_BYTES: Final = 16


class Generation:
    """The generation of the weights in this process. ``current``: its token; empty for the weights
    that the namespace names. ``fixed``: flushes mean nothing. ``token``: of this engine, from
    ``agreed_token``. Used from any thread."""

    def __init__(self, fixed: bool, token: bytes) -> None:
        self._fixed = fixed
        self._token = token
        self._lock = threading.Lock()
        self._callers: set[threading.Thread] = set()
        self._flushes = 0
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
                self._token = os.urandom(TOKEN_BYTES)
                self._begin("SGLang ended a storage thread and cleared no host pool")
            self._callers.add(threading.current_thread())

    def attached_later(self) -> None:
        """The backend was made at run time: the weights may have been replaced before. Ranks of an
        MLA model then share no pages, because each may have seen another number of flushes."""
        if not self._fixed:
            with self._lock:
                self._token = os.urandom(TOKEN_BYTES)
                self._begin("kvass was attached at run time")

    def _flushed(self) -> None:
        with self._lock:
            self._callers = {thread for thread in self._callers if thread.is_alive()}
            self._begin("the cache was flushed")

    def _begin(self, why: str) -> None:
        self._flushes += 1
        parts = self._token + self._flushes.to_bytes(8, "little")
        self.current = hashlib.sha256(parts).digest()[:16]
        log.warning(
            "%s, so the weights may be others: from here on this engine shares with no other one; "
            "kvass.fixed_weights says that its weights are never replaced",
            why,
        )


def agreed_token(config: Any) -> bytes:
    """Random bytes that the ranks of one engine have in common which share pages. ``config``:
    SGLang's storage config of this rank.

    These ranks are those of one tensor-parallel group. The first one that asks the store of
    SGLang's process groups draws for all. A rank that asks once more has begun again, and has seen
    fewer flushes than the others."""
    own = os.urandom(TOKEN_BYTES)
    if not (config.is_mla_model and config.tp_size > 1 and distributed.is_initialized()):
        return own
    try:
        # The ranks of a group follow each other: SGLang's order is (pp, dp, tp).
        name = f"kvass {distributed.get_rank() - config.tp_rank}"
        store = distributed.distributed_c10d._get_default_store()
        if store.add(f"{name} asked", 1) > config.tp_size:
            return own
        return bytes.fromhex(store.compare_set(name, "", own.hex()).decode())
    except (AttributeError, RuntimeError, ValueError) as error:
        log.warning(
            "the ranks could not agree on a name of this engine: after a flush they share no "
            "pages: %s",
            error,
        )
        return own
