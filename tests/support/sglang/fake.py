"""Stands in for the parts of SGLang that the storage backend touches: its settings, its interface
of storage backends, and host pools in several layouts."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch

VERSION: Final = "0.5.23"
GROUPS: Final = (
    *("device", "disagg", "exec", "lora", "memory", "mm", "model"),
    *("observability", "schedule", "serving", "spec"),
)


class HiCacheStorage:
    """SGLang's base class."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.__dict__.setdefault("registered_pools", {})[host_pool_name] = host_pool


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class PoolTransfer:
    name: str
    host_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class ExtraInfo:
    prefix_keys: list[str] | None = None


@dataclass
class StorageConfig:
    """``HiCacheStorageConfig``."""

    extra_config: dict[str, Any] | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_size: int = 1
    dcp_size: int = 1
    is_mla_model: bool = False
    should_split_heads: bool = False
    tp_lcm_size: int | None = None


class Group:
    """A group of settings, with groups in it."""

    def __init__(self, fields: dict[str, Any], subs: dict[str, Group] | None = None) -> None:
        self._fields, self._subs = fields, subs or {}


@dataclass
class Arguments:
    """``ServerArgs``."""

    model_path: str
    hicache_storage_backend: str | None = "dynamic"
    hicache_storage_backend_extra_config: str | None = None
    enable_hierarchical_cache: bool = True


@dataclass
class Engine:
    """The settings of one engine of a fake SGLang."""

    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the group ``exec.kernel``."""
    values: dict[str, Any] = field(default_factory=dict)
    """Of the group ``model``."""
    version: str = VERSION
    attached_later: bool = False


def modules(engine: Engine) -> dict[str, types.ModuleType]:
    """The modules of this engine's SGLang, by name."""
    defaults = {"revision": None, "load_format": "auto", "dtype": "bfloat16", "random_seed": 1}
    groups = {name: Group({}) for name in GROUPS}
    groups["model"] = Group(defaults | engine.values)
    groups["exec"] = Group({}, {"kernel": Group({"attention_backend": "x"} | engine.settings)})
    arguments = Arguments(str(engine.model), None if engine.attached_later else "dynamic")
    context: dict[str, Any] = {"get_server_args": lambda: arguments}
    context |= {f"get_{name}": lambda g=group: g for name, group in groups.items()}
    context["get_parallel"] = lambda: types.SimpleNamespace(tp_size=1)
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": engine.version},
        "sglang.srt": {},
        "sglang.srt.runtime_context": context,
        "sglang.srt.server_args": {"ServerArgs": Arguments},
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.arg_utils": {"namespace_of": lambda _: {"tp_size": "parallel"}},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.hicache_storage": {
            "HiCacheStorage": HiCacheStorage,
            "PoolHitPolicy": PoolHitPolicy,
            "PoolTransferResult": PoolTransferResult,
        },
    }
    made = {}
    for name, content in contents.items():
        made[name] = module = types.ModuleType(name)
        vars(module).update(content)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    return made


@contextmanager
def installed(engine: Engine) -> Iterator[None]:
    """Within it, ``import sglang`` gives the SGLang of ``engine``."""
    with mock.patch.dict(sys.modules, modules(engine)):
        storage = importlib.import_module("kvass.connectors.sglang.storage")
        vars(storage)["sglang"] = sys.modules["sglang"]
        yield


class HostPool:
    """A host pool of ``pages`` pages. ``parts``: the bytes of each part of a page. ``layers``: the
    parts of all pages lie one after the other, as in the layout ``layer_first``; else those of one
    page do."""

    def __init__(
        self, parts: Sequence[int], pages: int = 40, page_size: int = 4, *, layers: bool = False
    ) -> None:
        self.page_size, self.size = page_size, pages * page_size
        self.layout = "layer_first" if layers else "page_first_direct"
        self.dtype = torch.bfloat16
        self._parts, self._layers, self._pages = list(parts), layers, pages
        self.memory = np.zeros(pages * sum(parts), np.uint8)
        self.moved = 0
        """How many bytes later the pool says that its pages lie."""
        self.cleared = 0

    def clear(self) -> None:
        self.cleared += 1

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]] | None:
        pages = (indices[:: self.page_size] // self.page_size).tolist()
        spans = [span for page in pages for span in self.spans(page)]
        base = self.memory.ctypes.data + self.moved
        return [base + at for at, _ in spans], [size for _, size in spans]

    def spans(self, page: int) -> Iterator[tuple[int, int]]:
        at = 0 if self._layers else page * sum(self._parts)
        for size in self._parts:
            yield (at + page * size if self._layers else at), size
            at += size * self._pages if self._layers else size

    def page(self, page: int) -> bytes:
        """The bytes of a page."""
        return b"".join(self.memory[at : at + size].tobytes() for at, size in self.spans(page))

    def fill(self, page: int, seed: int) -> bytes:
        """Random bytes for a page; they are returned."""
        random = np.random.default_rng(seed)
        for at, size in self.spans(page):
            self.memory[at : at + size] = random.integers(0, 256, size, np.uint8)
        return self.page(page)

    def indices(self, pages: Sequence[int]) -> Any:
        """SGLang's host indices: one per token."""
        first = torch.tensor(list(pages), dtype=torch.int64)[:, None] * self.page_size
        return (first + torch.arange(self.page_size)).reshape(-1)
