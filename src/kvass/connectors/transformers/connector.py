"""``generate`` with a shared cache: what a prompt's beginning needs is loaded, the rest computed.

Laws of this file:

- No failure of kvass reaches a call of ``generate``: it is a miss, counted in ``counters``. Only
  wrong arguments raise, before anything runs.
- What was loaded is used only if every byte was there before the lease's deadline.
- Nothing is stored that was computed in another state of the model than the namespace says.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from kvass.client.parallel import ParallelStrategy
from kvass.client.scheduler import Match, Pending, SchedulerClient
from kvass.client.worker import WorkerClient
from kvass.config import default_socket
from kvass.connectors.transformers import identity
from kvass.connectors.transformers import model as models
from kvass.connectors.transformers.rows import BLOCK, KV, Rows
from kvass.engine.boundary import Boundary, log
from kvass.engine.setup import choose_chunk_tokens
from kvass.errors import ConfigError
from kvass.messages import Grant, Granted, Ping, ReserveItem
from kvass.types import MAX_BLOCKS

WIDTH: Final = 32
"""Bytes of a hash."""
ASK_AGAIN_S: Final = 0.001
WAIT_S: Final = 0.25
"""How long a call waits for an answer that a daemon gives at once."""
BLOCKS_PER_RESERVE: Final = 4096
"""Longer prompts are stored in pieces: an engine may be writing a share of the memory only."""


@dataclass(frozen=True)
class Reuse:
    """What the last call reused, in tokens: of ``prompt`` so many were ``loaded``; ``stored`` of
    those in the cache afterwards were new to the daemon."""

    prompt: int = 0
    loaded: int = 0
    stored: int = 0


class Hashes:
    """The chained hashes of a prompt's blocks. A chunk has the hash of its last block."""

    def __init__(self, tokens: list[int], salt: str) -> None:
        raw = np.asarray(tokens, "<u8").tobytes()
        last = hashlib.sha256(salt.encode()).digest()
        self.blocks: list[bytes] = []
        for at in range(0, len(tokens) // BLOCK * BLOCK * 8, BLOCK * 8):
            last = hashlib.sha256(last + raw[at : at + BLOCK * 8]).digest()
            self.blocks.append(last)

    def of_blocks(self, first: int, end: int) -> bytes:
        return b"".join(self.blocks[first:end])

    def of_chunks(self, count: int, each: int) -> bytes:
        """Of the first ``count`` chunks of ``each`` blocks."""
        return b"".join(self.blocks[each - 1 : count * each : each])


def connect(
    model: Any,
    *,
    socket: str = "",
    chunk_tokens: int = 0,
    tag: str = "",
    gpu: bool = False,
    wait_s: float = 2.0,
) -> CachedModel:
    """Connect a causal language model of transformers to the daemon at ``socket``, by default
    that of ``KVASS_SOCKET``. ``tag``: models with another share nothing with it.

    Reads all weights once, to name them by content (0.5 to 2 GB/s and core), and computes two
    prompts of four tokens. Waits up to ``wait_s`` for the daemon; without one calls run uncached
    until it comes. Raises ``UsageError`` for a model that cannot be cached, with the reason.
    """
    chunk_tokens = choose_chunk_tokens(chunk_tokens, BLOCK, has_states=False)
    if not BLOCK < chunk_tokens <= BLOCK * MAX_BLOCKS:
        raise ConfigError(f"chunk_tokens {chunk_tokens}: give {2 * BLOCK} to {BLOCK * MAX_BLOCKS}")
    rows = Rows(models.probe(model, gpu), chunk_tokens)
    before, began_s = identity.state(model), time.monotonic()
    fields = identity.describe(model, rows, tag)
    log.info("the weights were named by content in %.1f s", time.monotonic() - began_s)
    cached = CachedModel(
        model, rows, fields, before, socket or os.environ.get("KVASS_SOCKET") or default_socket()
    )
    cached.wait_connected(wait_s)
    return cached


class CachedModel:
    """A model and its connection. Used from one thread. ``last``: what the last call reused;
    ``counters``: failures, by name."""

    def __init__(
        self, model: Any, rows: Rows, fields: dict[str, str], state: object, socket: str
    ) -> None:
        self.model = model
        self.last = Reuse()
        self._rows = rows
        self._state = state
        self._attention = identity.attention(model)
        self._boundary = Boundary()
        self._calls = 0
        instance, one = uuid.uuid4().hex, ParallelStrategy()
        name = str(model.config._name_or_path or type(model).__name__)
        told = instance, fields, rows.chunk_tokens
        self._client = SchedulerClient(
            socket, one.register(*told, model=name), reserve_wait_s=WAIT_S, step_wait_s=WAIT_S
        )
        self._worker = WorkerClient(socket, one.at(0).register(*told, rows.layout, model=name))
        self._client.start()
        self._worker.start()

    @property
    def counters(self) -> Counter[str]:
        return self._boundary.counters

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the daemon; whether it is there."""
        until_s = time.monotonic() + timeout_s
        while not (self._client.connected and self._worker.connected):
            if time.monotonic() >= until_s:
                return False
            time.sleep(ASK_AGAIN_S)
        return True

    def close(self) -> None:
        """End the session. The model is as it was."""
        self._client.close()
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ a call

    def generate(
        self,
        input_ids: Any,
        *,
        salt: str = "",
        tenant: str = "",
        store_answer: bool = True,
        **arguments: Any,
    ) -> Any:
        """``model.generate(input_ids, **arguments)`` for one prompt, with the longest stored prefix
        loaded; then stores what is new, the answer too with ``store_answer``.

        Prompts of another ``salt`` share nothing. ``tenant`` pays for what is stored. Raises
        ``UsageError`` for arguments with which a prefix cannot be reused.
        """
        models.check_call(self.model, input_ids, arguments)
        tokens = input_ids[0].tolist()
        self._calls += 1
        name, usable = f"call {self._calls}", self._unchanged()
        kv: KV | None = None
        if usable:
            kv = self._boundary.run(None, self._load, name, Hashes(tokens, salt), len(tokens))
            self._boundary.run(None, self._client.settle, name)
        loaded = 0 if kv is None else kv[0].shape[2]
        self.last = Reuse(len(tokens), loaded)
        cache = models.new_cache(self.model) if kv is None else models.filled(self.model, kv)
        output = self.model.generate(input_ids, past_key_values=cache, **arguments)
        if usable and self._unchanged():
            if store_answer:
                tokens = getattr(output, "sequences", output)[0].tolist()
            tokens = tokens[: cache.get_seq_length()]
            save = name, Hashes(tokens, salt), models.tensors_of(cache), loaded, tenant
            stored = self._boundary.run(0, self._save, *save)
            self.last = Reuse(self.last.prompt, loaded, stored)
        return output

    def _unchanged(self) -> bool:
        """Whether the model computes now what its namespace says."""
        why = models.passing_state(self.model)
        if self._attention != identity.attention(self.model):
            why = "its attention was changed after connect: connect again"
        elif self._state != identity.state(self.model):
            why = "its weights were changed after connect: connect again"
        if why:
            self._boundary.count("changed", "this call runs uncached: %s", why)
        return not why

    # ------------------------------------------------------------ loads

    def _load(self, name: str, hashes: Hashes, tokens: int) -> KV | None:
        """The K and V of the longest stored prefix, but for the last token, which is computed."""
        match = self._match(name, hashes, tokens)
        if match is None or (match := self._client.take(name)) is None:
            return None
        each = self._rows.chunk_blocks
        blocks = min(match.chunks * each + match.blocks, (tokens - 1) // BLOCK)
        where = [(row * each, min(each, blocks - row * each)) for row in range(-(-blocks // each))]
        kv = self._rows.empty(blocks * BLOCK)
        return kv if self._read(match, where, kv) and blocks else None

    def _match(self, name: str, hashes: Hashes, tokens: int) -> Match | None:
        each, end = self._rows.chunk_blocks, (tokens - 1) // BLOCK
        chunks = hashes.of_chunks(len(hashes.blocks) // each, each)

        def blocks_of(chunk: int) -> bytes:
            return hashes.of_blocks(chunk * each, min((chunk + 1) * each - 1, end))

        self._client.new_step()
        ask = name, chunks, WIDTH, 0, 0.0, "", blocks_of
        while isinstance(found := self._client.match(*ask), Pending):
            time.sleep(ASK_AGAIN_S)
            self._client.new_step()
        return found

    def _read(self, match: Match, where: list[tuple[int, int]], kv: KV) -> bool:
        """Copy the rows of a taken match: row ``i`` to block ``where[i][0]``, so many blocks as
        ``where[i][1]`` says. Whether all was there in time. Settles the lease."""
        if not self._client.handed_over([match.lease], [], match.boot):
            self._client.release(match.boot, match.lease)
            return False
        try:
            arena = self._worker.arena(match.boot, match.given_s)
            if arena is None:
                return False
            offsets = match.slots[0].offsets(0, self._rows.shard_bytes).tolist()
            with arena as memory:
                for offset, (at, blocks) in zip(offsets, where, strict=False):
                    self._rows.load(memory, offset, kv, at * BLOCK, blocks)
            if time.monotonic() < match.deadline_s:
                return True
            self._boundary.count("load_late", "a load ended late and counts as a miss")
            return False
        finally:
            self._worker.release(match.boot, match.lease)

    # ------------------------------------------------------------ stores

    def _save(self, name: str, hashes: Hashes, kv: KV, loaded: int, tenant: str) -> int:
        """Store all whole blocks after the first ``loaded`` tokens; how many tokens were new."""
        each, blocks, stored = self._rows.chunk_blocks, len(hashes.blocks), 0
        chunks = blocks // each
        if not self._client.knows_blocks:
            blocks = chunks * each
        first = loaded // BLOCK // each
        while max(first * each, loaded // BLOCK) < blocks:
            end = min(chunks, first + max(1, BLOCKS_PER_RESERVE // each))
            last = blocks if end == chunks else end * each
            item = ReserveItem(name, hashes.of_chunks(end, each), first, 1, tenant)
            if self._client.knows_blocks:
                item.blocks = hashes.of_blocks(first * each, last)
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
            self._worker.call(Ping(), WAIT_S)
        return stored

    def _write(self, granted: Granted, grant: Grant, kv: KV, end: int) -> int:
        """Copy into granted rows, up to block ``end``, and settle them; the tokens written."""
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
                        self._rows.store(memory, offset, kv, chunk * each * BLOCK, blocks)
                        written += blocks * BLOCK
                settle = self._worker.commit
        finally:
            settle(granted.boot, grant.reservation)
        return written
