"""``KvassLinker``: SGLang's ``UnifiedCacheLinker``, which copies between the engine's KV and the
daemon, without HiCache and its host pools. Experimental. SGLang 0.5.23 loads it by its name
(docs/sglang.md); the linker of 0.5.22 has the same interface, but no way to name another one.

Laws of this file:

- All that holds for the storage backend (``storage.py``) holds here, because it does the work.
- ``load`` copies before it returns, under the lease, and says whether all bytes are there. So no
  load fails afterwards, and SGLang aborts no request: it computes what was refused.
- All ranks of an engine give the same answers to ``load`` and ``offload``, else SGLang's ranks
  would part. ``load`` asks the others.
- When ``reset`` or ``close`` returns, nothing reads the engine's KV any more.
"""

from __future__ import annotations

import threading
from collections import deque
from types import SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from kvass.connectors.sglang.device_pool import DevicePool, is_latent, refused
from kvass.connectors.sglang.storage import KvassStorage
from kvass.engine.boundary import Boundary, log_off

MOST_PAGES: Final = 4096
"""The most pages of one call of the backend."""


class KvassLinker(UnifiedCacheLinker):
    """SGLang makes one in each rank."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any = (),
        extra_config: Any = None,
        forward_stream: Any = None,
    ) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = LayerWiseLoadCounter(int(getattr(pool, "layer_num", 1)))
        self._boundary = Boundary()
        self._page = int(params.page_size)
        self._ranks = _Ranks(params)
        self._loaded: set[str] = set()
        self._changed = threading.Condition()
        """Guards the four below."""
        self._queue: deque[tuple[list[str], Any]] = deque()
        self._results: deque[bool] = deque()
        self._storing = self._closed = False
        self._pool: DevicePool | None = None
        self._backend: KvassStorage | None = None
        self._boundary.run(None, self._start, pool, params, components, extra_config)
        threading.Thread(target=self._store_all, name="kvass-offload", daemon=True).start()

    def _start(self, pool: Any, params: Any, components: Any, extra_config: Any) -> None:
        if reason := refused(pool, params, components):
            log_off(reason, self._ranks.rank == 0)
            return
        config = HiCacheStorageConfig(
            tp_rank=self._ranks.rank,
            tp_size=self._ranks.size,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            attn_cp_rank=params.attn_cp_rank,
            attn_cp_size=params.attn_cp_size,
            is_mla_model=is_latent(pool),
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=None,
            extra_config={"interface_v1": 1} | dict(extra_config or {}),
        )
        self._pool = DevicePool(pool, self._page)
        self._backend = KvassStorage(config)
        self._backend.register_mem_pool_host(self._pool)

    # ------------------------------------------------------------ loads

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """The lengths in pages that can be loaded."""
        keys = self._boundary.run([], _keys, transfers)
        found = self._backend.batch_exists(keys) if self._backend and keys else 0
        return list(range(1, found + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Copy the pages into the engine's KV; whether all of them are there, in all ranks."""
        if not self._ranks.all_true(self._boundary.run(False, self._load, transfers)):
            return False
        self._loaded.add(rid)
        return True

    def _load(self, transfers: list[Any]) -> bool:
        backend, keys = self._backend, _keys(transfers)
        if backend is None or not keys:
            return False
        for first in range(0, len(keys), MOST_PAGES):
            indices = transfers[0].device_indices[first * self._page :][: MOST_PAGES * self._page]
            part = keys[first : first + MOST_PAGES]
            if not all(backend.batch_get_v1(part, indices, _before(keys[:first]))):
                return False
        return True

    def start_layer_wise_loading(self) -> int:
        """The number of a batch all of whose layers are there; -1: nothing was loaded."""
        if not self._loaded:
            return -1
        self._loaded.clear()
        counter = self.layer_done_counter
        number: int = counter.update_producer()
        for layer in range(counter.num_layers):
            counter.complete(number, layer)
        return number

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        finished: bool = self.layer_done_counter.finish(counter_index)
        return finished

    def cancel_queued_load(self, rid: str) -> bool:
        started = rid not in self._loaded
        self._loaded.discard(rid)
        return not started

    # ------------------------------------------------------------ offloads

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue pages to be stored. SGLang keeps them until their result is taken."""
        keys = self._boundary.run([], _keys, transfers)
        with self._changed:
            self._queue.append((keys, transfers[0].device_indices if keys else None))
            self._changed.notify_all()
        return True

    def _store_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                keys, indices = self._queue.popleft()
                self._storing = True
            stored = self._boundary.run(False, self._store, keys, indices)
            with self._changed:
                self._storing = False
                self._results.append(stored)
                self._changed.notify_all()

    def _store(self, keys: list[str], indices: Any) -> bool:
        if self._backend is None or not keys:
            return False
        if self._ranks.rank and self._pool is not None and is_latent(self._pool.device_pool):
            return True  # rank 0 stores the same bytes
        return all(self._backend.batch_set_v1(keys, indices, _before([])))

    def num_completed_offloads(self) -> int:
        with self._changed:
            return len(self._results)

    def pop_completed_offload(self) -> bool:
        with self._changed:
            return self._results.popleft()

    # ------------------------------------------------------------ the end

    def reset(self) -> None:
        """SGLang emptied its cache: the weights may have been replaced."""
        self._drain()
        self._loaded.clear()
        self.layer_done_counter.reset()
        if self._pool is not None:
            self._boundary.run(None, self._pool.clear)

    def _drain(self) -> None:
        """Drop what is queued, and wait for what is being stored: each call has a bound."""
        with self._changed:
            self._queue.clear()
            self._changed.wait_for(lambda: not self._storing)
            self._results.clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._drain()
        if self._backend is not None:
            self._backend.close()


class _Ranks:
    """The ranks that have to agree: those that SGLang's cache asks."""

    def __init__(self, params: Any) -> None:
        self.rank, self.size, self._group = 0, 1, None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for group in (params.tp_cache_group, params.attn_tp_cache_group):
                if group is not None and torch.distributed.get_world_size(group=group) > 1:
                    self._group = group
                    self.rank = torch.distributed.get_rank(group=group)
                    self.size = torch.distributed.get_world_size(group=group)

    def all_true(self, value: bool) -> bool:
        """Whether ``value`` is true in all ranks, each of which calls it."""
        if self._group is None:
            return value
        least = torch.tensor([int(value)], dtype=torch.int)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self._group)
        return bool(least.item())


def _keys(transfers: list[Any]) -> list[str]:
    """The keys of the pages of KV, which is the only pool."""
    (transfer,) = transfers
    return list(transfer.keys or ())


def _before(keys: list[str]) -> Any:
    """SGLang's ``extra_info``: the pages before those of a call."""
    return SimpleNamespace(prefix_keys=keys)
