"""The device that holds the KV cache, as vLLM names it. A file of its version (see ``adapt.py``).

Law of this file: no CUDA context is made in a process that has none.
"""

from __future__ import annotations

import platform

import torch

from kvass.engine import identity


def kind() -> str:
    """vLLM's name of the device that holds the KV cache, e.g. ``cpu``."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def name() -> str:
    """vLLM's name of the kind of device; unlike ``kind`` it tells ROCm from CUDA."""
    from vllm.platforms import current_platform

    return str(current_platform.device_name)


def capability() -> tuple[int, int] | None:
    """The compute capability of the first device that this process may use; None on a CPU.

    The scheduler and every rank ask. vLLM reads it without a CUDA context, so a process that does
    not use the GPU does not begin to.
    """
    from vllm.platforms import current_platform

    found = current_platform.get_device_capability()
    return None if found is None else (int(found.major), int(found.minor))


def describe() -> str:
    """Device kind, and what chooses the kernels and with them what pages hold: a GPU's compute
    capability, a CPU's instruction sets. Raises ``identity.Indescribable``.

    Between generations of GPUs vLLM changes attention backends, how quantized pages keep their
    scales (in equal layouts and sizes) and how exact they are. Cards of one capability share, as
    they do within one engine.
    """
    if kind() != "cpu":
        if (found := capability()) is None:
            raise identity.Indescribable("the device's compute capability cannot be read")
        return identity.canonical([name(), *found])
    sets = (torch.cpu._is_avx512_supported(), torch.cpu._is_amx_tile_supported())
    chosen = torch.backends.cpu.get_cpu_capability()
    return identity.canonical([kind(), platform.machine(), chosen, sets])
