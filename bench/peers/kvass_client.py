"""What is asked of kvass, through its own client."""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from bench.pings import measure_pings
from kvass.cli.bench.copies import LLAMA_8B, KvCache
from kvass.cli.bench.lookups import LAYOUT
from kvass.cli.bench.rig import (
    CHUNK_TOKENS,
    PATIENCE_S,
    WIDTH,
    EngineSessions,
    fresh_name,
    private_memory,
    seconds,
    shared_memory,
)
from kvass.errors import KvassError, Unavailable
from kvass.messages import Lookup, Matched


class KvassClient:
    """Keys stand for prompts: vLLM has hashed a prompt's blocks before any connector is asked."""

    def __init__(self) -> None:
        self._ending = ExitStack()

    def connect(self, address: str, large: bool, tokens: int) -> None:
        """``large``: rows of Llama-8B, for prompts of ``tokens``; else of 4 KiB."""
        layout = LLAMA_8B if large else LAYOUT
        self._socket = address
        name = (
            f"bench-peers-{'large' if large else 'small'}"  # a later client finds what is on disk
        )
        self._engine = EngineSessions(
            address, layout, self._ending, name=name, instance=fresh_name()
        )
        if large:
            self._cache = KvCache(self._engine, layout, tokens // CHUNK_TOKENS)
            self._ending.callback(self._cache.mover.close)
            size = tokens * layout.shard_bytes(CHUNK_TOKENS) // CHUNK_TOKENS
            arena = shared_memory(size)
            self._memcpy = (arena, private_memory(size))

    def copy(self, seed: str, tokens: int, threads: int) -> dict[str, Any]:
        """Store a new prompt and load it into other blocks; memcpy of the same bytes. All of it by
        one thread, whatever ``threads`` says."""
        keys, pages = digests(seed, tokens), self._cache.pages
        pages[:, self._cache.source, 0] += 1
        pages[:, self._cache.target] = 0
        store_s = seconds(partial(self._cache.store, keys))
        load_s = seconds(partial(self._cache.load, keys))
        arena, private = self._memcpy
        memcpy_s = seconds(partial(np.copyto, arena.buffer, private))
        equal = self._cache.same_bytes()
        return {"store_s": store_s, "load_s": load_s, "memcpy_s": memcpy_s, "equal": equal}

    def store(self, seed: str, tokens: int) -> float:
        """Store a prompt; the seconds."""
        if hasattr(self, "_cache"):
            return seconds(partial(self._cache.store, digests(seed, tokens)))
        return seconds(lambda: self._engine.commit(self._engine.reserve(digests(seed, tokens))))

    def look_up(self, seed: str, tokens: int, times: int) -> dict[str, Any]:
        """Seconds of each lookup until it is answered, and of its release until it is done."""
        keys, found, lookups, releases = digests(seed, tokens), 0, [], []
        for _ in range(times):
            began_s = time.perf_counter()
            matched = self._ask(keys, 0.0)
            lookups.append(time.perf_counter() - began_s)
            found = matched.chunks * CHUNK_TOKENS
            releases.append(seconds(partial(self._release, matched)))
        return {"found": found, "lookup_s": lookups, "release_s": releases}

    def promote(self, seed: str, tokens: int) -> float:
        """Seconds until a prompt on disk is in memory. A daemon that just began finds nothing until
        its tier has answered once: that time counts."""
        keys, began_s = digests(seed, tokens), time.perf_counter()
        while (matched := self._ask(keys, PATIENCE_S)).chunks * CHUNK_TOKENS < tokens:
            self._release(matched)
            if time.perf_counter() - began_s > PATIENCE_S:
                raise Unavailable(f"{matched.chunks * CHUNK_TOKENS} of {tokens} tokens came back")
        took_s = time.perf_counter() - began_s
        self._release(matched)
        return took_s

    def requests(self, clients: int) -> float:
        """Empty round trips a second."""
        return measure_pings(self._socket, clients)

    def hold(self, seed: str, tokens: int) -> int:
        """Look a prompt up and keep it; how many of its tokens were found."""
        return self._ask(digests(seed, tokens), 0.0).chunks * CHUNK_TOKENS

    def held(self, seed: str, tokens: int) -> bool:
        """Whether anybody still keeps anything."""
        return bool(self._engine.scheduler.status()["leases"])

    def ask(self, seed: str, tokens: int) -> float:
        """Seconds until a lookup is answered in any way."""
        began_s = time.perf_counter()
        try:
            self._ask(digests(seed, tokens), 0.0)
        except KvassError:
            pass  # a miss, to an engine
        return time.perf_counter() - began_s

    def clear(self) -> None:
        self._engine.scheduler.clear(timeout_s=PATIENCE_S)

    def close(self) -> None:
        self._ending.close()

    def _ask(self, keys: bytes, budget_s: float) -> Matched:
        asked = Lookup(request="load", digests=keys, width=WIDTH, budget_ms=budget_s * 1000)
        matched = self._engine.scheduler.call(asked, PATIENCE_S + budget_s)
        assert isinstance(matched, Matched), matched
        return matched

    def _release(self, matched: Matched) -> None:
        if matched.lease:
            self._engine.release(matched)


def digests(seed: str, tokens: int) -> bytes:
    """The keys of a prompt's chunks."""
    numbers = range(tokens // CHUNK_TOKENS)
    return b"".join(
        hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=WIDTH).digest()
        for number in numbers
    )
