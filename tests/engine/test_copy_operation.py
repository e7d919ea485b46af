"""vLLM's operation for copies between a GPU and host memory, as its own offloading calls it.

kvass calls the same operation on a GPU. No test has one. So each test runs a function of vLLM's
sources, alone and with stand-ins for torch and the platform, and looks at what it calls. Nothing of
vLLM is imported.
"""

from __future__ import annotations

import ast
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvass.connectors.vllm.contract import release
from tests.support.vllm.fake_vllm import installed, version_of

FOLDER = "v1/kv_offload/cpu"
WRAPPER, WORKER = "_custom_ops.py", f"{FOLDER}/gpu_worker.py"
CHECKS_PINNED = release(version_of(installed())) >= (0, 31)
"""vLLM 0.30 chooses the Triton kernel for host memory that is not pinned, too."""


def source(file: str, old: str = "", new: str = "") -> str:
    """A source of the installed vLLM, in which ``old`` is replaced."""
    text = (installed() / file).read_text()
    assert old in text
    return text.replace(old, new) if old else text


def function(text: str, name: str, **world: Any) -> Any:
    """The only function or method ``name`` in a source; ``world`` is all that it finds outside."""
    found = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    flags = annotations.compiler_flag  # no annotation is evaluated
    exec(compile(ast.Module([*found], []), name, "exec", flags, dont_inherit=True), world)
    return world[name]


def platform(name: str = "cuda", **more: Any) -> Any:
    """A stand-in for ``current_platform``."""
    asked = {f"is_{one}": lambda one=one: one == name for one in ("cuda", "rocm", "xpu", "cpu")}
    return SimpleNamespace(**asked, **more)


# ---------------------------------------------------------------- the wrapper


def passed(text: str, name: str) -> tuple[Any, ...]:
    """What the wrapper passes to torch's operation on a platform."""
    calls: list[tuple[Any, ...]] = []
    library = SimpleNamespace(swap_blocks_batch=lambda *args: calls.append(args))
    torch = SimpleNamespace(ops=SimpleNamespace(_C_cache_ops=library))
    wrapper = function(text, "swap_blocks_batch", torch=torch, current_platform=platform(name))
    wrapper("sources", "targets", "sizes", is_src_access_order_any="order")
    (call,) = calls
    return call


def test_the_wrapper_passes_sources_targets_sizes_and_the_order() -> None:
    text, in_order = source(WRAPPER), ("sources", "targets", "sizes")
    assert passed(text, "cuda") == passed(text, "rocm") == (*in_order, "order")
    assert passed(text, "xpu") == in_order
    text = source(WRAPPER, "src_ptrs, dst_ptrs, sizes, is_src", "dst_ptrs, src_ptrs, sizes, is_src")
    assert passed(text, "cuda") != (*in_order, "order"), "it sees them exchanged"


# ---------------------------------------------------------------- vLLM's own worker


def descriptors(text: str, name: str) -> list[tuple[int, str]]:
    """Length and dtype of the tensors that describe the runs of a transfer."""

    def empty(count: int, dtype: str, pin_memory: bool) -> tuple[int, str]:
        return count, dtype

    torch = SimpleNamespace(int64="int64", uint64="uint64", empty=empty)
    world = {"torch": torch, "PIN_MEMORY": False, "current_platform": platform(name)}
    return [*function(text, "_new_descriptor_buffers", **world)(7)]


def test_addresses_and_sizes_are_int64_and_on_xpu_uint64() -> None:
    text = source(WORKER)
    assert descriptors(text, "cuda") == descriptors(text, "rocm") == [(7, "int64")] * 3
    assert descriptors(text, "xpu") == [(7, "uint64")] * 3
    text = source(WORKER, "current_platform.is_xpu() else torch.int64", "True else torch.int64")
    assert descriptors(text, "cuda") != [(7, "int64")] * 3, "it sees another dtype"


def chooses_triton(
    text: str, size: int, to_host: bool = False, pinned: bool = True, name: str = "cuda"
) -> bool:
    """Whether pages of ``size`` bytes are copied by the Triton kernel."""
    kernel = object()
    triton = SimpleNamespace(next_power_of_2=lambda value: value)
    limit = source(f"{FOLDER}/swap_blocks_triton.py")
    world: dict[str, Any] = {}
    exec(next(line for line in limit.splitlines() if line.startswith("THRESHOLD_BYTES")), world)
    world |= {"ops": SimpleNamespace(swap_blocks_batch="operation"), "swap_blocks_batch": kernel}
    world |= {"HAS_TRITON": True, "triton": triton, "current_platform": platform(name)}
    world["functools"] = SimpleNamespace(partial=lambda function, **_: function)
    choose = partial(function(text, "_select_swap_blocks_fn", **world))
    pages = [[SimpleNamespace(page_size_bytes=size)]]
    chosen = choose(pages, to_host, pinned) if CHECKS_PINNED else choose(pages, to_host)
    assert chosen in ("operation", kernel)
    return chosen is kernel


