"""vLLM's KV events for rows of kvass. A file of vLLM's version (see ``adapt.py``).

A row is announced with the events that vLLM publishes for its own blocks. Such an event names the
blocks in the row, with vLLM's hashes and block size, so a router needs one index for all media.

Facts relied on:

- An event is a ``msgspec.Struct``. Later versions of vLLM add only fields with defaults.
- vLLM publishes a hash in the form that ``maybe_convert_block_hash`` returns.
- ``AllBlocksCleared`` names no medium. So kvass does not use it: a router would also drop the
  engine's own blocks.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from kvass.connectors.vllm.configuration import VllmSetup
from kvass.engine.protocols import Request

MEDIUM: Final = "CPU"
TIER_MEDIUM: Final = "STORAGE"


class Kept(NamedTuple):
    """What is kept of an announced row: the hashes of its blocks, concatenated, and the event as it
    was encoded. ``event`` is empty unless rows in tiers are announced."""

    hashes: bytes
    event: bytes


def event_maker(vllm_config: Any, kv_cache_config: Any, setup: VllmSetup) -> VllmEvents | None:
    """The object that makes this engine's events, or None if the engine publishes no events."""
    wanted = vllm_config.kv_events_config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return VllmEvents(specs, setup, getattr(vllm_config, "num_hash_lookahead_tokens", 0))


class VllmEvents:
    """The ``kvass.engine.row_events.EventMaker`` of vLLM.

    ``specs``: the cache spec of each KV cache group. ``lookahead``: the number of tokens after a
    block that its hash also covers.
    """

    def __init__(self, specs: list[Any], setup: VllmSetup, lookahead: int) -> None:
        from vllm.distributed import kv_events
        from vllm.v1 import kv_cache_interface as interface
        from vllm.v1.core import kv_cache_utils

        self._events, self._utils, self._setup = kv_events, kv_cache_utils, setup
        self._lookahead = lookahead
        self._decoder = msgspec.msgpack.Decoder(kv_events.BlockStored)
        self._kinds = [
            {
                "kv_cache_spec_kind": interface.get_kv_cache_spec_kind(spec).value,
                "kv_cache_spec_sliding_window": interface.get_kv_cache_spec_sliding_window(spec),
            }
            for spec in specs
        ]
        self._width = 32

    def stored(self, request: Request, group: int, chunk: int) -> tuple[Any, Kept]:
        """The event that a row was stored, and what the events to come need of it."""
        vllm_request, layout = request.vllm, self._setup.groups[group]  # type: ignore[attr-defined]
        size, end = layout.block_tokens, (chunk + 1) * self._setup.chunk_tokens
        begin = end - layout.row_blocks(self._setup.chunk_tokens) * size
        step = size // self._setup.hash_tokens
        first, last = begin // size, end // size
        hashes = vllm_request.block_hashes[(first + 1) * step - 1 : last * step : step]
        parent = vllm_request.block_hashes[first * step - 1] if first else None
        convert, lora = self._utils.maybe_convert_block_hash, vllm_request.lora_request
        event = self._events.BlockStored(
            block_hashes=[convert(each) for each in hashes],
            parent_block_hash=None if parent is None else convert(parent),
            token_ids=list(vllm_request.all_token_ids[begin:end]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM,
            lora_name=lora.name if lora else None,
            extra_keys=self._extra_keys(vllm_request, begin, end, size),
            group_idx=group,
            session_id=vllm_request.session_id,
            **self._kinds[group],
        )
        if self._lookahead:
            ends = range(begin + size, end + size, size)
            after = [list(vllm_request.all_token_ids[i : i + self._lookahead]) for i in ends]
            event.lookahead_token_ids = after
        self._width = len(hashes[0]) if hashes else self._width
        encoded = msgspec.msgpack.encode(event) if self._setup.tier_events_s else b""
        return event, Kept(b"".join(hashes), encoded)

    def stored_in_tier(self, kept: Kept) -> Any:
        event = self._decoder.decode(kept.event)
        event.medium = TIER_MEDIUM
        return event

    def _extra_keys(self, request: Any, begin: int, end: int, size: int) -> Any:
        """What each block's hash covers beside the tokens: adapter, images, salt."""
        keys, seen = [], 0
        for start in range(begin, end, size):
            own, seen = self._utils.generate_block_hash_extra_keys(
                request, start, start + size, seen
            )
            keys.append(own)
        # Before 0.31 the keys have no tags.
        untag = getattr(self._utils, "to_event_extra_keys", list)
        return untag(keys)

    def removed(self, group: int, rows: list[Kept], tier: bool) -> Any:
        """The event that rows are gone. ``rows``: for each, what ``stored`` returned. ``tier``:
        from the tiers, else from L1."""
        blob, width = b"".join(kept.hashes for kept in rows), self._width
        hashes = [blob[i : i + width] for i in range(0, len(blob), width)]
        return self._events.BlockRemoved(
            block_hashes=[self._utils.maybe_convert_block_hash(each) for each in hashes],
            medium=TIER_MEDIUM if tier else MEDIUM,
            group_idx=group,
        )
