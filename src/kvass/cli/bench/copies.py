"""Measures store and load of a prompt's chunks, compared with memcpy in the same rounds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.cli.bench.rig import (
    PATIENCE_S,
    WIDTH,
    EngineConnections,
    best_ratio,
    percentiles_us,
    private_memory,
    say,
    seconds,
    shared_memory,
)
from kvass.errors import ConfigError, Unavailable
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import describe_group
from kvass.messages import Matched
from kvass.transfer.base import Job, Kind, U8Array
from kvass.transfer.host import HostMover
from kvass.types import GroupLayout, I64Array, Size, Slots

Pages = npt.NDArray[np.void]

PROMPT_BYTES: Final = 64 << 20
"""The size of the prompts of all engines together. Each step uses its own memory, so the CPU's
caches do not have it. Steps are short, so that some rounds are not interrupted."""


class PromptShape(NamedTuple):
    """The prompt that an engine stores and loads: its layer groups and its chunks."""

    groups: tuple[GroupLayout, ...]
    chunk_tokens: int
    chunks: int = 1

    @property
    def bytes(self) -> int:
        return self.chunks * sum(group.shard_bytes(self.chunk_tokens) for group in self.groups)

    def within(self, room: int, engines: int = 1) -> PromptShape:
        """The prompt with as many chunks as fit into an engine's part of ``PROMPT_BYTES`` and into
        ``room`` bytes, at least one. Raises ``ConfigError`` if no chunk fits into ``room``."""
        if not (most := room // self.bytes):
            raise ConfigError(
                f"a chunk of {self.chunk_tokens} tokens takes {Size(self.bytes).rounded()}, and an "
                f"engine may use {Size(room).rounded()} of this L1: use a larger L1, a smaller "
                "--model, or fewer --chunk-tokens or --engines"
            )
        wanted = PROMPT_BYTES // engines // self.bytes
        return self._replace(chunks=min(max(1, wanted), most))


class KvCache:
    """The KV pages of an engine in host memory, for one prompt. ``shared`` is as much memory of the
    arena's kind. ``ending`` frees both."""

    def __init__(self, prompt: PromptShape, engine: EngineConnections, ending: ExitStack) -> None:
        self.prompt, self.engine, self.digests = prompt, engine, b""
        self.groups = [_Group(number, one, prompt) for number, one in enumerate(prompt.groups)]
        self.mover = HostMover([g.memory for g in self.groups], [g.planes for g in self.groups])
        ending.callback(self.mover.close)
        shared = shared_memory(prompt.bytes)
        ending.callback(shared.close)
        self.shared: U8Array = shared.buffer
        ending.callback(delattr, self, "shared")  # this comes first: a view keeps the mapping
        self._private = private_memory(prompt.bytes)
        self.loaded = 0
        """The number of rows of the last load."""
        self.copies_s = 0.0
        """The time of the copies of the last store or load, without messages; or of the last
        ``gather`` or ``scatter``."""

    def renew(self, digests: bytes = b"") -> None:
        """Begin another prompt, with other bytes in every page. ``digests``: its keys, or new
        ones."""
        self.digests = digests or os.urandom(WIDTH * self.prompt.chunks)
        for group in self.groups:
            group.pages[:, group.source, 0] += 1

    def store(self) -> None:
        granted = self.engine.reserve(self.digests)
        self._copy("store", [g.source for g in self.groups], granted.grants[0].slots)
        self.engine.commit(granted)

    def load(self) -> None:
        self.fetch(self.engine.look_up(self.digests))

    def fetch(self, matched: Matched) -> None:
        """Copy the matched rows, and release them. Of some groups a hit needs only the last
        rows."""
        for group, slots in zip(self.groups, matched.slots, strict=True):
            group.needed = len(slots) * group.planes.chunk_blocks
        self.loaded = sum(map(len, matched.slots))
        self._copy("load", [g.target[-g.needed :] for g in self.groups], matched.slots)
        self.engine.release(matched)

    def copy_in(self) -> None:
        """The memcpy that a store is compared with."""
        self._memcpy(self.shared, self._private)

    def copy_out(self) -> None:
        """The memcpy that the last load is compared with."""
        self._memcpy(self._private[: self.loaded_bytes], self.shared[: self.loaded_bytes])

    def gather(self) -> None:
        """The copies that a store's copies are compared with: the same pages in the same order, one
        at a time (numpy's ``take`` was as fast as a loop of memcpy in C)."""
        began_s = time.perf_counter()
        for group, places, row in self._pages():
            group.flat.take(places, None, row, "clip")
        self.copies_s = time.perf_counter() - began_s

    def scatter(self) -> None:
        """The copies that a load's copies are compared with. After ``gather`` it writes the bytes
        that the stored pages have. It overwrites loaded pages, so compare these before."""
        began_s = time.perf_counter()
        for group, places, row in self._pages(needed=True):
            group.flat[:, np.newaxis][places] = row[..., np.newaxis]
        self.copies_s = time.perf_counter() - began_s

    def _pages(self, needed: bool = False) -> Iterator[tuple[_Group, I64Array, Pages]]:
        """For each row its group, the places of its pages in ``flat``, and a row of ``shared``.
        ``needed``: only the rows that the last hit needed."""
        at = 0
        for group in self.groups:
            rows = group.places()
            for number, places in enumerate(rows, 1 - len(rows)):
                end = at + places.size * group.flat.itemsize
                if not needed or group.needed > -number * group.planes.chunk_blocks:
                    row = self.shared[at:end].view(group.flat.dtype)
                    yield group, places, row.reshape(places.shape)
                at = end

    def _memcpy(self, to: U8Array, source: U8Array) -> None:
        """Copy with one call for each chunk."""
        step = -(-source.nbytes // self.prompt.chunks)
        for at in range(0, source.nbytes, step):
            to[at : at + step] = source[at : at + step]

    def right(self) -> bool:
        """Whether every page that the last hit needs is right. Zeroes these pages afterwards."""
        same = True
        for group in self.groups:
            source, target = group.source[-group.needed :], group.target[-group.needed :]
            same &= all(np.array_equal(layer[source], layer[target]) for layer in group.pages)
            group.pages[:, group.target] = 0
        return same

    @property
    def loaded_bytes(self) -> int:
        return sum(g.needed * g.memory.nbytes // g.planes.blocks for g in self.groups)

    def _copy(self, kind: Kind, tables: list[I64Array], slots: tuple[Slots, ...]) -> None:
        plans = []
        for group, table, rows in zip(self.groups, tables, slots, strict=True):
            ids = table.reshape(-1, group.planes.chunk_blocks)
            offsets = rows.offsets(0, group.planes.shard_bytes)
            plans.append(plan_copy(group.planes, ids, offsets))
        self.copies_s = seconds(partial(self._move, Job(kind, tuple(plans), self.engine.arena)))

    def _move(self, job: Job) -> None:
        self.mover.submit(job)
        if not self.mover.drain(PATIENCE_S):
            raise Unavailable("the copies did not end")
        (done,) = self.mover.poll()
        if not done.ok:
            raise Unavailable(f"a {job.kind} ended {done.outcome}: {done.error}")


class _Group:
    """The pages of one layer group, each layer in one piece, as in vLLM: a block table to store
    from, one to load to, and the null block, in random order."""

    def __init__(self, number: int, layout: GroupLayout, prompt: PromptShape) -> None:
        table = prompt.chunks * layout.row_blocks(prompt.chunk_tokens)
        layers, blocks = len(layout.layers), 2 * table + 1
        (page_bytes,) = set(layout.page_bytes)
        stride = blocks * page_bytes
        bases, strides = range(0, layers * stride, stride), [page_bytes] * layers
        self.planes = describe_group(
            number, layout, prompt.chunk_tokens, blocks, bases, strides, [number] * layers
        )
        self.memory = private_memory(layers * stride)
        self.flat: Pages = self.memory.view(np.dtype((np.void, page_bytes)))
        self.pages = self.memory.view(np.uint64).reshape(layers, blocks, -1)
        self.pages[:] = np.arange(self.pages.size, dtype=np.uint64).reshape(self.pages.shape)
        order = np.random.default_rng(0).permutation(blocks - 1) + 1
        self.source, self.target = order[:table], order[table:]
        self.needed = table

    def places(self) -> I64Array:
        """Where the stored pages are in ``flat``: shape ``(rows, layers, blocks of a row)``."""
        layers, blocks, _ = self.pages.shape
        rows = self.source.reshape(-1, 1, self.planes.chunk_blocks)
        return rows + (np.arange(layers) * blocks)[:, np.newaxis]


def measure_copies(
    socket: str,
    rounds: int,
    prompt: PromptShape,
    *,
    engines: int = 1,
    private: bool = False,
    daemon_uid: int | None = None,
) -> dict[str, Any]:
    """Ratios, rates and times; the package's docstring explains the names. Raises ``KvassError``.

    ``private``: the daemon serves others, so the rows of a round are cleared after it.
    """
    with ExitStack() as ending:
        caches = [_cache(socket, prompt, private, daemon_uid, ending) for _ in range(engines)]
        pool = ending.enter_context(ThreadPoolExecutor(engines))
        size = Size(prompt.bytes).rounded()
        say(f"store and load, {rounds} rounds of {prompt.chunks} chunks, {size}")
        times: dict[str, list[float]] = {}
        same = True
        for number in range(rounds + 1):  # the first warms up
            for cache in caches:
                cache.renew()
            for step in _STEPS:
                for cache in caches if step is KvCache.scatter else ():  # it changes pages
                    same &= cache.right()
                took_s = seconds(partial(_all, pool, step, caches))
                if number:
                    times.setdefault(step.__name__, []).append(took_s)
                    copies_s = max(cache.copies_s for cache in caches)
                    times.setdefault(f"{step.__name__}: copies", []).append(copies_s)
            for cache in caches if private else ():
                cache.engine.clear()
    stored, loaded = engines * prompt.bytes, engines * caches[0].loaded_bytes
    return {
        "bytes_equal": same,
        "store_vs_memcpy": best_ratio(times["store"], times["copy_in"]),
        "load_vs_memcpy": best_ratio(times["load"], times["copy_out"]),
        "store_copies_vs_pages": best_ratio(times["store: copies"], times["gather: copies"]),
        "load_copies_vs_pages": best_ratio(times["load: copies"], times["scatter: copies"]),
        "store_gbps": stored / median(times["store"]) / 1e9,
        "load_gbps": loaded / median(times["load"]) / 1e9,
        "memcpy_gbps": stored / median(times["copy_in"]) / 1e9,
        "store_us": percentiles_us(times["store"]),
        "load_us": percentiles_us(times["load"]),
    }


_STEPS: Final = (
    *(KvCache.store, KvCache.copy_in, KvCache.gather),
    *(KvCache.load, KvCache.copy_out, KvCache.scatter),
)


def _cache(
    socket: str, prompt: PromptShape, private: bool, daemon_uid: int | None, ending: ExitStack
) -> KvCache:
    engine = EngineConnections(
        socket,
        prompt.groups,
        ending,
        chunk_tokens=prompt.chunk_tokens,
        private=private,
        daemon_uid=daemon_uid,
    )
    ending.callback(engine.clear)
    return KvCache(prompt, engine, ending)


def _all(pool: ThreadPoolExecutor, step: Callable[[KvCache], None], caches: list[KvCache]) -> None:
    list(pool.map(step, caches))
