"""Stands in for the parts of SGLang that the linker touches, beside those of ``fake.py``: pools of
KV in host memory, and the interface of a linker."""

from __future__ import annotations

import importlib
import sys
import types
from abc import ABC
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

import torch

from tests.support.sglang import fake

LAYERS: Final = 3
PAGE: Final = 4


class UnifiedCacheLinker(ABC):  # noqa: B024 - SGLang's base class
    pass


class LayerWiseLoadCounter:
    """SGLang's, without its waits."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers, self.number = num_layers, -1
        self.futures: dict[int, list[Future[None]]] = {}

    def update_producer(self) -> int:
        self.number += 1
        self.futures[self.number] = [Future() for _ in range(self.num_layers)]
        return self.number

    def complete(self, index: int, layer: int) -> None:
        self.futures[index][layer].set_result(None)

    def finish(self, index: int) -> bool:
        return all(future.result(timeout=0) is None for future in self.futures.pop(index, ()))

    def reset(self) -> None:
        self.futures.clear()


class _Pool:
    """``pages`` pages, the first of which SGLang keeps for padding."""

    device = "cpu"
    layer_num = LAYERS
    dtype = torch.bfloat16

    def __init__(self, pages: int = 40) -> None:
        tokens = pages * PAGE
        self.tensors = [
            torch.zeros(tokens, *self.shape, dtype=self.dtype) for _ in range(self.count)
        ]

    shape: tuple[int, ...]
    count: int

    def page(self, page: int) -> bytes:
        parts = [tensor[page * PAGE :][:PAGE].view(torch.uint8) for tensor in self.tensors]
        return b"".join(part.numpy().tobytes() for part in parts)

    def fill(self, page: int, seed: int) -> bytes:
        source = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            part = tensor[page * PAGE :][:PAGE]
            part.copy_(torch.rand(part.shape, generator=source))
        return self.page(page)


class MHATokenToKVPool(_Pool):
    kv_cache_layout = "nhd"
    head_num, head_dim = 2, 8
    shape, count = (2, 8), 2 * LAYERS

    @property
    def k_buffer(self) -> list[torch.Tensor]:
        return self.tensors[:LAYERS]

    @property
    def v_buffer(self) -> list[torch.Tensor]:
        return self.tensors[LAYERS:]


class MLATokenToKVPool(_Pool):
    kv_cache_dim = 24
    shape, count = (1, 24), LAYERS

    @property
    def kv_buffer(self) -> list[torch.Tensor]:
        return self.tensors


class OtherPool(MHATokenToKVPool):
    pass


@dataclass
class Params:
    """``CacheInitParams``, and its allocator."""

    pool: Any
    page_size: int = PAGE
    is_eagle: bool = False
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    tp_cache_group: Any = None
    attn_tp_cache_group: Any = None
    mtp_draft_device_pools: tuple[Any, ...] = ()

    @property
    def token_to_kv_pool_allocator(self) -> Params:
        return self

    def get_kvcache(self) -> Any:
        return self.pool


@dataclass
class Transfer:
    """``PoolTransfer``."""

    keys: list[str] | None
    device_indices: Any = None
    name: str = "kv"


def transfer(keys: Sequence[str], pages: Sequence[int] = ()) -> list[Any]:
    first = torch.tensor(list(pages), dtype=torch.int64)[:, None] * PAGE
    return [Transfer(list(keys), (first + torch.arange(PAGE)).reshape(-1))]


@dataclass
class Config(fake.StorageConfig):
    """``HiCacheStorageConfig``."""

    attn_cp_rank: int = 0
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = None
    others: dict[str, Any] = field(default_factory=dict)


@contextmanager
def installed(engine: fake.Engine) -> Iterator[types.ModuleType]:
    """Within it ``import sglang`` gives the SGLang of ``engine``; the module of the linker."""
    made: dict[str, Any] = {
        "sglang.srt.mem_cache.memory_pool": (MHATokenToKVPool, MLATokenToKVPool),
        "sglang.srt.mem_cache.unified_cache": (),
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker": (
            LayerWiseLoadCounter,
            UnifiedCacheLinker,
        ),
    }
    modules = {name: types.ModuleType(name) for name in made}
    for name, contents in made.items():
        vars(modules[name]).update({one.__name__: one for one in contents})
    with fake.installed(engine), mock.patch.dict(sys.modules, modules):
        hicache = sys.modules["sglang.srt.mem_cache.hicache_storage"]
        vars(hicache).update(HiCacheStorageConfig=Config, PoolName=types.SimpleNamespace(KV="kv"))
        yield importlib.import_module("kvass.connectors.sglang.linker")
