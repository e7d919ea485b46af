"""vLLM's base classes, and what its requests, steps and block pool mean to us.

Law of this file, ``engine.py`` (configuration), ``namespace.py`` (what of it is in a namespace,
with ``fields.py``, ``settings.py``, ``variables.py`` and ``environment.py``), ``weight_files.py``
(which files it loads), ``device.py``, ``groups.py`` (cache groups) and ``memory.py`` (pages): no
other file of the connector knows more of vLLM than the hooks of the connector base class and a
request's id. Another version means changing these eleven and ``engine.TESTED``.

Facts relied on (0.32): block i of a group ends at ``block_hashes[(i+1)*block/hash_block - 1]``;
``touch`` and ``free_blocks`` hold and free a block; a block that is given out has lost its hash;
``reset_prefix_cache`` puts a new map of hashes in the place of the old one, and nothing else does;
it refuses while a block is in use. vLLM calls it on the pool object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvass.connectors.vllm.engine import Setup

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCE: Any = CacheHitSource.HOST
except ImportError:  # an older vLLM: the connector loads, says so, and stays inert
    KVConnectorTransferResults = KVConnectorWorkerMetadata = SupportsHMA = object
    HIT_SOURCE = None

__all__ = [
    "HIT_SOURCE",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]


# ---------------------------------------------------------------- requests and steps

CONTENT_HASH: Final = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
"""vLLM's hash of an item's content: BLAKE3 or SHA-256, or SHA-512, in hex."""


def adapter(request: Any) -> tuple[str, str] | None:
    """Name and path of the LoRA adapter that computes ``request``, if one does."""
    lora = request.lora_request
    return None if lora is None else (lora.lora_name, lora.lora_path)


@dataclass
class Salted:
    """Hashes of a request's chunks with ``salt`` mixed in, as far as they were needed, and vLLM's
    that they are of. One of vLLM's stands for all before it too."""

    salt: bytes = b""
    plain: list[bytes] = field(default_factory=list)
    hashes: bytearray = field(default_factory=bytearray)

    def first(self, plain: Sequence[bytes], salt: bytes) -> bytes:
        """``plain``, salted."""
        kept, width = min(len(self.plain), len(plain)), len(plain[0])
        if self.salt != salt or (kept and self.plain[kept - 1] != plain[kept - 1]):
            self.salt, self.plain, self.hashes = salt, [], bytearray()
        for one in plain[len(self.plain) :]:
            self.plain.append(one)
            self.hashes += blake2b(one, digest_size=width, key=salt).digest()
        return bytes(self.hashes[: len(plain) * width])


def chunk_hashes(
    request: Any, chunks: int, setup: Setup, salt: bytes, salted: Salted
) -> tuple[bytes, int]:
    """The hashes of the first ``chunks`` chunks of ``request``, back to back, and their width.

    ``salt``, if any, is mixed in: what vLLM's hash does not know. ``salted`` keeps what that gave.
    """
    if chunks == 0:
        return b"", 0
    step = setup.chunk_tokens // setup.hash_tokens
    hashes = request.block_hashes[step - 1 : chunks * step : step]
    return salted.first(hashes, salt) if salt else b"".join(hashes), len(hashes[0])


def chooses_media_ids(request: Any) -> bool:
    """Whether the hashes of ``request`` rest on an id of an image, a video or a sound that is not
    a hash of its content: a client gave it (``multi_modal_uuids``), or vLLM numbered the item, as
    it does without any cache of its own. The id may name another content for another engine.

    An id is known by its form. vLLM may put the name of a LoRA adapter before a hash. It hashes a
    client's id if the request has arguments for the processor: that one cannot be told.
    """
    for feature in request.mm_features:
        content = getattr(feature, "mm_hash", None) or feature.identifier
        named = feature.identifier.removesuffix(content)
        if not CONTENT_HASH.fullmatch(content) or (named and not named.endswith(":")):
            return True
    return False


def hashed_chunks(request: Any, setup: Setup) -> int:
    """Chunks of ``request`` whose tokens are all known and hashed, by hashes that other engines may
    know them by."""
    if not setup.global_media_ids and chooses_media_ids(request):
        return 0
    return len(request.block_hashes) * setup.hash_tokens // setup.chunk_tokens


