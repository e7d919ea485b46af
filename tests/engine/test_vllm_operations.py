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
from kvass.types import PAGE

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
    found.copy_short("sources", "targets", "sizes", True)
    wanted = ("sources", "targets", "sizes", True), {"bytes_per_chunk": 8192}
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
def test_an_xpu_is_pinned_by_vllms_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert operations.pinning("cpu") == (None, None)
    freed: list[int] = []
    there = SimpleNamespace(
        xpu_host_register=lambda at, n: n == 8, xpu_host_unregister=freed.append
    )
    monkeypatch.setattr(torch.ops, "_C", there, raising=False)
    found = vllm_operations(STORAGES)
    assert found.register is not None
    assert found.unregister is not None
    assert [found.register(1, 8), found.register(1, 9)] == [True, False]
    assert not found.unregister(1), "the operation said nothing"
    assert freed == [1]


def test_an_error_of_pinning_is_taken_off_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch would report it as its own."""
    left: list[int] = []

    class Runtime:
        def cudaHostRegister(self, address: int, count: int, flags: int) -> int:  # noqa: N802
            assert (address, count, flags) == (PAGE, 8, 0)
            left.append(304)
            return 304

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            return 0

    def launch(count: int, device: object) -> None:
        if left:
            raise RuntimeError(f"CUDA error {left.pop()}")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "ones", launch)
    register, unregister = operations.pinning("cuda:0")
    assert register is not None
    assert unregister is not None
    assert not register(PAGE, 8)
    assert left == []
    assert unregister(PAGE)


@pytest.mark.usefixtures("platform")
def test_a_vllm_without_the_operation_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "_C_cache_ops", SimpleNamespace())
    with pytest.raises(MissingError, match="this vLLM has no swap_blocks_batch for cuda"):
        vllm_operations(STORAGES)
