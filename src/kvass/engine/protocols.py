"""Protocols that a connector implements for its engine: requests, steps and the block pool.

Chunks of a request are numbered from 0. Block ids are integers, by layer group. Id 0 is the null
block: it stands for a block that was freed. All of this is used from the engine's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from kvass.layout.spans import Table
from kvass.messages import RequestContext


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter as a request names it. ``id``: the engine's id of the adapter. ``path``: where
    the engine reads its files. ``text``: two adapters have equal texts if the engine's own hashes
    do not tell them apart. ``in_place``: the engine reads it again even if it holds it."""

    id: int
    path: str
    text: str
    in_place: bool = False


class Request(Protocol):
    """One live request. The properties are current values, which change from step to step."""

    @property
    def name(self) -> str:
        """The request's id, unique among live requests."""

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA adapter of the request; None without one."""

    @property
    def context(self) -> RequestContext:
        """What the request says of itself. It does not change. The planner adds what it knows of a
        lookup."""

    @property
    def ends_session(self) -> bool:
        """Whether the session of its client ends with it."""

    @property
    def trace(self) -> str:
        """The header ``traceparent`` of the request if the engine traces; else empty."""

    @property
    def reads_cache(self) -> bool:
        """Whether the request may be served from a cache."""

    @property
    def salt(self) -> str:
        """The salt that its hashes have; empty without one."""

    def first_tokens(self, count: int) -> bytes:
        """The ids of its first ``count`` tokens. Empty if ``count`` is 0, if it has fewer, or if
        they do not say all of its content."""

    def token_ids(self, first: int, end: int) -> Sequence[int]:
        """The ids of its tokens ``[first, end)``, of prompt and output so far. Where they do not
        say all of its content, equal ids may mean different content."""

    @property
    def precedence(self) -> tuple[int, float]:
        """Of requests that wait, the engine takes the smallest first. Used only with
        ``EngineSetup.by_priority``."""

    @property
    def known_tokens(self) -> int:
        """How many tokens the request has: prompt and output so far."""

    @property
    def prompt_tokens(self) -> int:
        """How many of its first tokens are its prompt."""

    @property
    def ends_at_once(self) -> bool:
        """Whether it ends with the first token that it generates."""

    @property
    def most_stored_tokens(self) -> int | None:
        """How many of its first tokens may be stored; None: all. It does not change."""

    @property
    def most_loaded_tokens(self) -> int | None:
        """How many tokens may be loaded after those in the engine's own cache; None: all. It does
        not change."""

    @property
    def computed_tokens(self) -> int:
        """How many tokens have KV, or KV that is being loaded. The step that is being planned does
        not count. Draft tokens may count; they have no hash yet."""

    @property
    def waits_with_blocks(self) -> bool:
        """Whether it holds blocks and waits: a load of any connector has begun, and no step has
        computed tokens of it since. Used only with ``EngineSetup.admission``."""

    @property
    def hashed_chunks(self) -> int:
        """How many chunks have a hash, because all their tokens are known. 0 if another engine may
        have equal hashes for other content."""

    def chunk_hashes(self, first: int, end: int) -> Sequence[bytes]:
        """The hashes of chunks ``[first, end)``. Each covers all tokens up to the chunk's end and
        the adapter's name. All have the same width; ``end <= hashed_chunks``."""

    @property
    def hashed_blocks(self) -> int:
        """How many blocks have a hash. This and ``block_hashes`` are used only if hits may end
        inside a chunk (``EngineSetup.chunk_blocks``), and with ``EngineSetup.hash_tokens``."""

    def block_hashes(self, first: int, end: int) -> Sequence[bytes]:
        """The hashes of blocks ``[first, end)``, as ``chunk_hashes``. The hash of a chunk is the
        hash of its last block."""


class Step(Protocol):
    """One step of the engine, while it is being planned."""

    @property
    def tokens(self) -> int:
        """How many tokens the step computes. 0: it has no forward pass."""

    @property
    def names(self) -> Set[str]:
        """The names of the requests of which the step computes tokens. The set does not change
        after the step."""

    def requests(self) -> Iterable[tuple[str, int]]:
        """The names of the step's requests, and how many tokens of each it computes. 0: the step
        only leaves a state of the request behind (``boundary_states``)."""

    def block_table(self, name: str) -> Table:
        """The block ids of one of the step's requests."""

    @property
    def boundary_states(self) -> Mapping[str, Iterable[tuple[int, int, int]]]:
        """By request: group, block id and number of tokens of each state that the step leaves
        behind. The block may have been given to another request since, so check it with
        ``BlockPool.caches``."""


class BlockPool(Protocol):
    """The pool of the engine's KV blocks."""

    @property
    def blocks(self) -> int:
        """How many blocks the pool has."""

    @property
    def free_blocks(self) -> int:
        """How many of them a request could get now."""

    def hold(self, ids: Iterable[int]) -> list[Any]:
        """Keep these blocks from being reused, also after their requests have ended. The result is
        an argument of ``free`` and ``freed_by``."""

    def free(self, held: list[Any]) -> None:
        """Undo one call of ``hold``, whose result is ``held``."""

    def freed_by(self, held: Iterable[Any]) -> int:
        """How many blocks would become free if ``held`` were freed: those that have no other
        user."""

    def caches(self, block: int, digest: bytes, group: int) -> bool:
        """Whether the block is cached for ``group`` under the hash ``digest``."""

    def has(self, digest: bytes, groups: list[int]) -> bool:
        """Whether the engine's own cache has blocks for all of ``groups`` under the hash
        ``digest``."""

    def was_reset(self) -> bool:
        """Whether a reset of the engine's own prefix cache was attempted since the last call."""

    @property
    def empty(self) -> bool:
        """Whether the engine's own prefix cache has no blocks."""
