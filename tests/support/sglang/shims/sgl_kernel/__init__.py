"""Stands in for ``sgl_kernel``, which has no build for a CPU. Any name and any submodule can be
imported. A function that is called raises, except the one that a small engine on a CPU needs."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _missing(name: str) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise NotImplementedError(f"{name} has no version for a CPU in kvass's tests")

    return call


def copy_all_layer_kv_cache_cpu(k_buffers: Any, v_buffers: Any, target: Any, source: Any) -> None:
    for buffers in (k_buffers, v_buffers):
        for buffer in buffers:
            buffer[target] = buffer[source].clone()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(f"sgl_kernel.{name}")


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: Any) -> None:
        def get(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _missing(f"{module.__name__}.{name}")

        module.__getattr__ = get


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("sgl_kernel.") or fullname == "sgl_kernel.scalar_type":
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)


sys.meta_path.insert(0, _Finder())
