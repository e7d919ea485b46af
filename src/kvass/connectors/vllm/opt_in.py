"""The variable ``KVASS`` of the environment, which switches kvass on without any flag.

``EngineArgs.create_engine_config``, which makes vLLM's configuration of its arguments, is replaced
(``borrowed.py``). It runs in the process that parses the arguments; all other processes get the
result.

Laws of this file:

- Without the variable nothing of vLLM is changed. With it the arguments that the operator gave are
  not changed: an engine that has a connector already keeps it.
- An engine that vLLM makes without a connector, and refuses with one, is made without. What vLLM
  refuses is found by making the configuration; what it refuses later is in ``_refused_later``.
- If the function is not as ``contract.TABLE`` says, it is not wrapped.
- The file imports neither torch nor vllm at its top, because the plug-in is loaded in each process.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from logging import DEBUG, INFO, WARNING
from typing import Any, Final

from kvass.connectors.vllm import borrowed
from kvass.connectors.vllm.logs import log_as_vllm
from kvass.engine.boundary import log
from kvass.errors import ConfigError

VARIABLE: Final = "KVASS"
_ALLOCATORS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def wanted() -> bool:
    """Whether the variable is set, and not to 0."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


REFUSALS: Final = (AssertionError, NotImplementedError, ValueError)
"""What vLLM raises for settings that it refuses. Other errors, as of a network, have nothing to do
with the connector."""


def wrap() -> None:
    """Wrap the function in this process, unless it is wrapped already."""
    if differs := borrowed.replace_create_engine_config(_make):
        log_as_vllm()
        log.error("%s has no effect: in this vLLM %s: use --kv-transfer-config", VARIABLE, differs)


def _make(arguments: Any, make: Callable[[], Any]) -> Any:
    """vLLM's configuration of ``EngineArgs``, which ``make`` makes, with the connector if vLLM and
    kvass can do with it; a line in the log says so or why not. Raises ``ConfigError`` for a value
    that is neither a path nor 0 or 1, and what ``make`` raises without the connector."""
    if not wanted() or hasattr(arguments, "kvass"):  # a second call on the same arguments
        return make()
    arguments.kvass = True
    value = os.environ[VARIABLE]
    if value != "1" and "/" not in value:
        raise ConfigError(
            f"{VARIABLE}={value!r}: write the path of the daemon's socket, 1 for the default "
            "socket, or 0 for off"
        )
    log_as_vllm()
    first = multiprocessing.parent_process() is None  # one of several API servers need not say it
    level = INFO if first else DEBUG
    given = arguments.kv_transfer_config  # options of kvass in the dotted form, or None
    if not (reason := _reason_to_skip(arguments)):
        transfer = _transfer_config(given, value)
        arguments.kv_transfer_config = transfer
        try:
            config = make()
            reason = _refused_later(config)
        except REFUSALS as error:  # perhaps because of the connector
            reason = _text(error)
        if not reason:
            log.log(
                level,
                "%s=%s: this engine uses kvass: kv_connector KvassConnector, kv_role %s, socket %s",
                *(VARIABLE, value, transfer.kv_role),
                transfer.kv_connector_extra_config.get("kvass.socket")
                or "of KVASS_SOCKET, else the default",
            )
            return config
        arguments.kv_transfer_config = given
    config = make()
    level = WARNING if first else DEBUG
    log.log(level, "%s=%s has no effect: %s", VARIABLE, value, reason)
    return config


def _transfer_config(given: Any, value: str) -> Any:
    """vLLM's ``KVTransferConfig`` with the connector, and with the options that are ``given``."""
    from vllm.config import KVTransferConfig

    extra = dict(given.kv_connector_extra_config) if given is not None else {}
    if value != "1":
        extra["kvass.socket"] = os.path.abspath(value)
    return KVTransferConfig(
        kv_connector="KvassConnector",
        kv_role=(given and given.kv_role) or "kv_both",
        kv_connector_extra_config=extra,
    )


def _text(error: Exception) -> str:
    """What an error of vLLM says, without the arguments that pydantic adds to it."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(str(one["msg"]) for one in error.errors())
    return f"{type(error).__name__}: {error}"


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


def _refused_later(config: Any) -> str:
    """Why an engine of vLLM's configuration ``config`` would not start with the connector: vLLM
    refuses it, or kvass does; empty if it starts. Also why kvass would be off in it."""
    model, cache = config.model_config, config.cache_config
    if model.is_encoder_decoder:
        return "vLLM has no connectors for encoder-decoder models"
    if str(model.architecture).startswith("Step5"):
        return "vLLM refuses all connectors but two for Step5, which has more than KV to keep"
    if config.parallel_config.prefill_context_parallel_size > 1:
        return "prefill context parallelism is not supported"
    if cache.prefix_match_unit is not None and not cache.enable_prefix_caching:
        return "--prefix-match-unit is given without prefix caching: vLLM may refuse a connector"
    if is_seeded_at_random(cache.prefix_caching_hash_algo):
        return (
            f"prefix-caching hash algorithm {cache.prefix_caching_hash_algo} is seeded at random: "
            "set PYTHONHASHSEED to the same number for all engines, or use sha256"
        )
    return ""


def is_seeded_at_random(algorithm: str) -> bool:
    """Whether each process has hashes of its own with this algorithm of vLLM."""
    return "xxhash" in algorithm and "PYTHONHASHSEED" not in os.environ