def triton_is_for_small_loads_alone(text: str) -> bool:
    small, limit = 4096, 28 * 1024
    assert chooses_triton(text, small)
    assert chooses_triton(text, limit - 8)
    return not any(
        (
            chooses_triton(text, limit),
            chooses_triton(text, small + 4),
            chooses_triton(text, small, to_host=True),
            CHECKS_PINNED and chooses_triton(text, small, pinned=False),
            chooses_triton(text, small, name="rocm"),
            chooses_triton(text, small, name="xpu"),
        )
    )


def test_the_triton_kernel_is_for_small_loads_from_pinned_memory() -> None:
    assert triton_is_for_small_loads_alone(source(WORKER))
    breaks = [
        ("max(page_sizes) >= THRESHOLD_BYTES", "False"),
        ("any(s % 8 for s in page_sizes)", "False"),
        (" or current_platform.is_rocm()", ""),
        (" or current_platform.is_xpu()", ""),
        *([("if gpu_to_cpu or not host_memory_is_pinned", "if gpu_to_cpu")] * CHECKS_PINNED),
    ]
    for old, new in breaks:
        assert not triton_is_for_small_loads_alone(source(WORKER, old, new)), old


def transfer(text: str, to_host: bool) -> list[tuple[str, ...]]:
    """What a transfer of one run asks of stream, events and copy operation, in this order, while
    another one of its direction is under way."""
    log: list[tuple[str, ...]] = []

    def does(what: str) -> Any:
        return lambda *args, **fields: log.append((what, *map(str, (*args, *fields.values()))))

    events = ["second", "first"]
    stream = SimpleNamespace(wait_stream=does("stream"), wait_event=does("event"))
    spec = type("Spec", (SimpleNamespace,), {})
    one = spec(block_ids=np.zeros(1, np.int64), group_sizes=[1], block_indices=[0])
    handler = SimpleNamespace(
        gpu_to_cpu=to_host,
        layer_refs_per_group=[[0]],
        src_blocks_per_chunk=1,
        dst_blocks_per_chunk=1,
        _estimate_max_copy_ops=lambda _: 1,
        _buffer_pool=[tuple(Buffer(name) for name in ("sources", "targets", "sizes"))],
        _fill_group_ops=lambda *_, **__: (1, 8),
        _stream_pool=[],
        _event_pool=[],
        _transfers=[SimpleNamespace(end_event="the one before")],
        _transfer_events={},
        _swap_blocks_batch=does("copy"),
    )
    world = {
        "BlockIDsLoadStoreSpec": spec,
        "GPULoadStoreSpec": spec,
        "Transfer": SimpleNamespace,
        "cdiv": lambda a, b: -(-a // b),
        "torch": SimpleNamespace(
            Event=lambda **_: SimpleNamespace(record=partial(does("record"), events.pop()))
        ),
        "current_platform": platform(
            Stream=lambda: stream,
            current_stream=lambda: "the model's",
            stream=lambda _: nullcontext(),
        ),
    }
    assert function(text, "transfer_async", **world)(handler, 1, one, one)
    return [call[:2] if call[0] == "record" else call for call in log]


class Buffer:
    """A stand-in for a tensor of descriptors."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name

    def __getitem__(self, _: object) -> Buffer:
        return self

    def numel(self) -> int:
        return 1

    def numpy(self) -> None: ...


def test_transfers_wait_for_the_model_and_only_loads_may_read_in_any_order() -> None:
    text = source(WORKER)
    for to_host in (True, False):
        assert transfer(text, to_host) == [
            ("stream", "the model's"),
            ("event", "the one before"),
            ("record", "first"),
            ("copy", "sources", "targets", "sizes", str(not to_host)),
            ("record", "second"),
        ]
    breaks = {
        "stream.wait_stream(current_platform.current_stream())": "pass",
        "is_src_access_order_any = not self.gpu_to_cpu": "is_src_access_order_any = True",
    }
    for old, new in breaks.items():
        assert transfer(source(WORKER, old, new), True) != transfer(text, True), old


# ---------------------------------------------------------------- pinned memory


@pytest.mark.skipif(release(version_of(installed())) < (0, 32), reason="came with vLLM 0.32")
@pytest.mark.parametrize("name", ["cuda", "rocm"])
@pytest.mark.parametrize("error", [0, 2])
def test_registering_host_memory_says_whether_it_is_registered(name: str, error: int) -> None:
    """It raises nothing, and takes the error of CUDA's runtime away."""
    calls: list[tuple[Any, ...]] = []

    def register(*args: int) -> int:
        calls.append(("cudaHostRegister", *args))
        return error

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaGetLastError=lambda: calls.append(("cudaGetLastError",))
    )
    world = {
        "_load_cudart": lambda: runtime,
        "current_platform": platform(name, is_cuda_alike=lambda: True),
        "logger": SimpleNamespace(warning=lambda *_: None),
    }
    registers = function(source(f"{FOLDER}/host_register.py"), "host_register", **world)
    assert registers(4096, 8192) is (error == 0)
    assert calls == [("cudaHostRegister", 4096, 8192), *([("cudaGetLastError",)] * bool(error))]
