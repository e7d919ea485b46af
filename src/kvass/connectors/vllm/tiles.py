"""The permission to use the CPU's AMX tiles. Linux gives it to a process on request.

On a CPU with AMX, vLLM's attention in bfloat16 uses the tiles but never requests the permission.
oneDNN requests it at the first large matrix product. If the first forward pass is a hit, the engine
may compute attention before any such product, and SIGILL ends it. So kvass requests the permission
itself.

A file of vLLM's version (see ``adapt.py``).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from kvass.connectors.vllm import namespace
from kvass.engine.boundary import log


def may_load(dtype: Any) -> bool:
    """Whether this process may load KV for a model in ``dtype``."""
    return _tiles_permitted() or dtype != torch.bfloat16


@cache
def _tiles_permitted() -> bool:
    """Whether the process may use AMX tiles or cannot use any. It requests the permission once in
    this process, and logs an error if it is refused."""
    if namespace.device_kind() != "cpu" or not torch.cpu._is_amx_tile_supported():
        return True
    granted = bool(torch.cpu._init_amx())
    if not granted:
        log.error(
            "this process may not use AMX, which its CPU has (arch_prctl ARCH_REQ_XCOMP_PERM): "
            "kvass is off for a model in bfloat16"
        )
    return granted
