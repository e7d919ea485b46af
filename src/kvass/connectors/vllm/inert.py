"""The class that vLLM gets where nothing of the connector may run.

Laws of this file:

- Of vLLM it uses the base classes of connectors alone, wherever they are, and of kvass nothing that
  imports vLLM.
- Its hooks take any arguments and answer as if nothing were ever cached. A hook that is not here is
  vLLM's own, or, where vLLM has none (it is abstract), answers None.
"""

from __future__ import annotations

import abc
from importlib import import_module
from typing import Any, ClassVar, Final

from kvass.connectors.vllm.logs import log_as_vllm
from kvass.engine.boundary import log_off

WHERE: Final = tuple(
    f"vllm.distributed.kv_transfer.kv_connector.{name}" for name in ("v1.base", "v1", "base")
)


def _find(name: str) -> Any:
    for module in WHERE:
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


class NoWork(METADATA):
    """Scheduler to workers: nothing. vLLM's transport pickles it."""


class Off(BASE, HYBRID):
    """``reason``: why nothing of the connector runs."""

    reason: ClassVar[str]
    requires_kv_delivery = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Log the reason: an error for the engine, a warning for its first worker."""
        super().__init__(*args, **kwargs)
        log_as_vllm()
        given = [*args, *kwargs.values()]
        scheduler = any(getattr(one, "name", "") == "SCHEDULER" for one in given)
        ranks = [one.parallel_config.rank for one in given if hasattr(one, "parallel_config")]
        if scheduler or ranks in ([], [0]):
            log_off(self.reason, scheduler)

    def get_num_new_matched_tokens(self, *_: Any, **__: Any) -> tuple[int, bool]:
        """Nothing is cached."""
        return 0, False

    def build_connector_meta(self, *_: Any, **__: Any) -> NoWork:
        """Nothing to do."""
        return NoWork()

    def request_finished(self, *_: Any, **__: Any) -> tuple[bool, None]:
        """Its blocks may be freed."""
        return False, None

    def request_finished_all_groups(self, *_: Any, **__: Any) -> tuple[bool, None]:
        """Its blocks may be freed."""
        return False, None


def _nothing(*_: Any, **__: Any) -> None:
    return None


for _class in (NoWork, Off):
    for _name in getattr(_class, "__abstractmethods__", ()):
        setattr(_class, _name, _nothing)
    abc.update_abstractmethods(_class)


def connector_off(reason: str) -> type:
    """A ``KvassConnector`` that does nothing, because of ``reason``."""
    return type("KvassConnector", (Off,), {"reason": reason})
