"""vLLM's base classes, and its requests, steps and block pool as ``kvass.engine`` sees them.

These files know vLLM's version: this one, ``configuration.py``, ``namespace.py`` and ``fields.py``
(what is in a namespace), ``weight_files.py`` (which files it loads), ``rpcs.py`` (what may replace
weights later), ``lora.py`` (the adapters that a worker holds), ``groups.py`` (cache groups),
``kv_caches.py`` (pages), ``tiles.py`` (what its kernels need of the CPU), ``stats.py`` (its
metrics), ``events.py`` (KV events), ``plugin.py`` (its plug-ins), ``inert.py`` and those of blend
(``blend*.py``). ``connector.py`` knows the hooks of the base class, ``contract.py`` lists
what all but blend use, and no other file knows vLLM. For another version change these, then
add it to ``TESTED_VLLM`` (CONTRIBUTING.md has the recipe).

Facts relied on: block i of a group ends at ``block_hashes[(i+1)*block/hash_block - 1]``;
``touch`` and ``free_blocks`` hold and free a block; a block that is given out has lost its hash;
``reset_prefix_cache`` replaces the map of cached blocks, and nothing else does (its ``__len__`` is
0 if none is cached); it refuses while a block is in use. vLLM calls it on the pool object. While a
step's metadata is built, a request's ``num_computed_tokens`` is still that before the step, and
counts drafts and placeholders in flight.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

from kvass.connectors.vllm.configuration import VllmSetup
from kvass.connectors.vllm.contract import release
from kvass.engine.boundary import log
from kvass.engine.held_adapters import News
from kvass.engine.protocols import Adapter
from kvass.engine.step_work import StepWork
from kvass.layout.spans import Table
from kvass.types import is_tenant_name

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

TENANT: Final = "kvass.tenant"
"""The name under which a request's ``kv_transfer_params`` say its tenant."""
TAGGED_HASHES: Final = release(vllm_version) >= (0, 31)
"""Whether a block's hash tells an adapter's name, its path and a salt apart."""
MAX_TEXTS: Final = 10_000

CONTENT_HASH: Final = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
"""vLLM's hash of an item's content: BLAKE3 or SHA-256, or SHA-512, in hex."""


@dataclass
class StepMetadata(StepWork, KVConnectorMetadata):
    """Scheduler to workers: one step's loads and stores. vLLM's transport pickles it."""


@dataclass
class StepReport(KVConnectorWorkerMetadata):
    """Workers to scheduler: ``steps[s]`` ranks have ended every store of step ``s``, and by rank
    which LoRA adapters it holds that it did not hold before."""

    steps: dict[int, int] = field(default_factory=dict)
    adapters: dict[int, News] = field(default_factory=dict)

    def aggregate(self, other: StepReport) -> StepReport:
        """Both reports in one."""
        steps = dict(Counter(self.steps) + Counter(other.steps))
        return StepReport(steps, self.adapters | other.adapters)


class HashedTexts:
    """What the texts mean that vLLM 0.30 puts into block hashes: an adapter's name without its
    path, and a salt. vLLM's own cache takes two adapters of one name, or an adapter and a salt, for
    one. So a text that was seen with a second meaning is uncached from then on, and so is one that
    is new when ``MAX_TEXTS`` are known."""

    def __init__(self) -> None:
        self._meanings: dict[str, str] = {}

    def note(self, request: Any) -> None:
        """A request begins: nothing of it was computed yet."""
        text, meaning = self._of(request)
        known = self._meanings.setdefault(text, meaning) if self._room(text) else meaning
        if known not in (meaning, ""):
            self._meanings[text] = ""
            why = "this vLLM's cache takes %s and %s for one; 0.31 does not"
            log.warning(f"requests with %r run uncached: {why}", text, known, meaning)

    def ambiguous(self, request: Any) -> bool:
        """Whether the hashes of ``request`` may be those of other content."""
        text, meaning = self._of(request)
        return bool(text) and self._meanings.get(text) != meaning

    def _room(self, text: str) -> bool:
        return bool(text) and (text in self._meanings or len(self._meanings) < MAX_TEXTS)

    def _of(self, request: Any) -> tuple[str, str]:
        if (lora := request.lora_request) is not None:
            return str(lora.lora_name), f"the adapter {lora.lora_path}"
        return request.cache_salt or "", "a salt"


def hashed_texts(vllm_config: Any) -> HashedTexts | None:
    """None: block hashes are never those of other content."""
    return None if TAGGED_HASHES or vllm_config.lora_config is None else HashedTexts()


