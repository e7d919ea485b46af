"""The calls that vLLM's engine sends to its workers: which of them may replace weights.

A file of vLLM's version (see ``adapt.py``).

Laws of this file:

- A call that is not known to be harmless is a change. It is noted before it runs.
- Arguments, results and exceptions of a call pass through unchanged.

Facts relied on: the scheduler's half of a connector is made by the constructor of the scheduler,
and that by the constructor of ``EngineCore``, which has its executor by then; whatever vLLM has its
workers do from then on goes through the executor's ``collective_rpc``. An ``EngineCoreProc`` is
the main object of a process of vLLM's own, and so is each worker of a ``MultiprocExecutor``.
Whatever pauses an engine or puts it to sleep resets its caches, the connector's too, through
``EngineCore._reset_caches``; nobody else calls that.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

HARMLESS: Final = frozenset(
    re.findall(
        r"\w+",
        "execute_model sample_tokens take_draft_token_ids execute_dummy_batch "
        "check_health synchronize_device profile shutdown wake_up "
        "reset_mm_cache reset_encoder_cache release_late_interaction_query_cache "
        "add_lora remove_lora pin_lora list_loras "
        "save_sharded_state save_tensorized_model compute_weight_checksums "
        "get_cache_block_size_bytes get_compilation_match_table get_encoder_timing_stats "
        "get_kv_cache_spec get_kv_connector_handshake_metadata get_model_inspection "
        "get_simple_cpu_offload_num_cpu_blocks get_supported_kv_cache_layouts "
        "get_supported_tasks supports_draft_weight_updates",
    )
)
"""Methods of vLLM's workers that leave the weights as they are, in every tested version. An adapter
has a name of its own. Those that vLLM calls only before there is a scheduler are not listed."""

KEEPING: Final[dict[str, tuple[object, ...]]] = {
    "sleep": (((), {"level": 1}), ((1,), {})),
    "discard": (((("kv_cache",),), {}),),
}
"""Methods that are harmless with these arguments: level 1 keeps the weights in the host's memory
until the engine wakes up; other levels drop them."""


def engine_core() -> Any:
    """The ``EngineCore`` whose constructor called us, with its executor; None: there is none."""
    cores = (core for _, core in _calling_cores() if hasattr(core, "model_executor"))
    return next(cores, None)


def pausing() -> bool:
    """Whether an ``EngineCore`` called us because it pauses or goes to sleep."""
    return any(method == "_reset_caches" for method, _ in _calling_cores())


def _calling_cores() -> Iterator[tuple[str, Any]]:
    """The methods of an ``EngineCore`` among our callers, innermost first."""
    module, frame = sys.modules.get("vllm.v1.engine.core"), inspect.currentframe()
    while module is not None and frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, module.EngineCore):
            yield frame.f_code.co_name, found
        frame = frame.f_back


def owned(core: Any, plugins: str) -> bool:
    """Whether nothing but vLLM's own code, asked through calls, reaches the weights of ``core``'s
    workers: they are in processes of vLLM's own, and nobody asked for other code in there, such as
    ``plugins`` (as in a namespace)."""
    process = ("vllm.v1.engine.core", ("EngineCoreProc", "DPEngineCoreProc"))
    here = ("vllm.v1.executor.uniproc_executor", ("UniProcExecutor",))
    apart = ("vllm.v1.executor.multiproc_executor", ("MultiprocExecutor",))
    executor, parallel = core.model_executor, core.vllm_config.parallel_config
    in_own_processes = _is(executor, apart) or (_is(core, process) and _is(executor, here))
    worker = parallel.worker_cls
    path = worker if isinstance(worker, str) else worker.__module__
    asked_for = parallel.worker_extension_cls or plugins
    return in_own_processes and path.startswith("vllm.") and not asked_for


def _is(found: object, named: tuple[str, tuple[str, ...]]) -> bool:
    """Whether its class is exactly one of these of vLLM's."""
    module, names = named
    return type(found).__module__ == module and type(found).__qualname__ in names


def watch(executor: Any, noted: Callable[[str, bool], None]) -> None:
    """Have ``noted`` called before each call that may change weights, with the name of what is
    called, and whether that is code of others. It must not raise."""
    rpc = _weakly(executor.collective_rpc)

    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        known = type(method) is str and method in HARMLESS
        if not known and not _keeps_weights(method, *args, **kwargs):
            noted(_name(method), not isinstance(method, str) or method == "apply_model")
        call = rpc()
        assert call is not None, "its executor calls it"
        return call(method, *args, **kwargs)

    executor.collective_rpc = collective_rpc


def _weakly(call: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """``call``, and if it is a method not its object: a cycle would keep an executor's memory."""
    return weakref.WeakMethod(call) if inspect.ismethod(call) else lambda: call


def _keeps_weights(
    method: Any, timeout: object = None, args: Any = (), kwargs: Any = None, *_: Any, **__: Any
) -> bool:
    """Whether a call with the parameters of ``collective_rpc`` is one of ``KEEPING``."""
    return isinstance(method, str) and (args, kwargs or {}) in KEEPING.get(method, ())


def _name(method: Any) -> str:
    return method if isinstance(method, str) else getattr(method, "__qualname__", "a function")
