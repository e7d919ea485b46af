"""Adapters of vLLM's requests, steps and block pool to the protocols of ``kvass.engine``.

This is a file of vLLM's version: it may have to change for a new version of vLLM. The others are
``borrowed.py`` (what vLLM has no hook for), ``configuration.py``, ``namespace.py`` and
``fields.py`` (the fields of a namespace), ``weight_files.py`` (the files that vLLM loads),
``making.py`` (when vLLM began to make the engine), ``rpcs.py`` (calls that may replace weights),
``rest.py`` (steps that nobody makes), ``lora.py`` (the adapters that a worker holds),
``content.py`` (what block hashes leave out), ``hints.py`` (the fields of a request), ``groups.py``
(KV cache groups), ``kv_caches.py`` (pages), ``operations.py`` (copies on a GPU), ``tiles.py`` (what
vLLM's kernels need of the CPU), ``stats.py`` (metrics), ``events.py`` (KV events), ``plugin.py``
(plug-ins), ``opt_in.py`` (the variable ``KVASS``), ``inert.py``, and ``blend*.py``.
``connector.py`` overrides the hooks of vLLM's base class, ``shadow_connector.py`` those that differ
in shadow mode. ``contract.py`` lists the names in vLLM that all these files use,
except those of blend. No other file depends on vLLM. CONTRIBUTING.md says how to support another
version.

Facts relied on:

- Block i of a group ends at ``block_hashes[(i+1)*block/hash_block - 1]``.
- ``touch`` holds a block and ``free_blocks`` frees it. A block that is allocated has no hash.
- ``reset_prefix_cache`` replaces the map of cached blocks, and nothing else replaces it. vLLM calls
  it on the pool object. It fails while a block is in use. The map's ``__len__`` is 0 if no block is
  cached.
- While vLLM builds a step's metadata, a request's ``num_computed_tokens`` still has its value from
  before the step. It counts drafts and placeholders that are in flight.
- A request that waits to be computed has no computed tokens, unless a load of it has ended.
  Preemption and a failed load take them away.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvass.connectors.vllm import borrowed, content
from kvass.connectors.vllm.configuration import VllmSetup
from kvass.connectors.vllm.hints import read_hints, request_context
from kvass.engine.protocols import Adapter
from kvass.engine.rank_report import RankReport
from kvass.engine.step_work import StepWork
from kvass.layout.spans import Table

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCE: Any = CacheHitSource.HOST
except ImportError:  # before 0.32
    HIT_SOURCE = None

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "SupportsHMA",
]

TO_COMPUTE: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
"""The states of a request that waits to be computed."""
MOST_TRACE: Final = 256
"""The most characters of a ``traceparent``. A client chooses it; a valid one has 55."""


@dataclass
class StepMetadata(StepWork, KVConnectorMetadata):
    """A step's work, sent from the scheduler to the workers. vLLM pickles it."""


class StepReport(RankReport, KVConnectorWorkerMetadata):
    """The workers' report to the scheduler. vLLM pickles it, and aggregates those of all."""


def reported(report: StepReport) -> KVConnectorOutput:
    """What vLLM gives to ``update_connector_output``, with ``report`` alone."""
    return KVConnectorOutput(kv_connector_worker_meta=report)


class VllmRequest:
    """The adapter of vLLM's request to ``protocols.Request``, which documents the members."""

    def __init__(
        self, request: Any, setup: VllmSetup, texts: content.HashedTexts | None = None
    ) -> None:
        self._request = request
        self._setup = setup
        self._texts = texts
        self.exact_blocks: int | None = None
        """The number of blocks with exact KV (``blend_planner.py``); None: all."""
        self.hints = read_hints(request.kv_transfer_params, getattr(request, "kv_hints", None))
        self.context = request_context(request, self.hints)
        self.ends_session = self.hints.ends
        if texts is not None:
            texts.note(request)

    @property
    def vllm(self) -> Any:
        """vLLM's request object."""
        return self._request

    @property
    def name(self) -> str:
        return str(self._request.request_id)

    @property
    def adapter(self) -> Adapter | None:
        lora = self._request.lora_request
        if lora is None:
            return None
        text = (
            f"{lora.lora_name} at {lora.lora_path}"
            if content.TAGGED_HASHES
            else str(lora.lora_name)
        )
        return Adapter(lora.lora_int_id, str(lora.lora_path), text, bool(lora.load_inplace))

    @property
    def trace(self) -> str:
        return str((self._request.trace_headers or {}).get("traceparent", ""))[:MOST_TRACE]

    @property
    def salt(self) -> str:
        return self._request.cache_salt or ""

    def first_tokens(self, count: int) -> bytes:
        tokens = self._request.prompt_token_ids
        more = self._request.mm_features or self._request.prompt_embeds is not None
        if more or not 0 < count <= len(tokens or ()):
            return b""
        return array("I", tokens[:count]).tobytes()

    def token_ids(self, first: int, end: int) -> Sequence[int]:
        ids: Sequence[int] = self._request.all_token_ids[first:end]
        return ids

    @property
    def reads_cache(self) -> bool:
        return not self._request.skip_reading_prefix_cache  # vLLM sets it for prompt logprobs

    @property
    def precedence(self) -> tuple[int, float]:
        return int(self._request.priority), float(self._request.arrival_time)

    @property
    def known_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def prompt_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    @property
    def ends_at_once(self) -> bool:
        return int(self._request.max_tokens) <= 1

    @property
    def most_stored_tokens(self) -> int | None:
        return self.hints.most_tokens

    @property
    def most_loaded_tokens(self) -> int | None:
        return self.hints.most_loaded

    @property
    def computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def waits_with_blocks(self) -> bool:
        status = self._request.status
        loaded = status in TO_COMPUTE and self._request.num_computed_tokens > 0
        return loaded or status is RequestStatus.WAITING_FOR_REMOTE_KVS

    @property
    def hashed_chunks(self) -> int:
        return self.hashed_blocks * self._setup.hash_tokens // self._setup.chunk_tokens

    @property
    def hashed_blocks(self) -> int:
        if not content.is_named(self._request, self._setup, self._texts):
            return 0
        known = len(self._request.block_hashes)
        return known if self.exact_blocks is None else min(known, self.exact_blocks)

    def chunk_hashes(self, first: int, end: int) -> Sequence[bytes]:
        step = self._setup.chunk_tokens // self._setup.hash_tokens
        hashes: Sequence[bytes] = self._request.block_hashes
        return hashes[(first + 1) * step - 1 : end * step : step]

    def block_hashes(self, first: int, end: int) -> Sequence[bytes]:
        hashes: Sequence[bytes] = self._request.block_hashes
        return hashes[first:end]


