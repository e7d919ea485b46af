"""The keys that an engine gives a prompt of a trace: hashes of its chunks and of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvass.simulate.traces import Trace, TraceRequest
from kvass.types import U64Array

WIDTH: Final = 16


def digests(ids: U64Array, piece_tokens: int, unit_tokens: int) -> bytes:
    """The hashes of all whole units of ``unit_tokens``, ``WIDTH`` bytes each. A hash has the id of
    the unit's last piece, and the number of the part of that piece in which the unit ends."""
    each, parts = max(1, unit_tokens // piece_tokens), max(1, piece_tokens // unit_tokens)
    ends = np.repeat(ids[each - 1 :: each], parts)
    keys = np.empty((len(ends), 2), np.uint64)
    keys[:, 0] = ends
    keys[:, 1] = np.arange(len(ends)) % parts
    return keys.tobytes()


@dataclass(frozen=True)
class PromptKeys:
    """The keys of a prompt. ``chunks``: the hashes of its whole chunks. ``blocks``: those of its
    whole blocks. A chunk has ``blocks_per_chunk`` blocks; this is 0 if hits end with a chunk, and
    then ``blocks`` is empty. ``max_hit_blocks``: how many blocks a lookup may ask for. The engine
    always computes the last token of a prompt."""

    chunks: bytes
    blocks: bytes = b""
    blocks_per_chunk: int = 0
    max_hit_blocks: int = 0

    def block_hashes(self, begin: int, end: int) -> bytes:
        return self.blocks[begin * WIDTH : end * WIDTH]

    @property
    def tail(self) -> int:
        """The number of blocks after the last whole chunk."""
        return len(self.blocks) // WIDTH % self.blocks_per_chunk if self.blocks_per_chunk else 0

    def max_hit_chunks(self) -> int:
        """The number of chunks that are looked up."""
        return (
            self.max_hit_blocks // self.blocks_per_chunk
            if self.blocks_per_chunk
            else len(self.chunks) // WIDTH
        )

    def after(self, chunk: int) -> bytes:
        """The hashes of the first blocks of ``chunk`` at which a hit may end."""
        begin = chunk * self.blocks_per_chunk
        return self.block_hashes(begin, min(begin + self.blocks_per_chunk - 1, self.max_hit_blocks))

    def ends(self, blocks: int) -> bytes:
        """The hashes of every ``blocks``-th block, and of the last."""
        count = len(self.blocks) // WIDTH
        ends = [*range(blocks - 1, count, blocks), *range(count - 1, count)[: count % blocks]]
        return b"".join(self.block_hashes(end, end + 1) for end in ends)

    def cut(self, chunks: int) -> PromptKeys:
        """The keys of the first ``chunks`` chunks, if there are more."""
        if len(self.chunks) <= chunks * WIDTH:
            return self
        blocks = self.block_hashes(0, chunks * self.blocks_per_chunk)
        max_hit_blocks = min(self.max_hit_blocks, chunks * self.blocks_per_chunk)
        return PromptKeys(
            self.chunks[: chunks * WIDTH], blocks, self.blocks_per_chunk, max_hit_blocks
        )


def prompt_of(
    trace: Trace, request: TraceRequest, chunk_tokens: int, block_tokens: int = 0
) -> PromptKeys:
    """The keys of a request's prompt. With ``block_tokens`` 0 it has keys of chunks only, and only
    of those of whole pieces."""
    piece_tokens = trace.tokens_of(request.engine)
    if not block_tokens:
        return PromptKeys(digests(request.pieces, piece_tokens, chunk_tokens))
    if trace.engines:
        return _recorded(trace, request, chunk_tokens // block_tokens)
    blocks = digests(request.all_pieces, piece_tokens, block_tokens)
    blocks = blocks[: request.input_tokens // block_tokens * WIDTH]
    each, count = chunk_tokens // block_tokens, len(blocks) // WIDTH
    ends = np.frombuffer(blocks, f"V{WIDTH}")[each - 1 :: each]
    max_hit_blocks = min(count, (request.input_tokens - 1) // block_tokens)
    return PromptKeys(ends.tobytes(), blocks, each, max_hit_blocks)


def _recorded(trace: Trace, request: TraceRequest, each: int) -> PromptKeys:
    """The keys of a recorded prompt. If no store recorded the blocks of a chunk, each gets a key
    that no other chunk has."""
    chunks, rest = request.pieces, () if request.rest is None else request.rest
    count = len(chunks) * each
    keys = np.zeros((count + len(rest), 2), np.uint64)
    keys[:count, 0] = np.repeat(chunks, each)
    keys[:count, 1] = np.tile(np.arange(1, each + 1), len(chunks))
    keys[count:, 0] = rest
    for i, chunk in enumerate(chunks.tolist()):
        blocks = trace.blocks.get((request.engine, chunk))
        if blocks is not None:
            keys[i * each : (i + 1) * each] = np.stack([blocks, np.zeros_like(blocks)], axis=1)
    return PromptKeys(digests(chunks, 1, 1), keys.tobytes(), each, len(keys))
