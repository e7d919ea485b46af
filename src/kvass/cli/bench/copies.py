"""Store and load of 4,096 tokens, against memcpy in the same rounds."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np

from kvass.cli.bench.rig import (
    CHUNK_TOKENS,
    PATIENCE_S,
    WIDTH,
    EngineSessions,
    private_memory,
    ratio,
    seconds,
    shared_memory,
)
from kvass.errors import Unavailable
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import describe_group
from kvass.transfer.base import Job
from kvass.transfer.host import HostMover
from kvass.transfer.runtime import Kind
from kvass.types import GroupLayout, I64Array, Slots

CHUNKS: Final = 4096 // CHUNK_TOKENS
_PAGE_BYTES: Final = 16 * 8 * 128 * 2
LLAMA_8B: Final = GroupLayout(
    "full", 16, tuple(f"{i // 2}.{'kv'[i % 2]}" for i in range(64)), (_PAGE_BYTES,) * 64
)
"""A page is 16 tokens, 8 heads, 128 wide, bf16: the K (or the V) of one block in one layer."""


class KvCache:
    """The pages of an ``EngineSessions``, in host memory, for a prompt of ``chunks`` chunks.

    It holds a block table to store from, one to load into, and the null block, in random order.
    """

    def __init__(self, engine: EngineSessions, layout: GroupLayout, chunks: int) -> None:
        self.engine, self.chunks = engine, chunks
        table = chunks * layout.row_blocks(CHUNK_TOKENS)
        layers, blocks = len(layout.layers), 2 * table + 1
        (page_bytes,) = set(layout.page_bytes)
        stride = blocks * page_bytes
        bases = range(0, layers * stride, stride)
        self.planes = describe_group(0, layout, CHUNK_TOKENS, blocks, bases, [page_bytes] * layers)
        memory = private_memory(layers * stride)
        self.pages = memory.view(np.uint64).reshape(layers, blocks, -1)
        self.pages[:] = np.arange(self.pages.size, dtype=np.uint64).reshape(self.pages.shape)
        order = np.random.default_rng(0).permutation(blocks - 1) + 1
        self.source, self.target = order[:table], order[table:]
        self.mover = HostMover([memory], [self.planes])

    def store(self, digests: bytes) -> None:
        granted = self.engine.reserve(digests)
        self._copy("store", self.source, granted.grants[0].slots[0])
        self.engine.commit(granted)

    def load(self, digests: bytes) -> None:
        matched = self.engine.look_up(digests)
        self._copy("load", self.target, matched.slots[0])
        self.engine.release(matched)

    def same_bytes(self) -> bool:
        return all(np.array_equal(plane[self.source], plane[self.target]) for plane in self.pages)

    def _copy(self, kind: Kind, table: I64Array, slots: Slots) -> None:
        offsets = slots.offsets(0, self.planes.shard_bytes)
        plan = plan_copy(self.planes, table.reshape(self.chunks, -1), offsets)
        self.mover.submit(Job(kind, (plan,), self.engine.arena))
        if not self.mover.drain(PATIENCE_S):
            raise Unavailable("the copies did not end")
        (done,) = self.mover.poll()
        if not done.ok:
            raise Unavailable(f"a {kind} ended {done.outcome}: {done.error}")


def measure_copies(
    socket: str, rounds: int, chunks: int = CHUNKS, layout: GroupLayout = LLAMA_8B
) -> dict[str, Any]:
    """Ratios and rates, by the names in the package's docstring. Raises ``KvassError``."""
    size = chunks * layout.shard_bytes(CHUNK_TOKENS)
    with ExitStack() as ending:
        engine = EngineSessions(socket, layout, ending)
        ending.callback(engine.scheduler.clear, timeout_s=PATIENCE_S)
        cache = KvCache(engine, layout, chunks)
        ending.callback(cache.mover.close)
        shared = shared_memory(size)
        ending.callback(shared.close)
        times, same = _rounds(cache, shared.buffer, rounds)
    return {
        "bytes_equal": same,
        "store_vs_memcpy": ratio(times["store"], times["in"]),
        "load_vs_memcpy": ratio(times["load"], times["out"]),
        "store_gbps": size / median(times["store"]) / 1e9,
        "load_gbps": size / median(times["load"]) / 1e9,
        "memcpy_gbps": size / median(times["in"] + times["out"]) / 1e9,
    }


def _rounds(cache: KvCache, shared: Any, rounds: int) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each step in each round, and whether every load brought what was stored."""
    private = private_memory(shared.nbytes)
    same = True
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first warms up
        digests = os.urandom(WIDTH * cache.chunks)
        cache.pages[:, cache.source, 0] += 1  # other bytes in every page than last time
        cache.pages[:, cache.target] = 0
        steps: dict[str, Callable[[], object]] = {
            "store": partial(cache.store, digests),
            "in": partial(_memcpy, shared, private, cache.chunks),
            "load": partial(cache.load, digests),
            "out": partial(_memcpy, private, shared, cache.chunks),
        }
        for name, step in steps.items():
            took_s = seconds(step)
            if number:
                times.setdefault(name, []).append(took_s)
        same = same and cache.same_bytes()
    return times, same


def _memcpy(to: Any, source: Any, calls: int) -> None:
    step = source.nbytes // calls
    for at in range(0, source.nbytes, step):
        to[at : at + step] = source[at : at + step]
