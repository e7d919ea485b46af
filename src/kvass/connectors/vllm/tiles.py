"""Leave to use the tiles of AMX, which Linux gives a process on request.

vLLM's attention in bfloat16 uses them on a CPU that has them, and never asks: oneDNN does, at the
first large product. An engine whose first forward pass is a hit may come to its attention before,
and ends (SIGILL).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from kvass.connectors.vllm import namespace
from kvass.engine.boundary import log


def may_load(dtype: Any) -> bool:
    """Whether this process may compute with loaded KV of a model in ``dtype``."""
    return _granted() or dtype != torch.bfloat16


@cache
def _granted() -> bool:
    """Asks, and says what follows if it is refused, once in this process."""
    if namespace.device_kind() != "cpu" or not torch.cpu._is_amx_tile_supported():
        return True
    granted = bool(torch.cpu._init_amx())
    if not granted:
        log.error(
            "this process may not use AMX, which its CPU has (arch_prctl ARCH_REQ_XCOMP_PERM): "
            "kvass is off for a model in bfloat16"
        )
    return granted
