"""``KvassStorage``: the storage backend that SGLang's HiCache calls, in each rank.

Laws of this file:

- No exception reaches SGLang. Up to 0.5.21 one in a storage thread leaves requests unanswered, and
  one in the constructor ends the server.
- What cannot be served is a miss. A setting that is not supported makes the backend inert: one line
  says why, and the engine runs without kvass.
- A page counts as read only if all its bytes are there.

SGLang calls from several threads: one asks which pages exist, one reads, one stores; its scheduler
registers pools and clears. Each rank has a backend of its own, and the ranks of an engine agree by
the smallest answer.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import sglang
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)

from kvass._version import TESTED_SGLANG
from kvass.connectors.sglang import hits, namespace, weight_files
from kvass.connectors.sglang.generation import Generation, agreed_token
from kvass.connectors.sglang.options import StorageOptions
from kvass.connectors.sglang.pools import HostPool
from kvass.engine import identity, weights
from kvass.engine.boundary import Boundary, log, log_off
from kvass.engine.options import read
from kvass.engine.pages import PageStore
from kvass.errors import KvassError, UsageError

KV: Final = "kv"
"""SGLang's name of the pool that calls without a pool's name mean."""
CONNECT_S: Final = 2.0
"""How long the start of an engine waits for the daemon."""
CLEAR_S: Final = 5.0

_backends = 0
"""How many backends this process has made."""


class KvassStorage(HiCacheStorage):
    """SGLang calls it as ``KvassStorage(storage_config, kwargs)``."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self._config = storage_config
        self._boundary = Boundary()
        self._pools: dict[str, HostPool] = {}
        self._stores: dict[str, PageStore] = {}
        self._generation_of: dict[str, bytes] = {}
        self._opening = threading.Lock()
        self._closed = False
        self._warned = False
        self.off = "it has not started"
        """Why the backend is inert; empty if it is not."""
        self._boundary.run(None, self._start)

    def _start(self) -> None:
        global _backends
        _backends += 1
        config = self._config
        try:
            self._options = read(config.extra_config or {}, StorageOptions, os.environ)
            if reason := unsupported(config, sglang.__version__):
                raise UsageError(reason)
            settings = namespace.Settings()
            self._fields = namespace.describe(settings, sglang.__version__, self._options.tag)
            files = weight_files.sources(settings.arguments, settings, self._options.model_id)
            files += tuple(settings.files())
            ranks = max(1, config.tp_size * config.pp_size)
            self._weights: Future[str] = weights.begin(files, ranks)
        except KvassError as error:
            self._turn_off(error)
            return
        self._name = str(settings.arguments.model_path)
        self._generation = Generation(self._options.fixed_weights, agreed_token(config))
        if _backends > 1 or settings.arguments.hicache_storage_backend is None:
            # The weights may have been replaced before SGLang attached this backend.
            self._generation.attached_later()
        self.off = ""

    def _turn_off(self, reason: KvassError) -> None:
        self.off = str(reason)
        log_off(self.off, not (self._config.tp_rank or self._config.pp_rank))

    # ------------------------------------------------------------ pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of the attention layers' KV."""
        super().register_mem_pool_host(mem_pool_host)
        self._boundary.run(None, self._register, KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool by its name; also that of ``register_mem_pool_host`` again."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != KV or KV not in self._pools:
            self._boundary.run(None, self._register, str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        if self.off:
            return
        try:
            self._pools[name] = HostPool(pool)
        except UsageError as error:
            self._turn_off(error)
            return
        if name == KV:
            self._generation.watch(pool)
        fields = self._fields | namespace.of_pool(name, pool, self._config)

        def named(found: Future[str]) -> None:
            try:
                self._boundary.run(None, self._open, name, fields | {"weights": found.result()})
            except KvassError as error:  # the weights have no name
                if not self.off:
                    self._turn_off(error)

        self._weights.add_done_callback(named)
        if name in self._stores:
            self._stores[name].wait_connected(CONNECT_S)
        elif name == KV and not self.off:
            log.warning(
                "the weight files are being read to name them by content; uncached until then"
            )

    def _open(self, name: str, fields: dict[str, str]) -> None:
        pool, options = self._pools[name], self._options
        with self._opening:
            if self._closed:
                return
            self._stores[name] = PageStore(
                options.socket,
                {key: identity.short(text) for key, text in fields.items() if text},
                pool.planes,
                pool.memory,
                pool.page_tokens,
                pool.pages,
                name=f"sglang{'' if name == KV else f' {name}'} {self._name}",
                tenant=options.tenant,
                boundary=self._boundary,
                daemon_uid=options.daemon_uid,
            )

    def _store(self, name: str) -> PageStore | None:
        """The store of a pool, in the generation of the weights in memory; None: all is a miss."""
        store = self._stores.get(name)
        if self.off or store is None:
            return None
        with self._opening:
            current = self._generation.current
            if self._generation_of.get(name, b"") != current:
                store.new_generation(current)
                self._generation_of[name] = current
        return store

    # ------------------------------------------------------------ the KV of attention layers

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first exist."""
        return self._boundary.run(0, self._exists, KV, keys, extra_info)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool; which of them were read."""
        return self._boundary.run(
            [False] * len(keys), self._get, KV, keys, host_indices, extra_info
        )

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the host pool; which of them exist afterwards."""
        if not self._warned and getattr(extra_info, "prefix_keys", None) is None:
            self._warned = True
            log.warning(
                'set "hicache_storage_pass_prefix_keys": true in the extra config: without it a '
                "long prompt may lose its beginning first, and the rest is of no use"
            )
        return self._boundary.run(
            [False] * len(keys), self._set, KV, keys, host_indices, extra_info
        )

    def _exists(self, name: str, keys: Sequence[str], extra_info: Any) -> int:
        store = self._ready(name, keys)
        if store is None:
            return 0
        return store.has([key_of(key) for key in keys], before(extra_info))

    def _get(
        self, name: str, keys: Sequence[str], host_indices: Any, extra_info: Any
    ) -> list[bool]:
        if (store := self._ready(name, keys)) is None:
            return [False] * len(keys)
        pages = self._pools[name].locate(host_indices, len(keys))
        got = store.get([key_of(key) for key in keys], pages, before(extra_info))
        return [index < got for index in range(len(keys))]

    def _set(
        self, name: str, keys: Sequence[str], host_indices: Any, extra_info: Any
    ) -> list[bool]:
        if (store := self._ready(name, keys)) is None:
            return [False] * len(keys)
        pages = self._pools[name].locate(host_indices, len(keys))
        stored = store.put([key_of(key) for key in keys], pages, before(extra_info))
        return [bool(each) for each in stored]

    def _ready(self, name: str, keys: Sequence[str]) -> PageStore | None:
        """The store of a pool, in the newest generation; None: there is none, or no key."""
        if not self.off:
            self._generation.seen()
        return self._store(name) if keys else None

    # ------------------------------------------------------------ other pools of a hybrid model

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> Any:
        """Which prefixes of ``keys`` can be restored from all pools."""
        return self._boundary.run(
            PoolTransferResult(0, {}), self._exists_v2, keys, pool_transfers or [], extra_info
        )

    def _exists_v2(self, keys: list[str], transfers: list[Any], extra_info: Any) -> Any:
        leading = self._exists(KV, keys, extra_info)
        held: dict[Any, int] = {KV: leading} if leading else {}
        lengths = list(range(1, leading + 1))
        for transfer in transfers:
            if not lengths:
                break
            allowed = self._allowed(transfer, keys[:leading])
            if allowed:
                held[transfer.name] = max(allowed)
            lengths = [length for length in lengths if length in allowed]
        return PoolTransferResult(lengths[-1] if lengths else 0, held, lengths)

    def _allowed(self, transfer: Any, keys: list[str]) -> set[int]:
        store = self._store(str(transfer.name))
        if store is None:
            return set()
        digests = [key_of(key) for key in keys]
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return hits.all_pages(store.has(digests))
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            return hits.trailing_pages(store.present(digests), max(1, len(transfer.keys or ())))
        raise UsageError(f"the pool {transfer.name} has the hit policy {transfer.hit_policy}")

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Read pages of several pools; which of them were read, by pool."""
        return {one.name: self._one(self._get, one, extra_info) for one in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store pages of several pools; which of them exist afterwards, by pool."""
        return {one.name: self._one(self._set, one, extra_info) for one in transfers}

    def _one(self, call: Callable[..., list[bool]], transfer: Any, extra_info: Any) -> list[bool]:
        keys, name = transfer.keys or [], str(transfer.name)
        # Of other pools the pages before these need not exist.
        chain = extra_info if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else None
        return self._boundary.run(
            [False] * len(keys), call, name, keys, transfer.host_indices, chain
        )

    # ------------------------------------------------------------ the rest of the interface

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Not used with ``interface_v1``: a miss."""

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Not used with ``interface_v1``: a miss."""
        return [None] * len(keys)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Not used with ``interface_v1``: not stored."""
        return False

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Not used with ``interface_v1``: not stored."""
        return False

    def clear(self) -> bool:
        """Forget all pages of this engine's namespaces; whether the daemon confirmed it."""
        cleared = [
            self._boundary.run(False, store.clear, CLEAR_S) for store in self._stores.values()
        ]
        return all(cleared)

    def close(self) -> None:
        """End the connections. SGLang's storage threads have ended before."""
        with self._opening:
            self._closed = True
        for store in self._stores.values():
            self._boundary.run(None, store.close)


def unsupported(config: Any, version: str) -> str:
    """Why an engine cannot be served; empty if it can."""
    if version not in TESTED_SGLANG:
        tested = ", ".join(sorted(TESTED_SGLANG))
        return f"SGLang {version} was never tested (tested: {tested})"
    if not (config.extra_config or {}).get("interface_v1"):
        return 'set "interface_v1": 1 in the extra config'
    if config.attn_cp_size > 1 or getattr(config, "dcp_size", 1) > 1:
        return "context parallelism is not supported"
    if config.should_split_heads or config.tp_lcm_size:
        return "tp_lcm_size is not supported"
    return ""


def key_of(page_hash: str) -> bytes:
    """The key of a page: SGLang's hash of all tokens up to the page's end, a SHA-256 in hex."""
    try:
        raw = bytes.fromhex(page_hash)
    except ValueError:
        raw = b""
    return raw if len(raw) == 32 else hashlib.sha256(page_hash.encode()).digest()


def before(extra_info: Any) -> list[bytes]:
    """The keys of the pages before those of a call."""
    return [key_of(key) for key in getattr(extra_info, "prefix_keys", None) or ()]
