"""vLLM's own operations to copy and pin KV pages, for the GPU mover. ``contract.py`` lists them.

The choice of the operation is that of vLLM's offloading (``v1/kv_offload/cpu/gpu_worker.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvass.transfer.device import MissingError, Operations
from kvass.transfer.torch_operations import torch_pinning


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
    register, unregister = _pinning(storages[0].device)
    return Operations(copy, _kernel(current_platform), register, unregister, unsigned)


def _kernel(platform: Any) -> Callable[[Any, Any, Any, int], None] | None:
    """vLLM's kernel for short runs, where it can read host memory by the host's addresses."""
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON or platform.is_rocm() or platform.is_xpu():
        return None
    from vllm.v1.kv_offload.cpu.swap_blocks_triton import swap_blocks_batch

    def copy_short(sources: Any, targets: Any, sizes: Any, at_once: int) -> None:
        swap_blocks_batch(sources, targets, sizes, True, bytes_per_chunk=at_once)

    return copy_short


def _pinning(
    device: Any,
) -> tuple[Callable[[int, int], bool] | None, Callable[[int], bool] | None]:
    """vLLM before 0.32 has no ``host_register``."""
    try:
        from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister
    except ImportError:
        return torch_pinning(device)

    def unregister(address: int) -> bool:
        host_unregister(address)  # logs what fails
        return True

    return host_register, unregister
