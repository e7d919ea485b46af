"""SGLang's own fixtures of its storage tests, for each of its configurations of pools.

SGLang's wheel has the fixtures (``sglang.test.kits``, from 0.5.23) but not the tests that use them.
Each test here is one call of them: caches with SGLang's controller, threads and host pools store
and read pages with the backend "file", and the fixtures assert what comes back. pytest runs it in
SGLang's environment: ``tests/support/sglang/upstream.py``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.test.kits.unified_radix_cache.config import (
    CONFIGS,
    config_attrs,
    requires_hicache,
    requires_swa_only,
)
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from sglang.test.test_utils import CustomTestCase

Test = TypeVar("Test", bound=Callable[..., None])
with_hicache: Callable[[Test], Test] = requires_hicache
with_windows: Callable[[Test], Test] = requires_swa_only


class _Cases(UnifiedRadixCacheStorageFixtures):  # type: ignore[misc]
    """One page is told from another by its bytes: ``marker`` of the fixtures."""

    def _pages(self) -> int:
        window: int = self.cfg.sliding_window_size or 0
        page: int = self.cfg.page_size
        return max(4, -(-window // page) + 1)

    def _bytes(self: Any, cache: Any, allocator: Any, seq: list[int]) -> Any:
        leaf = match_prefix(cache, seq).last_device_node
        return self._snapshot_full_kv(allocator, cache.path_device_indices(leaf))

    def _read_back(self: Any, marker: int, more: int = 0) -> None:
        folder, seq = self._make_storage_dir(), self._make_seq(1, self._pages())
        expected = self._l3_produce(folder, seq, marker=marker)
        cache, allocator, requests = self._l3_consumer(folder)
        self._consume_prefetch(cache, seq + self._make_seq(9000, more), CacheRequestHandle("a", 0))
        found = match_prefix(cache, seq)
        assert found.host_hit_length == len(seq)
        self._load_back_node(cache, found.best_match_node, self._make_req(requests))
        for one, other in zip(self._bytes(cache, allocator, seq), expected, strict=True):
            assert torch.equal(one, other)
        cache.sanity_check()

    @with_hicache
    def test_bytes_come_back(self) -> None:
        if self.cfg.has_mamba:
            self.skipTest("a load of states needs a request of its own")
        self._read_back(7)

    @with_hicache
    def test_a_longer_prompt_reads_what_there_is(self) -> None:
        if self.cfg.has_mamba:
            self.skipTest("a load of states needs a request of its own")
        self._read_back(9, more=1)

    @with_hicache
    def test_hits_of_all_pools(self: Any) -> None:
        folder, seq = self._make_storage_dir(), self._make_seq(1, self._pages())
        self._l3_produce(folder, seq)
        cache, _, _ = self._l3_consumer(folder)
        self._consume_prefetch(cache, seq, CacheRequestHandle("b", 0))
        assert match_prefix(cache, seq).host_hit_length == len(seq)

    @with_hicache
    def test_another_directory_has_nothing(self: Any) -> None:
        seq = self._make_seq(1, self._pages())
        self._l3_produce(self._make_storage_dir(), seq)
        cache, _, _ = self._l3_consumer(self._make_storage_dir())
        self._consume_prefetch(cache, seq, CacheRequestHandle("c", 0))
        assert match_prefix(cache, seq).host_hit_length == 0

    @with_hicache
    def test_another_prompt_has_nothing(self: Any) -> None:
        folder = self._make_storage_dir()
        self._l3_produce(folder, self._make_seq(1, self._pages()))
        cache, _, _ = self._l3_consumer(folder)
        other = self._make_seq(5000, self._pages())
        self._consume_prefetch(cache, other, CacheRequestHandle("d", 0))
        assert match_prefix(cache, other).host_hit_length == 0

    @with_hicache
    def test_host_memory_as_a_buffer(self: Any) -> None:
        folder, seq = self._make_storage_dir(), self._buffer_swa_seq()
        _, expected = self._produce_buffer_l3(folder, seq, marker=5)
        cache, allocator, _ = self._build_buffer_hicache_fixture(folder)
        cache.prefetch_from_storage(
            CacheRequestHandle("e", 0), cache.root_node_handle(), array("q", seq), None, None
        )
        self._run_prefetch_to_completion(cache, CacheRequestHandle("e", 0))
        for one, two in zip(self._bytes(cache, allocator, seq), expected, strict=True):
            assert torch.equal(one, two)

    @with_hicache
    def test_salts_are_apart(self: Any) -> None:
        folder, seq = self._make_storage_dir(), self._buffer_swa_seq()
        self._produce_buffer_l3(folder, seq, cache_salt="one")
        cache, _, _ = self._build_buffer_hicache_fixture(folder)
        cache.prefetch_from_storage(
            CacheRequestHandle("f", 0), cache.root_node_handle(), array("q", seq), None, None
        )
        self._run_prefetch_to_completion(cache, CacheRequestHandle("f", 0))
        assert match_prefix(cache, seq).device_prefix_len == 0

    @with_windows
    def test_a_sibling_takes_the_head(self: Any) -> None:
        self._assert_sibling_head_is_trimmed(
            self._make_storage_dir(), self._buffer_swa_seq(), False
        )

    @with_windows
    def test_windows_are_read(self: Any) -> None:
        assert self._setup_swa_tp_prefetch() is not None


for number, config in enumerate(CONFIGS):
    name = f"Test_{number}_{config.label}"
    globals()[name] = type(name, (_Cases, CustomTestCase), config_attrs(_Cases, config))
