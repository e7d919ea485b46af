"""Lets SGLang run with HiCache on a machine without a GPU. Python imports this file in each process
that has its folder on PYTHONPATH, also in the processes that SGLang spawns.

After certain modules of SGLang are imported, functions that exist only for GPUs are replaced by
versions of torch (``kv_copies.py``) or by no-ops. Everything else of SGLang runs as it is.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def _unpinned(_: Any) -> None:
    """Pinned memory for copies to a GPU, which SGLang's file backend and LoRA ask for."""
    torch: Any = importlib.import_module("torch")

    def without(function: Any) -> Any:
        @functools.wraps(function)
        def made(*args: Any, **options: Any) -> Any:
            options.pop("pin_memory", None)
            return function(*args, **options)

        return made

    for name in ("empty", "full", "ones", "tensor", "zeros"):
        if not hasattr(getattr(torch, name), "__wrapped__"):
            setattr(torch, name, without(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self


def _copies(module: Any) -> None:
    """``sgl_kernel.kvcacheio``'s copies between device and host pools; pinning of host memory; the
    10 GiB that SGLang leaves free, which a machine for tests may not have."""
    kv_copies: Any = importlib.import_module("kv_copies")

    _unpinned(module)
    for name in kv_copies.NAMES:
        setattr(module, name, getattr(kv_copies, name))
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        if hasattr(module, name):
            setattr(module, name, lambda *_: None)
    if hasattr(module, "HICACHE_HOST_MEMORY_RESERVE_BYTES"):
        module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _allocator(module: Any) -> None:
    """Two Triton kernels of the allocator of pages with several tokens."""
    kv_copies: Any = importlib.import_module("kv_copies")

    module.alloc_extend_kernel = kv_copies.Kernel(kv_copies.alloc_extend)
    module.alloc_decode_kernel = kv_copies.Kernel(kv_copies.alloc_decode)


def _patient(module: Any) -> None:
    """So that a busy machine makes no miss of a page that a test is about."""
    module.ANSWER_S = 3.0


def _hook(name: str) -> Any:
    if name == "kvass.client.pages":
        return _patient
    if name == "sglang.kernels.ops.memory.allocator":
        return _allocator
    if name == "sglang.srt.lora.layers":
        return _unpinned
    pools = name.startswith("sglang.srt.mem_cache.pool_host.")
    return _copies if pools or name == "sglang.srt.mem_cache.memory_pool_host" else None


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if self._name == "torchvision._meta_registrations":
            return  # They are for operators that a build for another torch does not have.
        self._inner.exec_module(module)
        _hook(self._name)(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchvision._meta_registrations" and _hook(fullname) is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


sys.meta_path.insert(0, _Finder())
