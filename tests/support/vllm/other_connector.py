"""A connector beside ours in a ``MultiConnector``: it loads some prompts, and tells no worker."""

from __future__ import annotations

import zlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

BLOCK = 16


class OtherConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped
    """Half of every second prompt is to be loaded, unless its request had blocks before: when a
    load has failed, vLLM counts the blocks of a second one twice, and may wait for them forever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        name = request.request_id
        tokens = request.num_tokens // 2 // BLOCK * BLOCK - num_computed_tokens
        if name in self._known or zlib.crc32(name.encode()) % 2 or tokens <= 0:
            return 0, False
        return tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._known.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...
