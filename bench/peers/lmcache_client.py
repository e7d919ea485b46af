"""What is asked of LMCache, through its own adapters for vLLM, as its connector uses them.

Law of this file: only LMCache's public calls, unchanged, in the order of its connector.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final

import torch
import zmq
from lmcache.integration.vllm.vllm_multi_process_adapter import (
    EngineGroupInfo,
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    ParallelStrategy,
)
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

BLOCK: Final = 16
CHUNK: Final = 256
LARGE: Final = (32, 8, 128)
"""Llama-8B: layers, heads, width."""
SMALL: Final = (1, 1, 4)
"""4 KiB a chunk."""
PING_S: Final = 1.0
PATIENCE_S: Final = 30.0


class LMCacheClient:
    """One scheduler and one worker, without an engine."""

    def __init__(self) -> None:
        self._names = map(str, count())
        self._context = zmq.Context()

    def connect(self, address: str, large: bool, tokens: int) -> None:
        """``large``: the KV cache of Llama-8B, for two prompts of ``tokens``; else 4 KiB a chunk.
        Each layout has a model name of its own, because LMCache's keys do not say the layout."""
        layers, heads, width = LARGE if large else SMALL
        self._table = tokens // BLOCK
        shape = (2, 2 * self._table + 1 if large else self._table + 1, BLOCK, heads, width)
        self._kv = {f"layer.{i}": torch.ones(shape, dtype=torch.bfloat16) for i in range(layers)}
        one = ParallelStrategy(
            mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
        )
        name = f"bench-peers-{'large' if large else 'small'}"
        self._address = address
        self._scheduler = LMCacheMPSchedulerAdapter([address], self._context, name, BLOCK, one)
        self._worker = LMCacheMPWorkerAdapter(address, self._context, name, BLOCK, one)
        group = EngineGroupInfo(0, tuple(range(layers)), BLOCK)
        self._worker.register_kv_caches(self._kv, [group], {"kv_layout": "NHD"})
        order = random.Random(0).sample(range(1, shape[1]), shape[1] - 1)
        self._source, self._target = order[: self._table], order[self._table :]

    def copy(self, seed: str, tokens: int, threads: int) -> dict[str, Any]:
        """Store a new prompt and load it into other blocks, with so many of torch's threads."""
        torch.set_num_threads(threads)
        words = prompt(seed, tokens)
        for layer in self._kv.values():
            pages = layer.view(torch.int16)
            pages[:, self._source] = torch.randint(0, 1 << 14, (1,), dtype=torch.int16)
            pages[:, self._target] = 0
        store_s, (load_s, found) = self._store(words), self._load(words)
        equal = found == tokens and all(
            torch.equal(layer[:, self._source], layer[:, self._target])
            for layer in self._kv.values()
        )
        return {"store_s": store_s, "load_s": load_s, "equal": equal}

    def store(self, seed: str, tokens: int) -> float:
        """Store a prompt; the seconds."""
        return self._store(prompt(seed, tokens))

    def look_up(self, seed: str, tokens: int, times: int) -> dict[str, Any]:
        """Seconds of each lookup until it is answered, and of its release until it is sent: the
        adapter does not say when the server has carried it out."""
        words, found, lookups, releases = prompt(seed, tokens), 0, [], []
        for _ in range(times):
            name, began_s = next(self._names), time.perf_counter()
            found = self._ask(name, words)
            lookups.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            self._free(name, words, found)
            releases.append(time.perf_counter() - began_s)
            time.sleep(0.02)  # or the next lookup would wait for the server's part of it
        return {"found": found, "lookup_s": lookups, "release_s": releases}

    def promote(self, seed: str, tokens: int) -> float:
        """Seconds until a prompt on disk is in memory."""
        words, began_s = prompt(seed, tokens), time.perf_counter()
        name = next(self._names)
        found = self._ask(name, words)
        took_s = time.perf_counter() - began_s
        self._free(name, words, found)
        if found < tokens:
            raise TimeoutError(f"{found} of {tokens} tokens came back")
        return took_s

    def requests(self, clients: int) -> float:
        """Pings a second, by so many clients that each wait for their own answer."""
        several = [
            RequestClientFactory.create(self._address, context=self._context)
            for _ in range(clients)
        ]
        waiting = {client: client.ping(None) for client in several}
        answers, began_s = 0, time.perf_counter()
        while (elapsed_s := time.perf_counter() - began_s) < PING_S:
            if clients == 1:
                waiting[several[0]].result(timeout=PATIENCE_S)
            for client, future in waiting.items():
                if future.query():
                    answers += 1
                    waiting[client] = client.ping(None)
        for client in several:
            client.close()
        return answers / elapsed_s

    def hold(self, seed: str, tokens: int) -> int:
        """Look a prompt up and keep it; how many of its tokens were found."""
        return self._ask(next(self._names), prompt(seed, tokens))

    def held(self, seed: str, tokens: int) -> bool:
        """Whether anybody still keeps the prompt: a clear leaves what is locked."""
        self._scheduler.reset_cache()
        words, name = prompt(seed, tokens), next(self._names)
        found = self._ask(name, words)
        self._free(name, words, found)
        return bool(found)

    def ask(self, seed: str, tokens: int) -> float:
        """Seconds until a lookup is answered in any way."""
        began_s = time.perf_counter()
        self._ask(next(self._names), prompt(seed, tokens))
        return time.perf_counter() - began_s

    def clear(self) -> None:
        if not self._scheduler.reset_cache():
            raise TimeoutError("CLEAR was not answered")

    def close(self) -> None:
        os._exit(0)  # its shutdown waits for servers that may be gone

    # ------------------------------------------------------------ as the connector does

    def _ask(self, name: str, words: list[int]) -> int:
        self._scheduler.maybe_submit_lookup_request(name, words)
        while (found := self._scheduler.check_lookup_result(name)) is None:
            time.sleep(0)
        return int(found)

    def _free(self, name: str, words: list[int], found: int) -> None:
        if found:
            self._scheduler.free_lookup_locks(words, 0, found, name)
        self._end(name)

    def _end(self, name: str) -> None:
        self._scheduler.end_session(name)
        self._scheduler.cleanup_lookup_result(name)

    def _store(self, words: list[int]) -> float:
        name, began_s = next(self._names), time.perf_counter()
        op = LoadStoreOp(words, [self._source[: len(words) // BLOCK]], 0, len(words))
        event = self._worker.create_recorded_event()
        self._worker.submit_store_request(name, op, event)
        self._wait(lambda: self._worker.get_finished({name})[0])
        took_s = time.perf_counter() - began_s
        if self._worker.get_failed_store_requests():
            raise RuntimeError("the store failed")
        self._end(name)
        return took_s

    def _load(self, words: list[int]) -> tuple[float, int]:
        """Seconds, and the tokens found."""
        name, began_s = next(self._names), time.perf_counter()
        found = self._ask(name, words)
        op = LoadStoreOp(words, [self._target[: found // BLOCK]], 0, found)
        event = self._worker.create_recorded_event()
        self._worker.submit_retrieve_request(name, op, event)
        self._wait(lambda: self._worker.get_finished(set())[1])
        took_s = time.perf_counter() - began_s
        self._end(name)
        return took_s, found

    def _wait(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not finished within {PATIENCE_S:.0f} s")


def prompt(seed: str, tokens: int) -> list[int]:
    """Its tokens: the server hashes them."""
    rng = random.Random(seed)
    return [rng.randrange(32_000) for _ in range(tokens)]
