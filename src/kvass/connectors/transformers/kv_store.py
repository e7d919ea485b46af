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
from contextlib import suppress
from typing import Final

import msgspec
import numpy as np

from kvass.blend.place import chunk_keys, place
from kvass.blend.plan import PlacedSegment
from kvass.client.lookups import BlockHashes, Match, Pending
from kvass.client.parallel import ParallelStrategy
from kvass.client.scheduler import SchedulerClient
from kvass.client.segments import SegmentClient
from kvass.client.worker import WorkerClient
from kvass.connectors.transformers.rows import BLOCK, KV, Rows
from kvass.engine.boundary import Boundary
from kvass.errors import Unavailable
from kvass.messages import NO_CONTEXT, Grant, Granted, Ping, ReserveItem, Segments
from kvass.types import U32Array

WIDTH: Final = 32
"""Bytes of a hash."""
ASK_AGAIN_S: Final = 0.001
WAIT_S: Final = 0.25
"""How long a call waits for an answer that the daemon should send at once."""
BLOCKS_PER_RESERVE: Final = 4096
"""Longer prompts are stored in pieces: an engine may be writing a share of the memory only."""


class Hashed:
    """Tokens and the chained hashes of their blocks. A hash covers ``salt``, the block and all
    blocks before it. A chunk's hash is that of its last block."""

    def __init__(self, tokens: list[int], salt: str) -> None:
        self.tokens: U32Array = np.asarray(tokens, "<u4")
        raw, size = self.tokens.tobytes(), 4 * BLOCK
        last = hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
        self._blocks: list[bytes] = []
        for at in range(0, len(raw) // size * size, size):
            last = hashlib.sha256(last + raw[at : at + size]).digest()
            self._blocks.append(last)

    def __len__(self) -> int:
        """How many blocks."""
        return len(self._blocks)

    def of_blocks(self, first: int, end: int) -> bytes:
        return b"".join(self._blocks[first:end])

    def of_chunks(self, count: int, each: int) -> bytes:
        """The hashes of the first ``count`` chunks, which have ``each`` blocks."""
        return b"".join(self._blocks[each - 1 : count * each : each])


class KVStore:
    """One model's connection. Used from one thread. No call raises for an absent daemon."""

    def __init__(
        self,
        socket: str,
        rows: Rows,
        fields: dict[str, str],
        name: str,
        boundary: Boundary,
        daemon_uid: int | None = None,
    ) -> None:
        """``fields``: the namespace; ``name``: the model's, for people."""
        self._rows, self._boundary = rows, boundary
        self.context = NO_CONTEXT
        """What the call in progress says of itself."""
        strategy, instance = ParallelStrategy(), uuid.uuid4().hex
        self._client = SchedulerClient(
            socket,
            strategy.register(instance, fields, rows.chunk_tokens, model=name),
            reserve_wait_s=WAIT_S,
            step_wait_s=WAIT_S,
            daemon_uid=daemon_uid,
        )
        registration = strategy.at(0).register(
            instance, fields, rows.chunk_tokens, rows.layout, model=name
        )
        self._worker = WorkerClient(socket, registration, daemon_uid=daemon_uid)
        self._segments = SegmentClient(self._client, rows.chunk_tokens)
        self._client.start()
        self._worker.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the daemon. Returns whether it is connected."""
        until_s = time.monotonic() + timeout_s
        while not (self._client.connected and self._worker.connected):
            if time.monotonic() >= until_s:
                return False
            time.sleep(ASK_AGAIN_S)
        return True

    def end_session(self) -> None:
        """Say that the client's session of the call in progress ended."""
        self._client.end_session(self.context)

    def close(self) -> None:
        self._client.close()
        self._worker.close()

    # ------------------------------------------------------------ loads

    def prefix(self, name: str, prompt: Hashed, whole: bool) -> tuple[KV, int]:
        """K and V of the longest stored prefix, and its number of tokens. The prompt's last token
        is never part of it. ``whole``: make the tensors long enough for all other tokens."""
        each, most = self._rows.chunk_blocks, len(prompt.tokens) - 1
        end = most // BLOCK

        def blocks_of(chunk: int) -> bytes:
            return prompt.of_blocks(chunk * each, min((chunk + 1) * each - 1, end))

        chunks = prompt.of_chunks(len(prompt) // each, each)
        match = self._match(name, chunks, blocks_of)
        blocks = 0 if match is None else min(match.chunks * each + match.blocks, end)
        room = max(blocks * BLOCK, most if whole else 0)
        if match is not None:
            kv, firsts = self._rows.zeros(room), range(0, blocks, each)
            places = [
                (row, first * BLOCK, min(each, blocks - first)) for row, first in enumerate(firsts)
            ]
            if self._read(match, places, kv):
                return kv, blocks * BLOCK
        return self._rows.zeros(room if whole else 0), 0

    def segments(
        self, name: str, prompt: Hashed, space: bytes, first: int, kv: KV
    ) -> tuple[PlacedSegment, ...]:
        """Load indexed chunks that stand in the prompt from token ``first`` on into ``kv``, at
        their places in the prompt, with K as it was stored. The last token is left out."""
        each = self._rows.chunk_tokens
        found = self.find(name, prompt.tokens[:-1], space, first)
        keys = chunk_keys(found, WIDTH)
        match = self._match(f"{name}, segments", b"".join(keys)) if keys else None
        if match is None:
            return ()
        segments, rows = place(found, WIDTH, each, match.chunks)
        places = [
            (row, segment.new_start + at * each, each // BLOCK)
            for segment, of_one in zip(segments, rows, strict=True)
            for at, row in enumerate(of_one)
        ]
        return tuple(segments) if self._read(match, places, kv) else ()

    def find(self, name: str, tokens: U32Array, space: bytes, first: int = 0) -> Segments:
        """Indexed chunks that stand in ``tokens`` from token ``first`` on."""
        self._client.new_step()
        text = tokens.tobytes()
        while True:
            found = self._segments.find_segments(name, space, text, WIDTH, first)
            if not isinstance(found, Pending):
                return found
            time.sleep(ASK_AGAIN_S)
            self._client.new_step()

    def _match(self, name: str, digests: bytes, blocks: BlockHashes | None = None) -> Match | None:
        """The rows of the longest prefix of ``digests``; the caller owns the lease."""
        self._client.new_step()
        try:
            while isinstance(
                self._client.match(name, digests, WIDTH, 0, self.context, blocks), Pending
            ):
                time.sleep(ASK_AGAIN_S)
                self._client.new_step()
            return self._client.take(name)
        finally:
            self._client.give_back(name)

    def _read(self, match: Match, places: list[tuple[int, int, int]], kv: KV) -> bool:
        """Copy rows of ``match``: ``places`` are (row, first token, blocks). Returns whether all
        were copied in time. Settles the lease."""
        if not self._client.handed_over([match.lease], [], match.boot):
            self._client.release(match.boot, match.lease)
            return False
        try:
            arena = self._worker.arena(match.boot, match.given_s)
            if arena is None:
                return False
            offsets = match.slots[0].offsets(0, self._rows.shard_bytes).tolist()
            with arena as memory:
                for row, token, blocks in places:
                    self._rows.load(memory, offsets[row], kv, token, blocks)
            if time.monotonic() < match.deadline_s:
                return True
            self._boundary.count("load_late", "a load ended late and counts as a miss")
            return False
        finally:
            self._worker.release(match.boot, match.lease)

    # ------------------------------------------------------------ stores

    def save(self, name: str, known: Hashed, kv: KV, loaded: int) -> int:
        """Store all whole blocks after the first ``loaded`` tokens; how many tokens were new."""
        each, blocks, stored = self._rows.chunk_blocks, len(known), 0
        chunks = blocks // each
        first = loaded // BLOCK // each
        while max(first * each, loaded // BLOCK) < blocks:
            end = min(chunks, first + max(1, BLOCKS_PER_RESERVE // each))
            last = blocks if end == chunks else end * each
            item = ReserveItem(
                *(name, known.of_chunks(end, each), first, 1),
                known.of_blocks(first * each, last),
                **msgspec.structs.asdict(self.context),
            )
            self._client.new_step()
            granted = self._client.reserve([item], WIDTH)
            if granted is None:
                break
            grant = granted.grants[0]
            if grant.reservation:
                stored += self._write(granted, grant, kv, last)
            after = end if grant.later < 0 else grant.later
            if after == first or (last == blocks and grant.later < 0):
                break
            first = after
        if stored:  # what was just stored is there for whoever asks from now on
            with suppress(Unavailable):
                self._worker.call(Ping(), WAIT_S)
        return stored

    def index(self, known: Hashed, space: bytes, first: int) -> None:
        """Index the stored whole chunks from token ``first`` on, for other prompts."""
        each = self._rows.chunk_tokens
        begin, end = first // each, len(known.tokens) // each
        if begin < end:
            digests = known.of_chunks(end, self._rows.chunk_blocks)
            packed = known.tokens[begin * each : end * each].tobytes()
            at = begin * WIDTH
            predecessor = digests[max(0, at - WIDTH) : at]
            self._segments.index_chunks(
                space, digests[at:], WIDTH, packed, start=begin * each, predecessor=predecessor
            )

    def _write(self, granted: Granted, grant: Grant, kv: KV, end: int) -> int:
        """Copy into granted rows, up to block ``end``, and settle the reservation.

        Returns how many tokens were written."""
        if not self._client.handed_over([], [grant.reservation], granted.boot):
            self._client.abort(granted.boot, grant.reservation)
            return 0
        written, each, settle = 0, self._rows.chunk_blocks, self._worker.abort
        try:
            arena = self._worker.arena(granted.boot, granted.given_s)
            if arena is not None:
                offsets = grant.slots[0].offsets(0, self._rows.shard_bytes).tolist()
                with arena as memory:
                    for offset, chunk in zip(offsets, grant.rows()[0], strict=True):
                        blocks = min(each, end - chunk * each)
                        arena.prepare(offset, offset + self._rows.shard_bytes)
                        self._rows.store(memory, offset, kv, chunk * each * BLOCK, blocks)
                        written += blocks * BLOCK
                settle = self._worker.commit
        finally:
            settle(granted.boot, grant.reservation)
        return written
