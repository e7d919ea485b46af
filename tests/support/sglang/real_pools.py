"""Pages of SGLang's real host pools, through two real caches in this process and one daemon.

``python -m tests.support.sglang.real_pools SOCKET PARTS LAYOUT PAGE``: PARTS like ``FULL+SWA`` or
``MLA``. SGLang's own fixtures make the caches, with its controller and factory (0.5.23). All bytes
of the first one's host pools are random. Pages are stored, read into other places of the pools of
the second one, and compared as SGLang gives them (``get_data_page``). Prints ``POOL equal PAGES``
for each pool.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from typing import Any

import torch

PAGES = 5


def made(socket: str, parts: str, layout: str, page: int, tag: str) -> Any:
    """The controller of a new cache with kvass as its storage."""
    from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
    from sglang.test.kits.unified_radix_cache import fixtures
    from sglang.test.kits.unified_radix_cache.config import CacheConfig

    from kvass.connectors.sglang.plugin import backend_config

    names = ["FULL" if part == "MLA" else part for part in parts.split("+")]
    config = CacheConfig(
        page_size=page,
        components=tuple(getattr(ComponentType, name) for name in names),
        kv_size=1024,
        max_context_len=1024,
        sliding_window_size=64 if "SWA" in names else None,
        mamba_cache_size=60,
        enable_mamba_extra_buffer="MAMBA" in names and page > 1,
    )
    if parts == "MLA":
        fixtures.MHATokenToKVPool = latent_pool
    cache, _, _ = fixtures.build_fixture(config)
    extra = backend_config() | {
        "kvass.socket": socket,
        "kvass.model_id": "unit",
        "kvass.tag": tag,
        "kvass.fixed_weights": True,
    }
    arguments = ServerArgs(
        model_path="dummy",
        page_size=page,
        hicache_io_backend="direct" if layout.endswith("direct") else "kernel",
        hicache_mem_layout=layout,
        hicache_write_policy="write_through",
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=json.dumps(extra),
        hicache_ratio=2.0,
    )
    arguments._mamba_cache_chunk_size = max(64, page)
    set_global_server_args_for_scheduler(arguments)
    cache.init_hicache(arguments, cache.cache_init_params)
    fixtures.drop_hicache_atexit_pin(cache)
    return cache.cache_controller


def latent_pool(**given: Any) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    for name in ("head_num", "head_dim"):
        del given[name]
    return MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=32, **given)


def indices(pages: range, size: int) -> Any:
    first = torch.tensor(list(pages), dtype=torch.int64)[:, None] * size
    return (first + torch.arange(size)).reshape(-1)


def check(name: str, source: Any, target: Any) -> str:
    """Store pages of the backend ``source``, and read them into ``target``."""
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer

    keys = [hashlib.sha256(f"{name}{n}".encode()).hexdigest() for n in range(PAGES)]
    pools = [backend.registered_pools[name] for backend in (source, target)]
    size = pools[0].page_size
    for memory in source._pools[str(name)].memory:
        memory[:] = torch.randint(0, 256, memory.shape, dtype=torch.uint8).numpy()
    read, stored = range(7, 7 + PAGES), range(PAGES)
    if str(name) == "kv":
        done = source.batch_set_v1(keys, indices(stored, size))
        got = target.batch_get_v1(keys, indices(read, size))
        assert target.batch_exists(keys) == PAGES
    else:
        (done,) = source.batch_set_v2(
            [PoolTransfer(name, indices(stored, size), keys=keys)]
        ).values()
        (got,) = target.batch_get_v2([PoolTransfer(name, indices(read, size), keys=keys)]).values()
    assert done == got == [True] * PAGES, (name, done, got)
    for a, b in zip(stored, read, strict=True):
        pages = [
            pool.get_data_page(p * size, flat=True) for pool, p in zip(pools, (a, b), strict=True)
        ]
        raw = [page.contiguous().view(torch.uint8) for page in pages]
        assert raw[0].numel() > 0
        assert torch.equal(*raw), (name, a)
        other = pools[1].get_data_page((a + 20) * size, flat=True).contiguous().view(torch.uint8)
        assert not torch.equal(raw[0], other), "pages that were not read differ"
    return f"{name} equal {PAGES}"


def main() -> None:
    socket, parts, layout, page = sys.argv[1:]
    stub: Any = types.ModuleType("datasets")  # SGLang's test kits import it
    stub.load_dataset = None
    sys.modules["datasets"] = stub
    tag = "-".join(sys.argv[2:])
    from sglang.srt.runtime_context import get_parallel

    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        controllers = [made(socket, parts, layout, int(page), tag) for _ in range(2)]
        source, target = (controller.storage_backend for controller in controllers)
        assert (source.off, target.off) == ("", ""), (source.off, target.off)
        for name in source.registered_pools:
            sys.stdout.write(check(name, source, target) + "\n")
        sys.stdout.flush()
        for controller in controllers:
            controller._stop_storage_threads()
            controller.storage_backend.close()
    os._exit(0)  # SGLang's fixtures leave threads


if __name__ == "__main__":
    main()
