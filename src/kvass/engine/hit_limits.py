"""Where the hits of an engine's requests may end, in chunks, blocks and tokens."""

from __future__ import annotations

from kvass.client.lookups import Match
from kvass.engine.protocols import Request
from kvass.engine.request_state import RequestState
from kvass.engine.setup import EngineSetup
from kvass.types import Slots


class HitLimits:
    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup

    @property
    def inside_chunks(self) -> bool:
        """Whether a hit may end inside a chunk."""
        return self._setup.chunk_blocks > 0

    def tokens(self, chunks: int, blocks: int = 0) -> int:
        """How many tokens ``chunks`` chunks and ``blocks`` blocks have."""
        each = self._setup.chunk_tokens
        return chunks * each + blocks * each // max(1, self._setup.chunk_blocks)

    def end(self, request: Request, chunks: int) -> int:
        """The largest number of tokens that a hit may have. If hits may end inside a chunk, a hit
        never has the last known token. The engine computes that token again, as it does after a
        hit in its own cache."""
        if not self.inside_chunks:
            return self.tokens(chunks - self._setup.spare)
        below_last = (request.known_tokens - 1) // self.tokens(0, 1)
        return self.tokens(0, min(request.hashed_blocks, below_last))

    def allowed(self, request: Request, local: int, chunks: int, end: int) -> tuple[int, int]:
        """``chunks`` and ``end``, cut to what the request allows to be loaded after ``local``
        tokens: to a block if hits may end inside a chunk, else to a chunk."""
        if (most := request.most_loaded_tokens) is None:
            return chunks, end
        each, upto = self._setup.chunk_tokens, local + most
        return min(chunks, upto // each + self._setup.spare), min(end, self.end_before(upto))

    def end_before(self, token: int) -> int:
        """The last place at ``token`` or before it where a hit may end."""
        unit = self.tokens(0, 1) if self.inside_chunks else self._setup.chunk_tokens
        return token // unit * unit

    def slots(self, match: Match, end: int) -> tuple[Slots, ...]:
        """The slots that are read of ``match`` if its hit is cut to ``end`` tokens. Only hits are
        cut that need all rows (``EngineSetup.hits_whole_prompts``)."""
        if not self._setup.hits_whole_prompts:
            return match.slots
        rows = -(-end // self._setup.chunk_tokens) - match.first
        return tuple(each.first(rows) for each in match.slots)

    def tail(self, match: Match) -> int:
        """How many blocks the request has up to the end of ``match``, if that is inside a chunk;
        else 0."""
        return match.chunks * self._setup.chunk_blocks + match.blocks if match.blocks else 0

    def blocks(self, state: RequestState, salt: bytes, local: int, end: int, chunk: int) -> bytes:
        """The hashes of the first blocks of ``chunk``, up to token ``end`` of the request. Empty
        if the engine's own cache has all these tokens."""
        first, block = chunk * self._setup.chunk_blocks, self.tokens(0, 1)
        last = min(first + self._setup.chunk_blocks - 1, end // block)
        if last * block <= local:
            return b""
        return state.block_digests(first, last, salt)[0]

    def chunks(self, request: Request) -> int:
        """How many chunks of the request are looked up."""
        if self._setup.spare or self._setup.hits_whole_prompts:
            return request.hashed_chunks
        below_last = (request.known_tokens - 1) // self._setup.chunk_tokens
        return min(request.hashed_chunks, below_last)

    def without_hashes(self, request: Request) -> bool:
        """Whether the engine's hashes do not name the content of ``request``."""
        blocks = self._setup.chunk_blocks
        hashed = request.hashed_blocks if blocks else request.hashed_chunks
        return not hashed and request.known_tokens >= self._setup.chunk_tokens // max(1, blocks)
