"""SGLang's pool of KV in the form of a host pool, for engines that have KV in host memory.

Laws of this file:

- Only pools whose pages are runs of bytes in host memory, and that hold all of the KV that a prefix
  needs, are taken. For any other one ``refused`` says why.
- Host indices and device indices mean the same tokens here. An index that is no whole page raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from kvass.errors import UsageError


def is_latent(pool: Any) -> bool:
    """Whether all ranks have the same KV in ``pool`` (MLA)."""
    return type(pool) is MLATokenToKVPool


def refused(pool: Any, params: Any, components: Any) -> str:
    """Why the linker cannot serve an engine with this pool of KV; empty if it can. ``params``:
    SGLang's ``CacheInitParams``. ``components``: the kinds of its caches."""
    kinds = {getattr(one, "name", str(one)) for one in components}
    drafts = ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools")
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool) or kinds != {"FULL"}:
        return f"{type(pool).__name__}, {sorted(kinds)}: only full attention (MHA, MLA) is served"
    if torch.device(pool.device).type != "cpu":
        return f"the KV is on {pool.device}, and the linker copies host memory only"
    if params.is_eagle or any(getattr(params, name, ()) for name in drafts):
        return "speculative decoding is not supported"
    if params.pp_size > 1:
        return "pipeline parallelism is not supported"
    scales = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")
    if any(getattr(pool, name, None) is not None for name in scales):
        return "KV with scales is not supported"
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        return f"the layout {pool.kv_cache_layout} of KV is not supported"
    if not all(tensor.is_contiguous() for tensor in _tensors(pool)):
        return "the KV of a layer is not one run of memory"
    return ""


def _tensors(pool: Any) -> list[Any]:
    """The KV of each layer: shape ``(tokens, ...)``."""
    return [*pool.kv_buffer] if is_latent(pool) else [*pool.k_buffer, *pool.v_buffer]


class DevicePool:
    """What the storage backend asks of a host pool, for ``pool``."""

    def __init__(self, pool: Any, page_size: int) -> None:
        self.device_pool = pool
        self.page_size = page_size
        self.layout = "linker"
        tensors = _tensors(pool)
        self.size = min(len(tensor) for tensor in tensors) // page_size * page_size
        self._starts = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
        self._runs = np.array(
            [page_size * tensor[0].numel() * tensor.element_size() for tensor in tensors], np.int64
        )

    def __getattr__(self, name: str) -> Any:
        """The shape and type of the pages."""
        return getattr(self.device_pool, name)

    def clear(self) -> None:
        """SGLang emptied its cache: the storage backend watches the calls."""

    def get_page_buffer_meta(self, indices: Any) -> tuple[Any, Any]:
        """The addresses and sizes of the parts of each page, as a host pool gives them."""
        tokens = indices.numpy().reshape(-1, self.page_size)
        pages = tokens[:, 0] // self.page_size
        if (tokens != pages[:, None] * self.page_size + np.arange(self.page_size)).any():
            raise UsageError("the indices are not those of whole pages")
        addresses = self._starts + pages[:, None] * self._runs
        return addresses.reshape(-1), np.tile(self._runs, len(pages))