def stored_chunks(request: Any, scheduled: int, setup: Setup) -> int:
    """Chunks of ``request`` that will be computed, for good, once this step has run.

    During ``build_connector_meta`` ``num_computed_tokens`` is still that before the step, and
    counts drafts and placeholders in flight. Hashes exist for known tokens only, and a known token
    is never computed again: so it is they that exclude drafts.
    """
    computed = request.num_computed_tokens + scheduled
    return min(int(computed) // setup.chunk_tokens, hashed_chunks(request, setup))


def reads_cache(request: Any) -> bool:
    """Whether the request may be served from a cache at all (prompt logprobs may not)."""
    return not request.skip_reading_prefix_cache


def has_computed(request: Any) -> bool:
    """Whether some of the request's KV exists, or is being loaded."""
    return bool(request.num_computed_tokens)


def step_tokens(output: Any) -> Iterable[tuple[str, int]]:
    """Request ids of a step and how many tokens of each it computes: 0 of one that computes none,
    and of which a state is handed over all the same."""
    scheduled: dict[str, int] = output.num_scheduled_tokens
    offered: Iterable[str] = output.kv_connector_block_state.boundary_state_offloads
    return (dict.fromkeys(offered, 0) | scheduled).items()


def computes(output: Any) -> bool:
    """Whether a step computes anything; else it has no forward pass."""
    return bool(output.total_num_scheduled_tokens)


def block_table(blocks: Any) -> tuple[Sequence[int], ...]:
    """The block ids, by group, that ``update_state_after_alloc`` brings."""
    table: tuple[Sequence[int], ...] = blocks.get_block_ids()
    return table


def step_blocks(output: Any, request: str) -> tuple[Sequence[int], ...] | None:
    """The block table of ``request``, by group, during ``build_connector_meta``."""
    table: tuple[Sequence[int], ...] | None = output.kv_connector_block_state.get_block_ids(request)
    return table


def boundary_states(
    output: Any, request: Any, setup: Setup, pool: Pool
) -> list[tuple[int, int, int]]:
    """Groups, blocks and chunks: the states of ``request`` at a chunk's end that this step leaves
    behind. Good until the step's forward pass is over; a block that is held stays so.

    vLLM hands over blocks, under asynchronous scheduling between two steps. By the time it tells,
    drafts that were accepted may have moved the request on, and the block is free or somebody
    else's. Its hash is the proof: it says of which tokens the block holds the state, and goes when
    the block is given out anew.
    """
    offered: dict[str, list[tuple[int, int, int]]]
    offered = output.kv_connector_block_state.boundary_state_offloads
    return [
        (group, block, tokens // setup.chunk_tokens - 1)
        for group, block, tokens in offered.get(request.request_id, ())
        if tokens % setup.chunk_tokens == 0
        and 0 < tokens <= len(request.block_hashes) * setup.hash_tokens
        and pool.caches(block, request.block_hashes[tokens // setup.hash_tokens - 1], group)
    ]


def known_tokens(request: Any) -> int:
    """Tokens of ``request`` that are known: its prompt, and what it generated."""
    return int(request.num_tokens)


class Pool:
    """The engine's block pool: blocks are held until we let go of them.

    ``before_reset`` is called before vLLM resets its prefix cache, to give back what can be given
    back: a reset fails while blocks are held. It must not raise.
    """

    def __init__(self, block_pool: Any, before_reset: Callable[[], None]) -> None:
        self._pool = block_pool
        self._before_reset = before_reset
        self._reset = block_pool.reset_prefix_cache
        block_pool.reset_prefix_cache = self._attempt
        self._attempted = False
        """Whether a reset was called for since we last looked, even if vLLM refused it."""
        self._map = block_pool.cached_block_hash_to_block
        """vLLM's map of cached blocks when we last looked; kept, so that no new one has its id."""

    def _attempt(self) -> bool:
        """In the place of the pool's ``reset_prefix_cache``."""
        self._attempted = True
        self._before_reset()
        return bool(self._reset())

    def was_reset(self) -> bool:
        """Whether vLLM's prefix cache was reset since this was last asked, or should have been:
        whoever calls for it may have replaced the weights, even if blocks in use prevent it."""
        before, self._map = self._map, self._pool.cached_block_hash_to_block
        attempted, self._attempted = self._attempted, False
        return attempted or before is not self._map

    def hold(self, ids: Iterable[int]) -> list[Any]:
        """Keep these blocks from being reused, whatever becomes of their requests."""
        blocks = [self._pool.blocks[i] for i in ids]
        self._pool.touch(blocks)
        return blocks

    def free(self, held: list[Any]) -> None:
        """Undo one ``hold``; the tail of a request is reused first, as vLLM does it."""
        self._pool.free_blocks(reversed(held))

    def caches(self, block: int, digest: bytes, group: int) -> bool:
        """Whether the block is the group's for what ``digest`` is the hash of."""
        return bool(
            self._pool.blocks[block].block_hash == make_block_hash_with_group_id(digest, group)
        )

    @property
    def blocks(self) -> int:
        """How many there are."""
        return int(self._pool.num_gpu_blocks)

    def waiting(self, held: Iterable[Any]) -> int:
        """How many blocks letting go of ``held`` would free: nobody else uses them."""
        return sum(block.ref_cnt == 1 for block in held)
