"""Which of vLLM's operations the connector takes, by what the platform has."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops

from kvass.connectors.vllm import operations
from kvass.connectors.vllm.operations import vllm_operations
from kvass.transfer.device import MissingError

STORAGES = (SimpleNamespace(device="cpu"),)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A platform like CUDA, on which vLLM can pin memory and has Triton."""
    import vllm.platforms
    import vllm.triton_utils
    import vllm.utils.platform_utils

    found: Any = SimpleNamespace(device_type="cuda", is_xpu=lambda: False, is_rocm=lambda: False)
    monkeypatch.setattr(vllm.platforms, "_current_platform", found)
    monkeypatch.setattr(vllm.utils.platform_utils, "is_pin_memory_available", lambda: True)
    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", True)
    there = SimpleNamespace(swap_blocks_batch=None)
    monkeypatch.setattr(torch.ops, "_C_cache_ops", there, raising=False)
    kernel: Any = ModuleType("vllm.v1.kv_offload.cpu.swap_blocks_triton")
    kernel.calls = []
    kernel.swap_blocks_batch = lambda *args, **more: kernel.calls.append((args, more))
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    found.kernel = kernel
    return found


def test_on_cuda_all_of_vllms_operations_are_taken(platform: Any) -> None:
    found = vllm_operations(STORAGES)
    assert found.copy is _custom_ops.swap_blocks_batch
    assert not found.unsigned
    assert found.copy_short is not None
    found.copy_short("sources", "targets", "sizes", 2048)
    wanted = ("sources", "targets", "sizes", True), {"bytes_per_chunk": 2048}
    assert platform.kernel.calls == [wanted]


@pytest.mark.parametrize("lacks", ["rocm", "xpu", "triton"])
def test_without_a_kernel_that_can_read_host_memory_there_is_none(
    platform: Any, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "triton":
        monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    else:
        setattr(platform, f"is_{lacks}", lambda: True)
    found = vllm_operations(STORAGES)
    assert found.copy_short is None
    assert found.unsigned == (lacks == "xpu")


def test_where_vllm_pins_nothing_nothing_is_pinned(
    platform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.utils.platform_utils.is_pin_memory_available", lambda: False)
    found = vllm_operations(STORAGES)
    assert (found.register, found.copy_short) == (None, None)


@pytest.mark.usefixtures("platform")
def test_vllms_own_pinning_is_taken_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.v1.kv_offload.cpu.host_register"
    module: Any = ModuleType(name)
    freed: list[int] = []
    module.host_register, module.host_unregister = (lambda at, n: n == 8), freed.append
    monkeypatch.setitem(sys.modules, name, module)
    found = vllm_operations(STORAGES)
    assert found.register is not None
    assert found.unregister is not None
    assert [found.register(1, 8), found.register(1, 9)] == [True, False]
    assert found.unregister(1)
    assert freed == [1]
    monkeypatch.setitem(sys.modules, name, None)  # before vLLM 0.32
    asked: list[object] = []

    def pinning(device: object) -> tuple[None, None]:
        asked.append(device)
        return None, None

    monkeypatch.setattr(operations, "torch_pinning", pinning)
    assert vllm_operations(STORAGES).register is None
    assert asked == ["cpu"]


@pytest.mark.usefixtures("platform")
def test_a_vllm_without_the_operation_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "_C_cache_ops", SimpleNamespace())
    with pytest.raises(MissingError, match="this vLLM has no swap_blocks_batch for cuda"):
        vllm_operations(STORAGES)
