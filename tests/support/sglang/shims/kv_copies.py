"""Versions in torch of the functions for GPUs that HiCache calls: copies between device and host
pools (``sgl_kernel.kvcacheio``), and two Triton kernels that hand out pages.

Parameters are those of SGLang's functions. A copy takes tensors (``direct``) or raw addresses with
strides (the ``kernel`` backend).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch

Tensor = Any


def _long(indices: Tensor) -> Tensor:
    return indices.to("cpu", torch.int64)


# ---------------------------------------------------------------- the backend "direct": tensors


def transfer_kv_direct(
    src_layers: Any, dst_layers: Any, src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    source, target = _long(src_indices), _long(dst_indices)
    for a, b in zip(src_layers, dst_layers, strict=True):
        b[target] = a[source].reshape(len(target), *b.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Tensor, dst_indices: Tensor, page_size: int
) -> None:
    """From layers to pages: each target is (page, layer, token of the page, ...)."""
    each = len(src_ptrs) // len(dst_ptrs)
    source, pages = _long(src_indices), _long(dst_indices)[::page_size] // page_size
    for n, target in enumerate(dst_ptrs):
        for layer in range(each):
            rows = src_ptrs[n * each + layer][source]
            target[pages, layer] = rows.reshape(len(pages), *target.shape[2:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Any,
    dst_ptrs: Any,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    pages, target = _long(src_indices)[::page_size] // page_size, _long(dst_indices)
    for source, to in zip(src_ptrs, dst_ptrs, strict=True):
        to[target] = source[pages, layer_id].reshape(len(target), *to.shape[1:])


# ---------------------------------------------------------------- the backend "kernel": addresses


def _rows(pointer: Any, indices: Tensor, size: int, stride: int) -> Tensor:
    count = int(indices.max()) + 1
    length = (count - 1) * stride + size
    memory = (ctypes.c_char * length).from_address(int(pointer))
    return torch.as_strided(torch.frombuffer(memory, dtype=torch.uint8), (count, size), (stride, 1))


def _move(
    source: Any,
    source_stride: int,
    source_indices: Tensor,
    target: Any,
    target_stride: int,
    target_indices: Tensor,
    size: int,
) -> None:
    a, b = _long(source_indices), _long(target_indices)
    if len(a):
        rows = _rows(source, a, size, source_stride)[a]
        _rows(target, b, size, target_stride)[b] = rows


def transfer_kv_all_layer_mla(
    src_layers: Any,
    dst_layers: Any,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    for n in range(num_layers):
        _move(
            src_layers[n],
            item_size,
            src_indices,
            dst_layers[n],
            item_size,
            dst_indices,
            item_size,
        )


def transfer_kv_all_layer(
    src_k_layers: Any,
    dst_k_layers: Any,
    src_v_layers: Any,
    dst_v_layers: Any,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    for a, b in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(a, b, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **_: Any
) -> None:
    a, b = src.data_ptr(), dst.data_ptr()
    _move(a, item_size, src_indices, b, item_size, dst_indices, item_size)


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    **_: Any,
) -> None:
    for a, b in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(a, b, src_indices, dst_indices, item_size)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Any,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    for n in range(num_layers):
        to = dst.data_ptr() + n * item_size
        _move(src_layers[n], item_size, src_indices, to, dst_layout_dim, dst_indices, item_size)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Any,
    dst_k: Tensor,
    src_v_layers: Any,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    for a, b in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            a, b, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    a = src.data_ptr() + layer_id * item_size
    _move(a, src_layout_dim, src_indices, dst.data_ptr(), item_size, dst_indices, item_size)


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    for a, b in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            a, b, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


NAMES: Final = tuple(name for name in list(globals()) if name.startswith("transfer_kv_"))

# ---------------------------------------------------------------- Triton kernels of the allocator


class Kernel:
    """Is called as a Triton kernel is: ``kernel[grid](...)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **_: self._run(*args)


def alloc_extend(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out: Tensor,
    _power_of_two: int,
    page: int,
) -> None:
    """The tokens' places: first in the last page of the prefix, then in free pages."""
    at = used = 0
    for prefix, length, last in zip(
        prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True
    ):
        count = length - prefix
        head = min(count, -prefix % page)
        out[at : at + head] = torch.arange(last + 1, last + 1 + head)
        pages = -(-(count - head) // page)
        ids = free_pages[used : used + pages]
        places = (ids[:, None] * page + torch.arange(page)).reshape(-1)
        out[at + head : at + count] = places[: count - head]
        used += pages
        at += count


def alloc_decode(
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out: Tensor,
    _power_of_two: int,
    page: int,
) -> None:
    used = 0
    for i, (length, last) in enumerate(zip(seq_lens.tolist(), last_loc.tolist(), strict=True)):
        if (length - 1) % page:
            out[i] = last + 1
        else:
            out[i] = free_pages[used] * page
            used += 1
