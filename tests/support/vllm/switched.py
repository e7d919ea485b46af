"""kvass's connector with a switch: what it costs, measured within one engine.

Two engine processes differ by some percent whatever they run. So one engine takes requests with
kvass and requests without in turns: of a request with ``OFF`` in its ``kv_transfer_params``, and of
all steps up to the next request, no hook reaches kvass. Requests that run together are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvass.connectors.vllm.adapt import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    StepMetadata,
)
from kvass.connectors.vllm.connector import Connector
from kvass.connectors.vllm.shadow_connector import ShadowConnector
from tests.support.vllm.process import OFF

_off = False  # of this process, which has both halves of the connector


def _nothing(*_: Any, **__: Any) -> None:
    return None


NEUTRAL: Final[dict[str, Callable[..., Any]]] = {
    "get_num_new_matched_tokens": lambda *_: (0, False),
    "update_state_after_alloc": _nothing,
    "build_connector_meta": lambda *_: StepMetadata(),
    "update_connector_output": _nothing,
    "request_finished_all_groups": lambda *_: (False, None),
    "has_pending_block_frees": lambda *_: False,
    "has_pending_push_work": lambda *_: False,
    "take_events": lambda *_: [],
    "get_kv_connector_stats": _nothing,
    "handle_preemptions": _nothing,
    "wait_for_layer_load": _nothing,
    "save_kv_layer": _nothing,
    "wait_for_save": _nothing,
    "get_transfer_results": lambda *_: KVConnectorTransferResults(
        finished_recving=set(), failed_recving=set()
    ),
    "get_block_ids_with_load_errors": lambda *_: set(),
    "build_connector_worker_meta": _nothing,
}
"""What a connector answers that does nothing."""


def _switched(base: type[Connector], name: str) -> Callable[..., Any]:
    hook, neutral = getattr(base, name), NEUTRAL[name]

    def switched(self: Connector, *args: Any, **kwargs: Any) -> Any:
        return neutral(*args, **kwargs) if _off else hook(self, *args, **kwargs)

    return switched


def switched(base: type[Connector]) -> type[Connector]:
    """``base``, or a connector that does nothing."""

    class Switched(base):  # type: ignore[misc, valid-type]
        def on_new_request(self, request: Any) -> None:
            global _off
            _off = OFF in (request.kv_transfer_params or {})
            if not _off:
                super().on_new_request(request)

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            if _off:
                KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
            else:
                super().bind_connector_metadata(connector_metadata)

    for name in NEUTRAL:
        setattr(Switched, name, _switched(base, name))
    return Switched


SwitchedConnector = switched(Connector)
SwitchedShadow = switched(ShadowConnector)
"""For an engine with the option ``kvass.shadow``."""
