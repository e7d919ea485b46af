"""The detection of calls to vLLM's workers that may replace weights.

A file of vLLM's version (see ``adapt.py``).

Law of this file: a call that is not known to be harmless counts as a change of weights. It is
reported before it runs.

Facts relied on:

- From the constructor of the scheduler on, every call of vLLM to its workers goes through the
  executor's ``collective_rpc``.
- An ``EngineCoreProc`` is the main object of a process that vLLM started. So is each worker of a
  ``MultiprocExecutor``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from kvass.connectors.vllm import borrowed

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
"""Methods of vLLM's workers that do not change the model's weights in any tested version. Methods
that load an adapter are among them, because kvass tells adapters apart (``lora.py``). Methods that
vLLM calls only before it has a scheduler are not listed."""

HARMLESS_WITH: Final[dict[str, tuple[object, ...]]] = {
    "sleep": (((), {"level": 1}), ((1,), {})),
    "discard": (((("kv_cache",),), {}),),
}
"""Methods that are harmless with these positional and keyword arguments only. A sleep of level 1
keeps the weights in host memory until the engine wakes up; other levels drop them."""


def only_vllm_reaches_weights(core: Any, plugins: str) -> bool:
    """Whether only vLLM's own code can change the weights of ``core``'s workers.

    That is so if the workers run in processes that vLLM started, and if no option loads other code
    in them. ``plugins`` is the namespace's field of that name; "" if there are no plug-ins.
    """
    process = ("vllm.v1.engine.core", ("EngineCoreProc", "DPEngineCoreProc"))
    here = ("vllm.v1.executor.uniproc_executor", ("UniProcExecutor",))
    apart = ("vllm.v1.executor.multiproc_executor", ("MultiprocExecutor",))
    executor, parallel = core.model_executor, core.vllm_config.parallel_config
    own_core = _has_class(core, process) and _has_class(executor, here)
    in_own_processes = _has_class(executor, apart) or own_core
    worker = parallel.worker_cls
    path = worker if isinstance(worker, str) else worker.__module__
    foreign_code = parallel.worker_extension_cls or plugins
    return in_own_processes and path.startswith("vllm.") and not foreign_code


def _has_class(value: object, classes: tuple[str, tuple[str, ...]]) -> bool:
    """Whether the class of ``value`` is one of ``classes`` (a module and names), not a subclass."""
    module, names = classes
    return type(value).__module__ == module and type(value).__qualname__ in names


def watch(executor: Any, on_change: Callable[[str, bool], None]) -> None:
    """Call ``on_change`` before each call of the executor that may change weights.

    Its arguments are the name of the called method, and whether that runs code that is not vLLM's.
    It must not raise.
    """

    def before(method: Any, *args: Any, **kwargs: Any) -> None:
        known = type(method) is str and method in HARMLESS
        if not known and not _keeps_weights(method, *args, **kwargs):
            on_change(_name(method), not isinstance(method, str) or method == "apply_model")

    borrowed.call_before_rpcs(executor, before)


def _keeps_weights(
    method: Any, timeout: object = None, args: Any = (), kwargs: Any = None, *_: Any, **__: Any
) -> bool:
    """Whether a call of ``collective_rpc`` with these parameters is in ``HARMLESS_WITH``."""
    return isinstance(method, str) and (args, kwargs or {}) in HARMLESS_WITH.get(method, ())


def _name(method: Any) -> str:
    return method if isinstance(method, str) else getattr(method, "__qualname__", "a function")
