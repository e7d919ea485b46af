"""The inert connector: the class that vLLM gets if it cannot run ``KvassConnector``.

Laws of this file:

- It uses only the base classes of vLLM's connectors, which it looks for in several modules. It
  imports nothing of kvass that imports vLLM.
- Its hooks take any arguments and answer as if nothing were ever cached. Hooks that this file does
  not define are inherited from vLLM's base class. Those that are abstract there return None.
"""

from __future__ import annotations

import abc
from importlib import import_module
from typing import Any, ClassVar, Final

from kvass.connectors.vllm.logs import log_as_vllm
from kvass.engine.boundary import log_off

BASE_MODULES: Final = tuple(
    f"vllm.distributed.kv_transfer.kv_connector.{name}" for name in ("v1.base", "v1", "base")
)


def _find(name: str) -> Any:
    """vLLM's class ``name``, or ``object`` if this version has none."""
    for module in BASE_MODULES:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            pass
    return object


BASE: Any = _find("KVConnectorBase_V1")
HYBRID: Any = _find("SupportsHMA")
METADATA: Any = _find("KVConnectorMetadata")
if BASE is object:
    raise ImportError("this vLLM has no KVConnectorBase_V1: kvass cannot even be off in it")


class EmptyMetadata(METADATA):
    """The metadata of a step: the scheduler sends no work to the workers. vLLM pickles it."""


class InertConnector(BASE, HYBRID):
    """A connector that never loads or stores. ``reason`` says why."""

    reason: ClassVar[str]
    requires_kv_delivery = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Log the reason: an error in the scheduler, a warning in the first worker."""
        super().__init__(*args, **kwargs)
        log_as_vllm()
        values = [*args, *kwargs.values()]
        scheduler = any(getattr(value, "name", "") == "SCHEDULER" for value in values)
        ranks = [v.parallel_config.rank for v in values if hasattr(v, "parallel_config")]
        if scheduler or ranks in ([], [0]):
            log_off(self.reason, scheduler)

    def get_num_new_matched_tokens(self, *_: Any, **__: Any) -> tuple[int, bool]:
        """Nothing is cached."""
        return 0, False

    def build_connector_meta(self, *_: Any, **__: Any) -> EmptyMetadata:
        """Nothing to do."""
        return EmptyMetadata()

    def request_finished(self, *_: Any, **__: Any) -> tuple[bool, None]:
        """vLLM may free the request's blocks."""
        return False, None

    def request_finished_all_groups(self, *_: Any, **__: Any) -> tuple[bool, None]:
        """vLLM may free the request's blocks."""
        return False, None


def _nothing(*_: Any, **__: Any) -> None:
    return None


for _class in (EmptyMetadata, InertConnector):
    for _name in getattr(_class, "__abstractmethods__", ()):
        setattr(_class, _name, _nothing)
    abc.update_abstractmethods(_class)


def inert_connector(reason: str) -> type:
    """A class ``KvassConnector`` that is inert because of ``reason``."""
    return type("KvassConnector", (InertConnector,), {"reason": reason})