class VllmStep:
    """The adapter of vLLM's ``SchedulerOutput`` to ``kvass.engine.protocols.Step``."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self.tokens: int = output.total_num_scheduled_tokens
        self.names: Set[str] = output.num_scheduled_tokens.keys()

    def requests(self) -> Iterable[tuple[str, int]]:
        scheduled: dict[str, int] = self._output.num_scheduled_tokens
        if states := self.boundary_states:  # also of requests that compute nothing in this step
            scheduled = dict.fromkeys(states, 0) | scheduled
        return scheduled.items()

    def block_table(self, name: str) -> Table:
        table: Table | None = self._output.kv_connector_block_state.get_block_ids(name)
        assert table is not None, "a request of the step has a block table"
        return table

    @property
    def boundary_states(self) -> Mapping[str, Iterable[tuple[int, int, int]]]:
        # With asynchronous scheduling vLLM reports a state between two steps. Accepted drafts may
        # have advanced the request since then.
        states: Mapping[str, list[tuple[int, int, int]]]
        states = self._output.kv_connector_block_state.boundary_state_offloads
        return states


def block_table(blocks: Any) -> Table:
    """The block ids of each group, from the ``blocks`` that ``update_state_after_alloc`` gets."""
    table: Table = blocks.get_block_ids()
    return table


class VllmBlockPool:
    """The adapter of vLLM's block pool to ``kvass.engine.protocols.BlockPool``.

    ``before_reset`` is called before vLLM resets its prefix cache; a reset fails while blocks are
    held. ``after_reset`` is called after a reset that succeeded. Neither may raise.
    """

    def __init__(
        self, block_pool: Any, before_reset: Callable[[], None], after_reset: Callable[[], None]
    ) -> None:
        self._pool = block_pool
        self._before_reset, self._after_reset = before_reset, after_reset
        self._reset = borrowed.replace_reset(block_pool, self._attempt_reset)
        self._attempted = False
        self._map = block_pool.cached_block_hash_to_block
        """The pool's map at the last call of ``was_reset``. A reset makes a new map."""

    def _attempt_reset(self) -> bool:
        """The replacement of the pool's ``reset_prefix_cache``. False if the reset failed."""
        self._before_reset()  # it may plan steps, which are before the reset
        self._attempted = True
        done = bool(self._reset())
        if done:
            self._after_reset()
        return done

    def was_reset(self) -> bool:
        before, self._map = self._map, self._pool.cached_block_hash_to_block
        attempted, self._attempted = self._attempted, False
        return attempted or before is not self._map

    @property
    def empty(self) -> bool:
        return len(self._pool.cached_block_hash_to_block) == 0

    def hold(self, ids: Iterable[int]) -> list[Any]:
        blocks = [self._pool.blocks[i] for i in ids]
        self._pool.touch(blocks)
        return blocks

    def free(self, held: list[Any]) -> None:
        # Like vLLM: the last blocks of a request are reused first.
        self._pool.free_blocks(reversed(held))

    def caches(self, block: int, digest: bytes, group: int) -> bool:
        return bool(
            self._pool.blocks[block].block_hash == make_block_hash_with_group_id(digest, group)
        )

    def has(self, digest: bytes, groups: list[int]) -> bool:
        return self._pool.get_cached_block(digest, groups) is not None

    @property
    def blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    @property
    def free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def freed_by(self, held: Iterable[Any]) -> int:
        return sum(block.ref_cnt == 1 for block in held)
