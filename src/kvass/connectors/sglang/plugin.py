"""The plug-in of SGLang: the environment variable ``KVASS`` makes kvass the storage backend of an
engine that has ``--enable-hierarchical-cache``. ``pyproject.toml`` declares it.

Laws of this file:

- SGLang runs the plug-in in each of its processes, also if the engine does not use kvass. So
  ``register`` imports neither torch nor the backend. Without the variable it changes nothing.
- What the operator gave is not changed: an engine that has a storage backend keeps it.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from kvass.engine.boundary import Boundary, log

VARIABLE: Final = "KVASS"
HOOKED: Final = "sglang.srt.server_args.ServerArgs.resolve_once"
PACKAGE: Final = "kvass.connectors.sglang"


def register() -> None:
    """Have SGLang call ``configure`` before it resolves its arguments, if the variable is set."""
    if os.environ.get(VARIABLE, "") in ("", "0"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOOKED, configure, HookType.BEFORE)


def configure(arguments: Any, *_: object, **__: object) -> None:
    """Name kvass as the storage backend in SGLang's ``ServerArgs``, or log why not. Each process of
    the engine calls it with the same arguments; only the first one changes them."""
    Boundary().run(None, _configure, arguments)


def _configure(arguments: Any) -> None:
    value = os.environ.get(VARIABLE, "")
    if value != "1" and "/" not in value:
        log.error(
            "%s=%r has no effect: write the path of the daemon's socket, or 1", VARIABLE, value
        )
    elif not arguments.enable_hierarchical_cache:
        log.warning("%s=%s has no effect: add --enable-hierarchical-cache", VARIABLE, value)
    elif arguments.hicache_storage_backend not in (None, "dynamic"):
        log.warning("%s=%s has no effect: --hicache-storage-backend is given", VARIABLE, value)
    else:
        _name_backend(arguments, "" if value == "1" else os.path.abspath(value))


def _name_backend(arguments: Any, socket: str) -> None:
    given = arguments.hicache_storage_backend_extra_config or "{}"
    if given.startswith("@"):
        log.warning("%s has no effect: the extra config is a file: name kvass there", VARIABLE)
        return
    try:
        extra = json.loads(given)
    except ValueError:
        return  # SGLang refuses it with a message of its own.
    if extra.get("module_path", PACKAGE) != PACKAGE:
        log.warning("%s has no effect: another backend is in the extra config", VARIABLE)
        return
    chosen = backend_config() | ({"kvass.socket": socket} if socket else {})
    if chosen | extra == extra and arguments.hicache_storage_backend == "dynamic":
        return  # It was named before. SGLang may have sealed the arguments since.
    arguments.hicache_storage_backend = "dynamic"
    arguments.hicache_storage_backend_extra_config = json.dumps(chosen | extra)
    log.info("%s=%s: HiCache stores its pages in kvass", VARIABLE, os.environ[VARIABLE])


def backend_config() -> dict[str, Any]:
    """The keys of the extra config that make SGLang load the backend."""
    return {
        "backend_name": "kvass",
        "module_path": PACKAGE,
        "class_name": "KvassStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
    }
