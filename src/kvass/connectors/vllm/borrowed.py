"""What kvass takes from vLLM where vLLM has no hook: objects that it finds among its callers, and
methods of vLLM's objects that it replaces.

A file of vLLM's version (see ``adapt.py``).

Laws of this file:

- No other file of this package looks at its callers or replaces a method of vLLM.
- Each function says why no hook serves (``No hook``), what of ``contract.TABLE`` it relies on
  (``Contract``), and what happens where it finds nothing or is not called (``Without``).
- Arguments, results and exceptions of a replaced method pass through, except where the function
  says otherwise.
- It imports neither torch nor vllm, because the plug-in is loaded in each process.

Facts relied on:

- The constructor of ``EngineCore`` makes the executor, then the scheduler. The scheduler's
  constructor makes the scheduler's connector.
- A method of the worker makes the worker's connector, after the worker has loaded the model.
- The constructor of a ``VllmConfig`` asks for the connector's class.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from kvass.connectors.vllm.contract import terms

# ---------------------------------------------------------------- found among the callers


def engine_core() -> Any:
    """The ``EngineCore`` whose constructor called us after it made the executor, or None.

    No hook: a connector gets the engine's configuration, and not the engine.
    Contract: ``EngineCore.model_executor``.
    Without: an engine makes no steps of its own for its last stores, a reset of its cache fails
    while they are copied, and each reset counts as a change of the weights.
    """
    cores = (core for _, core in _callers(*_CORE) if hasattr(core, "model_executor"))
    return next(cores, None)


def scheduler() -> Any:
    """The ``Scheduler`` whose constructor binds its connector to the cache manager, or None.

    No hook: a connector gets the cache manager, and not the scheduler.
    Contract: ``Scheduler.requests``.
    Without: all loads are asynchronous.
    """
    return next((found for _, found in _callers("vllm.v1.core.sched.scheduler", "Scheduler")), None)


def in_process_client() -> Any:
    """The ``InprocClient`` whose constructor makes the calling engine core, or None.

    No hook: a connector is not told who drives the engine.
    Contract: ``InprocClient``.
    Without: what the last requests of an engine in its user's process left is not stored.
    """
    clients = (client for _, client in _callers("vllm.v1.engine.core_client", "InprocClient"))
    return next(clients, None)


def is_pausing() -> bool:
    """Whether this call comes from an ``EngineCore`` that pauses or goes to sleep.

    No hook: ``reset_cache`` does not say who asks for the reset.
    Contract: ``EngineCore._reset_caches``, which nothing but a pause and a sleep calls.
    Without: each pause clears the engine's namespace.
    """
    return any(method == "_reset_caches" for method, _ in _callers(*_CORE))


def engine_args() -> Any:
    """The ``EngineArgs`` that load the plug-ins or make an engine's configuration, or None.

    No hook: vLLM does not say when it begins to make an engine.
    Contract: ``EngineArgs.create_engine_config``.
    Without: an engine counts as made when its process began. If its model was saved in that
    process, it runs uncached.
    """
    return next((found for _, found in _callers("vllm.engine.arg_utils", "EngineArgs")), None)


def config_in_making() -> Any:
    """The ``VllmConfig`` whose constructor asks for the connector's class, or None.

    No hook: the class is asked for without the configuration.
    Contract: ``VllmConfig.model_config``.
    Without: an engine counts as made when its process began. If its model was saved in that
    process, it runs uncached.
    """
    return next((found for _, found in _callers("vllm.config.vllm", "VllmConfig")), None)


def transfer_configs(vllm_config: Any) -> list[Any]:
    """This connector's ``KVTransferConfig`` and those of the connectors around it.

    No hook: a MultiConnector passes a copy of the engine's configuration to its children, and
    nothing else refers to the original.
    Contract: ``VllmConfig.kv_transfer_config``.
    Without: inside a MultiConnector the policy for failed loads stays as it is. It may be ``fail``,
    and then a failed load ends its request.
    """
    found = [vllm_config.kv_transfer_config]
    for _, config in _locals("vllm_config"):
        outer = getattr(config, "kv_transfer_config", None)
        if outer is not None and not any(outer is known for known in found):
            found.append(outer)
    return found


def lora_runner() -> Any:
    """The worker's model runner if it has adapters, or None. Call it while the worker makes its
    connector.

    No hook: a connector gets requests' adapter ids, and not the adapters that the worker holds.
    Contract: ``WorkerLoRAManager._adapter_manager``.
    Without: adapters run uncached.
    """
    for _, worker in _locals("self"):
        runner = getattr(worker, "model_runner", None)
        if hasattr(getattr(runner, "lora_manager", None), "_adapter_manager"):
            return runner
    return None


def model() -> Any:
    """The model of this worker, or None. Call it while the worker registers its KV caches.

    No hook: a connector gets the pages of the layers, and not their modules.
    Contract: none; blend is for one version of vLLM.
    Without: an engine with blend does not start.
    """
    for _, worker in _locals("self"):
        if (get_model := getattr(worker, "get_model", None)) is not None:
            return get_model()
    return None


_CORE: Final = "vllm.v1.engine.core", "EngineCore"


def _callers(module: str, name: str) -> Iterator[tuple[str, Any]]:
    """The methods of objects of class ``module.name`` among our callers, innermost first: name and
    object."""
    kind = getattr(sys.modules.get(module), name, None)
    if kind is not None:
        yield from ((m, found) for m, found in _locals("self") if issubclass(type(found), kind))


def _locals(variable: str) -> Iterator[tuple[str, Any]]:
    """The functions among our callers, innermost first, and what their ``variable`` is, or None."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_code.co_name, frame.f_locals.get(variable)
        frame = frame.f_back


