"""What is asked of kvass, through its own client."""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from bench.pings import measure_pings
from kvass.cli.bench.copies import KvCache, PromptShape
from kvass.cli.bench.lookups import LAYOUT
from kvass.cli.bench.rig import (
    CHUNK_TOKENS,
    PATIENCE_S,
    WIDTH,
    EngineConnections,
    fresh_name,
    seconds,
)
from kvass.errors import KvassError, Unavailable
from kvass.simulate.models import MODELS, layout

LLAMA_8B: Final = layout(MODELS["llama-3-8b"], 16)


class KvassClient:
    """Keys stand for prompts: vLLM has hashed a prompt's blocks before any connector is asked."""

    def __init__(self) -> None:
        self._ending = ExitStack()

    def connect(self, address: str, large: bool, tokens: int) -> None:
        """``large``: rows of Llama-8B, for prompts of ``tokens``; else of 4 KiB."""
        groups = LLAMA_8B if large else (LAYOUT,)
        self._socket = address
        # one name in each run: a later client finds what is on disk
        name = f"bench-peers-{'large' if large else 'small'}"
        self._engine = EngineConnections(
            address, groups, self._ending, name=name, instance=fresh_name()
        )
        if large:
            prompt = PromptShape(groups, CHUNK_TOKENS, tokens // CHUNK_TOKENS)
            self._cache = KvCache(prompt, self._engine, self._ending)

    def copy(self, seed: str, tokens: int, threads: int) -> dict[str, Any]:
        """Store a new prompt and load it into other blocks; memcpy of the same bytes. All of it by
        one thread for stores and two for loads, whatever ``threads`` says."""
        self._cache.renew(digests(seed, tokens))
        store_s, load_s = seconds(self._cache.store), seconds(self._cache.load)
        memcpy_s, equal = seconds(self._cache.copy_in), self._cache.right()
        return {"store_s": store_s, "load_s": load_s, "memcpy_s": memcpy_s, "equal": equal}

    def store(self, seed: str, tokens: int) -> float:
        """Store a prompt; the seconds."""
        keys = digests(seed, tokens)
        if hasattr(self, "_cache"):
            self._cache.renew(keys)
            return seconds(self._cache.store)
        return seconds(lambda: self._engine.commit(self._engine.reserve(keys)))

    def look_up(self, seed: str, tokens: int, times: int) -> dict[str, Any]:
        """Seconds of each lookup until it is answered, and of its release until it is done."""
        keys, found, lookups, releases = digests(seed, tokens), 0, [], []
        for _ in range(times):
            began_s = time.perf_counter()
            matched = self._engine.ask(keys)
            lookups.append(time.perf_counter() - began_s)
            found = matched.chunks * CHUNK_TOKENS
            releases.append(seconds(partial(self._engine.release, matched)))
        return {"found": found, "lookup_s": lookups, "release_s": releases}

    def promote(self, seed: str, tokens: int) -> float:
        """Seconds until a prompt on disk is in memory. A daemon that just began finds nothing until
        its tier has answered once: that time counts."""
        keys, began_s = digests(seed, tokens), time.perf_counter()
        while (matched := self._engine.ask(keys)).chunks * CHUNK_TOKENS < tokens:
            self._engine.release(matched)
            if time.perf_counter() - began_s > PATIENCE_S:
                raise Unavailable(f"{matched.chunks * CHUNK_TOKENS} of {tokens} tokens came back")
        took_s = time.perf_counter() - began_s
        self._engine.release(matched)
        return took_s

    def requests(self, clients: int) -> float:
        """Empty round trips a second."""
        return measure_pings(self._socket, clients)

    def hold(self, seed: str, tokens: int) -> int:
        """Look a prompt up and keep it; how many of its tokens were found."""
        return self._engine.ask(digests(seed, tokens)).chunks * CHUNK_TOKENS

    def held(self, seed: str, tokens: int) -> bool:
        """Whether anybody still keeps anything."""
        return bool(self._engine.scheduler.status()["leases"])

    def ask(self, seed: str, tokens: int) -> float:
        """Seconds until a lookup is answered in any way."""
        began_s = time.perf_counter()
        try:
            self._engine.ask(digests(seed, tokens))
        except KvassError:
            pass  # a miss, to an engine
        return time.perf_counter() - began_s

    def clear(self) -> None:
        self._engine.clear()

    def close(self) -> None:
        self._ending.close()


def digests(seed: str, tokens: int) -> bytes:
    """The keys of a prompt's chunks."""
    numbers = range(tokens // CHUNK_TOKENS)
    return b"".join(
        hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=WIDTH).digest()
        for number in numbers
    )
