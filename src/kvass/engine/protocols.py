"""What a connector shows of its engine: its requests, its steps and its blocks.

Chunks of a request are numbered from 0. Block ids are integers, by layer group; id 0 stands for a
block that is not there any more. All of this is used from the engine's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

from kvass.layout.spans import Table


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter as a request names it. ``id``: by which the engine serves it. ``path``: where
    the engine reads it. ``text``: equal for adapters that the engine's own hashes take for one.
    ``in_place``: it is read again even if it is held."""

    id: int
    path: str
    text: str
    in_place: bool = False


class Request(Protocol):
    """One live request. The properties say how it is now, so they change from step to step."""

    @property
    def name(self) -> str:
        """Its id, unique among live requests."""

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA adapter that computes it, if one does."""

    @property
    def tenant(self) -> str:
        """Who pays for what it stores (``types.is_tenant_name``); empty: the default tenant."""

    @property
    def trace(self) -> str:
        """The header ``traceparent`` that came with it, if the engine traces; or empty."""

    @property
    def reads_cache(self) -> bool:
        """Whether it may be served from a cache at all."""

    @property
    def known_tokens(self) -> int:
        """Tokens of its prompt, and those generated so far."""

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV exists or is being loaded, without the step that is being planned.
        Drafts may count: they have no hash yet."""

    @property
    def hashed_chunks(self) -> int:
        """Chunks of which all tokens are known and hashed. 0 if another engine may have equal
        hashes for other content."""

    def chunk_hashes(self, first: int, end: int) -> Sequence[bytes]:
        """The hashes of chunks ``[first, end)``, each of all tokens up to the chunk's end and of
        the adapter's name. All have the same width; ``end <= hashed_chunks``."""

    @property
    def hashed_blocks(self) -> int:
        """As ``hashed_chunks``, in blocks. Like ``block_hashes`` it is used only if hits may end
        inside of a chunk (``EngineSetup.chunk_blocks``)."""

    def block_hashes(self, first: int, end: int) -> Sequence[bytes]:
        """The hashes of blocks ``[first, end)``: as those of chunks; a chunk has the hash of its
        last block."""


class Step(Protocol):
    """One step of the engine, while what the workers are to do in it is planned."""

    @property
    def tokens(self) -> int:
        """Tokens that it computes. 0: it has no forward pass."""

    @property
    def names(self) -> Set[str]:
        """Of the requests of which it computes tokens. It does not change after the step."""

    def requests(self) -> Iterable[tuple[str, int]]:
        """The names of its requests, and how many tokens of each it computes: 0 if it only leaves a
        state of the request behind."""

    def block_table(self, name: str) -> Table:
        """The blocks of one of its requests."""

    @property
    def boundary_states(self) -> Mapping[str, Iterable[tuple[int, int, int]]]:
        """By request: group, block and number of tokens of each state that it leaves behind. The
        block may have been given to another request since: ``BlockPool.caches`` tells."""


class BlockPool(Protocol):
    """The engine's blocks."""

    @property
    def blocks(self) -> int:
        """How many there are."""

    def hold(self, ids: Iterable[int]) -> list[Any]:
        """Keep these blocks from being reused, whatever becomes of their requests. The result is
        for ``free`` and ``freed_by``."""

    def free(self, held: list[Any]) -> None:
        """Undo one ``hold``."""

    def freed_by(self, held: Iterable[Any]) -> int:
        """How many blocks would become free by freeing ``held``: nobody else uses them."""

    def caches(self, block: int, digest: bytes, group: int) -> bool:
        """Whether the block is cached for ``group`` under the hash ``digest``."""

    def was_reset(self) -> bool:
        """Whether the engine's own prefix cache was reset since the last call, or somebody tried
        to."""

    @property
    def empty(self) -> bool:
        """Whether the engine's own prefix cache has no block."""
