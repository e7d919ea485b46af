"""vLLM's own offloading in an engine without a GPU: a spec for its option ``spec_module_path``.

vLLM's ``OffloadingConnector`` runs as it is: its scheduler's half, its manager, its worker. Only
what needs a GPU is replaced, and in this engine's own copy of the worker's module: streams, events,
and the copy operation (``host_streams``). Memory is not pinned. It is faulted in at the start, as
pinned memory is.

``kv_connector_extra_config``: ``spec_name`` "HostOffloadingSpec", ``spec_module_path`` this module,
``cpu_bytes_to_use``, and what else the connector takes.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from bench.peers.host_streams import Event, Stream, copy_runs, on_stream


class HostOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]  # vLLM is untyped
    """``CPUOffloadingSpec`` with a worker whose KV cache is in host memory."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            for one in kv_caches.tensors:
                one.tensor = one.tensor.as_subclass(_OnGpu)
            self._worker = _worker_module().CPUOffloadingWorker(
                kv_caches=kv_caches,
                blocks_per_chunk=self.blocks_per_chunk,
                num_cpu_chunks=self.num_chunks,
            )
            for tensor in self._worker._store_handler.dst_tensors:
                tensor.zero_()
        return self._worker


@cache
def _worker_module() -> ModuleType:
    """A second copy of vLLM's worker module, with other streams, events and copies."""
    found = importlib.util.find_spec("vllm.v1.kv_offload.cpu.gpu_worker")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    module.__dict__.update(
        torch=_Replaced(torch, Event=Event),
        current_platform=_Replaced(
            module.current_platform,
            Stream=Stream,
            current_stream=lambda: None,
            stream=on_stream,
        ),
        ops=SimpleNamespace(swap_blocks_batch=copy_runs),
        HAS_TRITON=False,
    )
    return module


class _Replaced:
    """``original`` with some other attributes."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _OnGpu(torch.Tensor):  # type: ignore[misc]  # torch is untyped
    """Host memory that the worker takes for a GPU's."""

    is_cuda = True
