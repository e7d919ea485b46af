"""vLLM's own operations to copy and pin KV pages, for the GPU mover. ``contract.py`` lists them.

The choice of the operation is that of vLLM's offloading (``v1/kv_offload/cpu/gpu_worker.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kvass.transfer.device import CopyBatch, MissingError, Operations

Pin = Callable[[int, int], bool]
Unpin = Callable[[int], bool]

KERNEL_BYTES: Final = 8192
"""How many bytes a program of the kernel copies at a time: the most that vLLM uses. Shorter runs
are masked. With one value, the kernel is compiled when the device is tested, and never later."""


def vllm_operations(storages: Sequence[Any]) -> Operations:
    """The operations for ``storages`` of one device. Raises MissingError if this vLLM has none."""
    import torch
    from vllm import _custom_ops
    from vllm.platforms import current_platform
    from vllm.utils.platform_utils import is_pin_memory_available

    if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        raise MissingError(f"this vLLM has no swap_blocks_batch for {current_platform.device_type}")
    copy, unsigned = _custom_ops.swap_blocks_batch, current_platform.is_xpu()
    if not is_pin_memory_available():  # in WSL2, for example
        return Operations(copy, unsigned=unsigned)
    register, unregister = pinning(storages[0].device)
    return Operations(copy, _kernel(current_platform), register, unregister, unsigned)


def _kernel(platform: Any) -> CopyBatch | None:
    """vLLM's kernel for short runs, where it can read host memory by the host's addresses."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON or platform.is_rocm() or platform.is_xpu():
        return None
    from vllm.v1.kv_offload.cpu.swap_blocks_triton import swap_blocks_batch

    def copy_short(sources: Any, targets: Any, sizes: Any, any_order: bool) -> None:
        swap_blocks_batch(sources, targets, sizes, any_order, bytes_per_chunk=KERNEL_BYTES)

    return copy_short


def pinning(device: Any) -> tuple[Pin | None, Unpin | None]:
    """``register`` and ``unregister`` for ``Operations``: by the CUDA or HIP runtime that torch
    uses, or vLLM's own operation on XPU. None where there is neither."""
    import torch

    if torch.device(device).type == "cuda":
        return _by_runtime(torch, device)
    operations = torch.ops._C
    if not hasattr(operations, "xpu_host_register"):
        return None, None
    return (
        lambda address, count: bool(operations.xpu_host_register(address, count)),
        lambda address: bool(operations.xpu_host_unregister(address)),
    )


def _by_runtime(torch: Any, device: Any) -> tuple[Pin, Unpin]:
    runtime: Any = torch.cuda.cudart()

    def drained(result: Any) -> bool:
        """Whether ``result`` is success. Else the error stays with this thread, and the next launch
        would take it for its own: launch something that nobody needs."""
        if int(result):
            with suppress(RuntimeError):
                torch.ones(1, device=device)
        return not int(result)

    return (
        lambda address, count: drained(runtime.cudaHostRegister(address, count, 0)),
        lambda address: drained(runtime.cudaHostUnregister(address)),
    )