class VllmRequest:
    """A request of vLLM as ``kvass.engine.protocols.Request``, which says what its members mean."""

    def __init__(self, request: Any, setup: VllmSetup, texts: HashedTexts | None = None) -> None:
        self._request = request
        self._setup = setup
        self._texts = texts
        self.exact_blocks: int | None = None
        """After so many blocks its KV is an approximation (``blend_planner.py``)."""
        if texts is not None:
            texts.note(request)

    @property
    def vllm(self) -> Any:
        """The request itself."""
        return self._request

    @property
    def name(self) -> str:
        return str(self._request.request_id)

    @property
    def adapter(self) -> Adapter | None:
        lora = self._request.lora_request
        if lora is None:
            return None
        text = f"{lora.lora_name} at {lora.lora_path}" if TAGGED_HASHES else str(lora.lora_name)
        return Adapter(lora.lora_int_id, str(lora.lora_path), text, bool(lora.load_inplace))

    @property
    def tenant(self) -> str:
        named = (self._request.kv_transfer_params or {}).get(TENANT)
        if isinstance(named, str) and named:
            return named if is_tenant_name(named) else "other"
        salt = self._request.cache_salt
        return f"salt-{hashlib.sha256(salt.encode()).hexdigest()[:16]}" if salt else ""

    @property
    def trace(self) -> str:
        return str((self._request.trace_headers or {}).get("traceparent", ""))

    @property
    def reads_cache(self) -> bool:
        return not self._request.skip_reading_prefix_cache  # set for prompt logprobs

    @property
    def known_tokens(self) -> int:
        return int(self._request.num_tokens)

    @property
    def computed_tokens(self) -> int:
        return int(self._request.num_computed_tokens)

    @property
    def hashed_chunks(self) -> int:
        return self.hashed_blocks * self._setup.hash_tokens // self._setup.chunk_tokens

    @property
    def hashed_blocks(self) -> int:
        if not self._setup.global_media_ids and _chooses_media_ids(self._request):
            return 0
        if self._texts is not None and self._texts.ambiguous(self._request):
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


def _chooses_media_ids(request: Any) -> bool:
    """Whether the hashes of ``request`` depend on an id of an image, a video or a sound that is not
    a hash of its content: a client gave it (``multi_modal_uuids``), or vLLM numbered the item. The
    id may stand for other content in another engine. It is known by its form; vLLM may put the name
    of a LoRA adapter before a hash. A client's id that vLLM hashed is not noticed."""
    for feature in request.mm_features:
        content = getattr(feature, "mm_hash", None) or feature.identifier
        prefix = feature.identifier.removesuffix(content)
        if not CONTENT_HASH.fullmatch(content) or (prefix and not prefix.endswith(":")):
            return True
    return False


class VllmStep:
    """A ``SchedulerOutput`` of vLLM as ``kvass.engine.protocols.Step``."""

    def __init__(self, output: Any) -> None:
        self._output = output
        self.tokens: int = output.total_num_scheduled_tokens
        self.names: Set[str] = output.num_scheduled_tokens.keys()

    def requests(self) -> Iterable[tuple[str, int]]:
        scheduled: dict[str, int] = self._output.num_scheduled_tokens
        if states := self.boundary_states:  # of requests that may compute nothing in this step
            scheduled = dict.fromkeys(states, 0) | scheduled
        return scheduled.items()

    def block_table(self, name: str) -> Table:
        table: Table | None = self._output.kv_connector_block_state.get_block_ids(name)
        assert table is not None, "a request of the step has a block table"
        return table

    @property
    def boundary_states(self) -> Mapping[str, Iterable[tuple[int, int, int]]]:
        # Under asynchronous scheduling vLLM hands states over between two steps. Drafts that were
        # accepted may have moved the request on since.
        states: Mapping[str, list[tuple[int, int, int]]]
        states = self._output.kv_connector_block_state.boundary_state_offloads
        return states


def block_table(blocks: Any) -> Table:
    """The block ids, by group, that ``update_state_after_alloc`` brings."""
    table: Table = blocks.get_block_ids()
    return table


class VllmBlockPool:
    """vLLM's block pool as ``kvass.engine.protocols.BlockPool``. ``before_reset`` is called before
    vLLM resets its prefix cache, which fails while blocks are held, and ``after_reset`` after it
    succeeded. They must not raise."""

    def __init__(
        self, block_pool: Any, before_reset: Callable[[], None], after_reset: Callable[[], None]
    ) -> None:
        self._pool = block_pool
        self._before_reset, self._after_reset = before_reset, after_reset
        self._reset = block_pool.reset_prefix_cache
        block_pool.reset_prefix_cache = self._attempt
        self._attempted = False
        self._map = block_pool.cached_block_hash_to_block
        """At the last ``was_reset``. A reset makes a new map."""

    def _attempt(self) -> bool:
        """In the place of the pool's ``reset_prefix_cache``, which may refuse."""
        self._attempted = True
        self._before_reset()
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
        self._pool.free_blocks(reversed(held))  # as vLLM: the tail of a request is reused first

    def caches(self, block: int, digest: bytes, group: int) -> bool:
        return bool(
            self._pool.blocks[block].block_hash == make_block_hash_with_group_id(digest, group)
        )

    @property
    def blocks(self) -> int:
        return int(self._pool.num_gpu_blocks)

    def freed_by(self, held: Iterable[Any]) -> int:
        return sum(block.ref_cnt == 1 for block in held)
