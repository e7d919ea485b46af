"""A connector of vLLM whose loads take no time, for ``bench.waves``: none needs fewer steps.

It copies nothing, so its tokens are wrong. Of each prompt all whole blocks but the last token are
loaded. ``kv_connector_extra_config``: with ``inside`` loads end inside the step that begins them,
else with that step's result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from tests.support.vllm.other_connector import OtherConnector


@dataclass
class _Loads(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is untyped
    """The requests whose asynchronous load begins with a step."""

    names: set[str] = field(default_factory=set)


class InstantConnector(OtherConnector):
    """See the module."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._inside = bool(extra.get("inside"))
        self._block = vllm_config.cache_config.block_size
        self._loads = _Loads()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = (request.num_tokens - 1) // self._block * self._block - num_computed_tokens
        if request.request_id in self._known or tokens <= 0:
            return 0, False
        return tokens, not self._inside

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and not self._inside:
            self._loads.names.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, _Loads()
        return loads

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._known.discard(request.request_id)
        return False, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        loads = self._get_connector_metadata()
        return None, set(loads.names)
