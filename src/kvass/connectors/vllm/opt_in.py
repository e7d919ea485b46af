"""The variable ``KVASS`` of the environment, which switches kvass on without any flag.

vLLM has no hook for this. So ``EngineArgs.create_engine_config`` is wrapped, which makes vLLM's
configuration of its arguments. It runs in the process that parses the arguments; all other
processes get the result.

Laws of this file:

- Without the variable nothing of vLLM is changed. With it the arguments that the operator gave are
  not changed: an engine that has a connector already keeps it.
- If the function is not as ``contract.TABLE`` says, it is not wrapped.
- The file imports neither torch nor vllm at its top, because the plug-in is loaded in each process.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
from collections.abc import Mapping
from logging import DEBUG, INFO
from typing import Any, Final

from kvass.connectors.vllm.contract import terms
from kvass.connectors.vllm.logs import log_as_vllm
from kvass.engine.boundary import log
from kvass.errors import ConfigError

VARIABLE: Final = "KVASS"
_FUNCTION: Final = "EngineArgs.create_engine_config"
_ALLOCATORS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def wanted() -> bool:
    """Whether the variable is set, and not to 0."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def wrap() -> None:
    """Wrap the function in this process, unless it is wrapped already."""
    from vllm.engine.arg_utils import EngineArgs

    made: Any = getattr(EngineArgs, "create_engine_config", None)
    if hasattr(made, "kvass"):
        return
    (term,) = (term for term in terms() if term.name == _FUNCTION)
    if (there := _parameters(made)) != term.rest:
        log_as_vllm()
        log.error(
            "%s has no effect: in this vLLM %s%s is %s: use --kv-transfer-config",
            *(VARIABLE, _FUNCTION, term.rest, there or "not there"),
        )
        return

    @functools.wraps(made)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        _configure(self)
        return made(self, *args, **kwargs)

    create_engine_config.kvass = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def _parameters(function: Any) -> str:
    """The parameters of ``function`` as the contract writes them; empty if it has none."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    bare = [one.replace(annotation=one.empty) for one in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def _configure(arguments: Any) -> None:
    """Add the connector to vLLM's ``EngineArgs``, or log why not. Raises ``ConfigError`` for a
    value that is neither a path nor 0 or 1."""
    if not wanted() or hasattr(arguments, "kvass"):  # a second call on the same arguments
        return
    arguments.kvass = True
    value = os.environ[VARIABLE]
    if value != "1" and "/" not in value:
        raise ConfigError(
            f"{VARIABLE}={value!r}: write the path of the daemon's socket, 1 for the default "
            "socket, or 0 for off"
        )
    log_as_vllm()
    first = multiprocessing.parent_process() is None  # one of several API servers need not say it
    if reason := _reason_to_skip(arguments):
        log.log(INFO if first else DEBUG, "%s=%s has no effect: %s", VARIABLE, value, reason)
        return
    from vllm.config import KVTransferConfig

    given = arguments.kv_transfer_config  # options of kvass in the dotted form, or None
    extra = dict(given.kv_connector_extra_config) if given is not None else {}
    if value != "1":
        extra["kvass.socket"] = os.path.abspath(value)
    arguments.kv_transfer_config = KVTransferConfig(
        kv_connector="KvassConnector",
        kv_role=(given and given.kv_role) or "kv_both",
        kv_connector_extra_config=extra,
    )
    log.log(
        INFO if first else DEBUG,
        "%s=%s: this engine uses kvass: kv_connector KvassConnector, kv_role %s, socket %s",
        *(VARIABLE, value, arguments.kv_transfer_config.kv_role),
        extra.get("kvass.socket") or "of KVASS_SOCKET, else the default",
    )


def _reason_to_skip(arguments: Any) -> str:
    """Why these arguments get no connector; empty if they get it."""
    given = arguments.kv_transfer_config
    if isinstance(given, Mapping) or getattr(given, "kv_connector", None) is not None:
        return "--kv-transfer-config names a connector"
    if arguments.kv_offloading_size is not None:
        return "--kv-offloading-size is given, which is another connector"
    for name in _ALLOCATORS:
        if "expandable_segments:True" in os.environ.get(name, ""):
            return f"{name} has expandable_segments:True, with which vLLM refuses every connector"
    return ""