# ---------------------------------------------------------------- replaced


def replace_create_engine_config(make: Callable[[Any, Callable[[], Any]], Any]) -> str:
    """Have vLLM make its configuration with ``make(arguments, original)``, in this process. It may
    return and raise what it wants. Returns what differs from the contract; then nothing is
    replaced.

    No hook: a plug-in cannot change the arguments of an engine.
    Contract: ``EngineArgs.create_engine_config``, with its parameters.
    Without: the variable ``KVASS`` has no effect.
    """
    from vllm.engine.arg_utils import EngineArgs

    made: Any = getattr(EngineArgs, "create_engine_config", None)
    if hasattr(made, "kvass"):
        return ""
    (term,) = (term for term in terms() if term.name == "EngineArgs.create_engine_config")
    if (found := _parameters(made)) != term.rest:
        return f"{term.text} is {found or 'not there'}"

    @functools.wraps(made)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        return make(self, partial(made, self, *args, **kwargs))

    create_engine_config.kvass = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config
    return ""


def _parameters(function: Any) -> str:
    """The parameters of ``function`` as the contract writes them; empty if it has none."""
    function = getattr(function, "__func__", function)
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    bare = [one.replace(annotation=one.empty) for one in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def call_before_rpcs(executor: Any, before: Callable[..., None]) -> None:
    """Call ``before`` with the arguments of each ``collective_rpc`` of the executor, before it
    runs. ``before`` must not raise.

    No hook: vLLM does not tell a connector that a call may replace the weights.
    Contract: ``Executor.collective_rpc``.
    Without: each reset of the cache counts as a change of the weights.
    """
    rpc = weak_reference(executor.collective_rpc)

    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        before(method, *args, **kwargs)
        call = rpc()
        assert call is not None, "the executor is alive while it makes a call"
        return call(method, *args, **kwargs)

    executor.collective_rpc = collective_rpc


def call_before_shutdown(executor: Any, before: Callable[[], None]) -> None:
    """Call ``before`` before the executor is shut down. It must not raise.

    No hook: vLLM ends its workers before it calls the connector's ``shutdown``.
    Contract: ``Executor.shutdown``.
    Without: what is not stored yet at a shutdown is not stored.
    """
    if hasattr(executor, "__del__"):  # no weak reference to it lives there
        return
    original = weak_reference(executor.shutdown)

    def shutdown() -> None:
        before()
        if (call := original()) is not None:
            call()

    executor.shutdown = shutdown


def ask_for_steps(client: Any, wanted: Callable[[], bool]) -> None:
    """Have who drives an engine in its user's process make steps while ``wanted()`` is true.

    No hook: ``has_pending_push_work`` is not asked there once the last request has ended.
    Contract: ``InprocClient.dp_engines_running``, which gives a constant there.
    Without: such an engine stores what its last requests left only at its end.
    """
    client.dp_engines_running = wanted


def replace_reset(pool: Any, attempt: Callable[[], bool]) -> Callable[[], bool]:
    """Have vLLM reset its prefix cache with ``attempt()``; the original.

    No hook: a connector is told of a reset only on request, and not before it.
    Contract: ``BlockPool.reset_prefix_cache``.
    Without: a reset fails while blocks are being stored.
    """
    original: Callable[[], bool] = pool.reset_prefix_cache
    pool.reset_prefix_cache = attempt
    return original


def replace_handle_invalid_blocks(scheduler: Any, take_back: Callable[[set[int]], None]) -> bool:
    """Have the scheduler call ``take_back(blocks)`` for blocks that were not loaded, and nothing
    else, before it looks at the step's output. Returns whether it does.

    No hook: a connector hears of the workers' reports after the step's output was taken.
    Contract: ``Scheduler._handle_invalid_blocks``, with its parameters.
    Without: all loads are asynchronous.
    """
    original: Any = getattr(scheduler, "_handle_invalid_blocks", None)
    (term,) = (term for term in terms() if term.name == "Scheduler._handle_invalid_blocks")
    if not scheduler.recompute_kv_load_failures or _parameters(original) != term.rest:
        return False

    def handle(blocks: set[int], tokens: dict[str, int]) -> set[str]:
        take_back(blocks)
        return set()

    scheduler._handle_invalid_blocks = handle
    return True


def replace_load_adapter(manager: Any, load: Callable[[Callable[[Any], Any], Any], Any]) -> None:
    """Have the worker read an adapter with ``load(original, request)``.

    No hook: vLLM does not tell a connector when it reads an adapter's files.
    Contract: ``WorkerLoRAManager._load_adapter``.
    Without: requests of adapters are stored but match nothing.
    """
    manager._load_adapter = partial(load, manager._load_adapter)


def replace_cache_blocks(coordinator: Any, cache: Callable[..., None]) -> None:
    """Have vLLM name the blocks of a request with ``cache(original, request, tokens)``.

    No hook: a connector cannot keep computed blocks out of the engine's own cache.
    Contract: none; blend is for one version of vLLM.
    Without: vLLM caches and announces approximate KV of blend as exact.
    """
    coordinator.cache_blocks = partial(cache, coordinator.cache_blocks)


def weak_reference(call: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    """A function that returns ``call``. It holds no reference to the object of a bound method,
    because a reference cycle would keep the executor's memory."""
    return weakref.WeakMethod(call) if inspect.ismethod(call) else lambda: call
