"""The daemon's client of one model: loads prefixes and segments, and stores what is new.

Laws of this file:

- What was loaded counts only if every byte was there before the lease's deadline. What comes late,
  or from another boot of the daemon, is a miss.
- Every lease and every reservation is settled before a call returns.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Final

import numpy as np

from kvass.blend.place import chunk_keys, place
from kvass.blend.plan import PlacedSegment
from kvass.client.endpoint import TURN_S
from kvass.client.lookups import Match, Pending
from kvass.client.pages import PageClient
from kvass.client.parallel import ParallelStrategy
from kvass.client.segments import SegmentClient
from kvass.client.worker import ArenaLease
from kvass.connectors.transformers.rows import BLOCK, KV, Rows
from kvass.engine.boundary import Boundary
from kvass.messages import NO_CONTEXT, Granted, Segments
from kvass.types import U32Array

WIDTH: Final = 32
"""Bytes of a hash."""
BLOCKS_PER_RESERVE: Final = 4096
"""Longer prompts are stored in pieces: an engine may be writing a share of the memory only."""


class Hashed:
    """Tokens and the chained hashes of their blocks. A hash covers ``salt``, the block and all
    blocks before it. A chunk's hash is that of its last block."""

    def __init__(self, tokens: list[int], salt: str) -> None:
        self.tokens: U32Array = np.asarray(tokens, "<u4")
        raw, size = self.tokens.tobytes(), 4 * BLOCK
        last = hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
        self.blocks: list[bytes] = []
        for at in range(0, len(raw) // size * size, size):
            last = hashlib.sha256(last + raw[at : at + size]).digest()
            self.blocks.append(last)

    def chunks(self, count: int, each: int) -> list[bytes]:
        """The hashes of the first ``count`` chunks, which have ``each`` blocks."""
        return self.blocks[each - 1 : count * each : each]


class KVStore(PageClient):
    """One model's connection. Used from one thread. No call raises for an absent daemon.

    ``fields``: the namespace; ``name``: the model's, for people.
    """

    def __init__(
        self,
        socket: str,
        rows: Rows,
        fields: dict[str, str],
        name: str,
        boundary: Boundary,
        daemon_uid: int | None = None,
    ) -> None:
        self._rows, self._boundary = rows, boundary
        self.context = NO_CONTEXT
        """What the call in progress says of itself."""
        one, instance, each = ParallelStrategy(), uuid.uuid4().hex, rows.chunk_tokens
        scheduler = one.register(instance, fields, each, model=name)
        rank = one.at(0).register(instance, fields, each, rows.layout, model=name)
        super().__init__(socket, scheduler, [rank], daemon_uid=daemon_uid)
        self._segments = SegmentClient(self._scheduler, each)

    def end_session(self) -> None:
        """Say that the client's session of the call in progress ended."""
        self._scheduler.end_session(self.context)

    # ------------------------------------------------------------ loads

    def prefix(self, prompt: Hashed, whole: bool) -> tuple[KV, int]:
        """K and V of the longest stored prefix, and its number of tokens. The prompt's last token
        is never part of it. ``whole``: make the tensors long enough for all other tokens."""
        each, most = self._rows.chunk_blocks, len(prompt.tokens) - 1
        end = most // BLOCK

        def blocks_of(chunk: int) -> bytes:
            return b"".join(prompt.blocks[chunk * each : min((chunk + 1) * each - 1, end)])

        keys = prompt.chunks(len(prompt.blocks) // each, each)
        with self.read(keys, 0, self.context, self.generation, blocks_of) as given:
            if given is not None:
                match = given[0]
                blocks = min(match.chunks * each + match.blocks, end)
                kv = self._rows.zeros(most if whole else blocks * BLOCK)
                firsts = range(0, blocks, each)
                places = [
                    (row, first * BLOCK, min(each, blocks - first))
                    for row, first in enumerate(firsts)
                ]
                if self._load(given, places, kv):
                    return kv, blocks * BLOCK
        return self._rows.zeros(most if whole else 0), 0

    def segments(
        self, prompt: Hashed, space: bytes, first: int, kv: KV
    ) -> tuple[PlacedSegment, ...]:
        """Load indexed chunks that stand in the prompt from token ``first`` on into ``kv``, at
        their places in the prompt, with K as it was stored. The last token is left out."""
        each = self._rows.chunk_tokens
        found = self.find(prompt.tokens[:-1], space, first)
        if not (keys := chunk_keys(found, WIDTH)):
            return ()
        with self.read(keys, 0, self.context, self.generation) as given:
            if given is None:
                return ()
            segments, rows = place(found, WIDTH, each, given[0].chunks)
            places = [
                (row, segment.new_start + at * each, each // BLOCK)
                for segment, of_one in zip(segments, rows, strict=True)
                for at, row in enumerate(of_one)
            ]
            return tuple(segments) if self._load(given, places, kv) else ()

    def find(self, tokens: U32Array, space: bytes, first: int = 0) -> Segments:
        """Indexed chunks that stand in ``tokens`` from token ``first`` on."""
        name, text = f"{next(self._names)}", tokens.tobytes()  # no other call gets its answer
        try:
            while True:
                self._scheduler.new_step()
                found = self._segments.find_segments(name, space, text, WIDTH, first)
                if not isinstance(found, Pending):
                    return found
                time.sleep(TURN_S)
        finally:
            self._segments.abandon(name)

    def _load(
        self, given: tuple[Match, ArenaLease], places: list[tuple[int, int, int]], kv: KV
    ) -> bool:
        """Copy rows: ``places`` are (row, first token, blocks). Returns whether all were copied in
        time."""
        match, arena = given
        offsets = match.slots[0].offsets(0, self._rows.shard_bytes).tolist()
        for row, token, blocks in places:
            self._rows.load(arena.buffer, offsets[row], kv, token, blocks)
        if time.monotonic() < match.deadline_s:
            return True
        self._boundary.count("load_late", "a load ended late and counts as a miss")
        return False

    # ------------------------------------------------------------ stores

    def save(self, known: Hashed, kv: KV, loaded: int) -> int:
        """Store all whole blocks after the first ``loaded`` tokens; how many tokens were new."""
        each, blocks, stored = self._rows.chunk_blocks, len(known.blocks), 0
        chunks = blocks // each
        first = loaded // BLOCK // each
        while max(first * each, loaded // BLOCK) < blocks:
            end = min(chunks, first + max(1, BLOCKS_PER_RESERVE // each))
            last = blocks if end == chunks else end * each
            hashes = b"".join(known.blocks[first * each : last])
            keys = known.chunks(end, each)
            given = self.reserve(keys, first, self.context, self.generation, blocks=hashes)
            if given is None:
                break
            granted, arena = given
            if arena is not None:
                stored += self._write(granted, arena, kv, last)
            grant = granted.grants[0]
            after = end if grant.later < 0 else grant.later
            if after == first or (last == blocks and grant.later < 0):
                break
            first = after
        return stored

    def index(self, known: Hashed, space: bytes, first: int) -> None:
        """Index the stored whole chunks from token ``first`` on, for other prompts."""
        each = self._rows.chunk_tokens
        begin, end = first // each, len(known.tokens) // each
        if begin < end:
            keys = known.chunks(end, self._rows.chunk_blocks)
            packed = known.tokens[begin * each : end * each].tobytes()
            self._segments.index_chunks(
                *(space, b"".join(keys[begin:]), WIDTH, packed, begin * each),
                predecessor=keys[begin - 1] if begin else b"",
            )

    def _write(self, granted: Granted, arena: ArenaLease, kv: KV, end: int) -> int:
        """Copy into granted rows, up to block ``end``, and settle the reservation.

        Returns how many tokens were written."""
        written, each, whole = 0, self._rows.chunk_blocks, False
        grant = granted.grants[0]
        try:
            with arena as memory:
                offsets = grant.slots[0].offsets(0, self._rows.shard_bytes).tolist()
                for offset, chunk in zip(offsets, grant.rows()[0], strict=True):
                    blocks = min(each, end - chunk * each)
                    arena.prepare(offset, offset + self._rows.shard_bytes)
                    self._rows.store(memory, offset, kv, chunk * each * BLOCK, blocks)
                    written += blocks * BLOCK
                whole = True
        finally:
            self.end_write(granted, whole)
        return written
