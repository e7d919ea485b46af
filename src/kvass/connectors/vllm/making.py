"""When vLLM began to make an engine: files that are older are those that the engine loads.

Without this a script that saves a model and then makes ``LLM(...)`` of it, in one process, would be
refused: the files are younger than its process.

A file of vLLM's version (see ``adapt.py``).

Laws of this file:

- The time of an engine is never later than the moment at which the first file of its weights is
  read. In a process that did not make the engine's configuration, and is no fork of one that did,
  it is the start of the process.
- Of a process's first engine, whose plug-ins vLLM loads, it is before any file is read. Of a later
  one, and in a process that was spawned, vLLM has read small files (a quantization's settings, a
  draft's configuration) some time before: a change of these in between is not noticed.
- It imports neither torch nor vllm, because the plug-in is loaded in each process.

Facts relied on:

- ``EngineArgs.__post_init__`` loads the plug-ins, once in a process, before anything is read. Where
  other code of vLLM loads them first, no ``EngineArgs`` is among the callers.
- ``EngineArgs.create_engine_config`` reads the model's configuration, then makes a ``VllmConfig``,
  whose constructor asks for the connector's class, unless ``disable_hybrid_kv_cache_manager`` is
  given. Weights are read after that, in this process, in a fork of it or in one that it spawns.
- All copies of a ``VllmConfig`` that a MultiConnector passes to its children have its
  ``model_config``.
"""

from __future__ import annotations

import weakref
from typing import Any

from kvass.connectors.vllm import borrowed
from kvass.engine import weights

_loaded: tuple[Any, int] | None = None
"""A weak reference to the ``EngineArgs`` that loaded the plug-ins in this process, or in the one
that it was forked from, and when."""
_made: list[tuple[Any, int]] = []
"""Weak references to the ``model_config`` of the engines that were made here, and when. A fork
inherits them, and a process that was spawned does not."""


def plugins_are_loaded() -> None:
    """Note the time, if vLLM loads its plug-ins to make an engine."""
    global _loaded
    arguments = borrowed.engine_args()
    if arguments is not None and _loaded is None:
        _loaded = weakref.ref(arguments), weights.now_ns()


def class_is_asked_for() -> None:
    """Note the time of the engine, if vLLM asks for the connector's class to make its
    configuration. For the engine that loaded the plug-ins it is the time of that."""
    arguments = borrowed.engine_args()
    config = borrowed.config_in_making()
    if arguments is None or config is None or _noted(config.model_config) is not None:
        return
    began_ns = weights.now_ns()
    if _loaded is not None and _loaded[0]() is arguments:
        began_ns = _loaded[1]
    _made[:] = [one for one in _made if one[0]() is not None]
    _made.append((weakref.ref(config.model_config), began_ns))


def since_ns(vllm_config: Any) -> int:
    """The time after which a file must not have changed to be what this engine loads, in
    nanoseconds since the epoch."""
    noted = _noted(vllm_config.model_config)
    if noted is not None:
        return noted
    return max(_loaded[1] if _loaded is not None else 0, weights.started_ns())


def _noted(model_config: Any) -> int | None:
    return next((began_ns for ref, began_ns in _made if ref() is model_config), None)
