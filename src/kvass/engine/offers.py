"""What a step offers to the daemon: the chunks and the tails of requests that can be stored.

Laws of this file:

- A chunk is offered in the first step that leaves all its tokens computed and hashed. It is offered
  again only if the daemon did not answer, not if the daemon granted nothing.
- A request that ended waits with its last blocks held, until a step offers them or they are given
  up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from kvass.engine.adapters import Adapters, NamedAdapter, NoSalt
from kvass.engine.protocols import BlockPool, Request, Step
from kvass.engine.request_state import RequestState
from kvass.engine.setup import EngineSetup
from kvass.layout.spans import Spans, States, Table
from kvass.layout.windows import Points
from kvass.messages import Grant, ReserveItem

KEYS_PER_STEP: Final = 16_384
"""The most hashes in one reserve. A later step offers the rest."""
ITEMS_PER_STEP: Final = 1024
"""The most items in one reserve. A later step offers the rest."""
BLOCKS_PER_ITEM: Final = 8192
"""An item of more blocks is sent without block hashes."""


@dataclass
class Offer:
    """One item of a reserve, and what is needed to plan its store. It offers the chunks
    ``[item.first, end)``. If ``tail`` is not 0, the last of them is a tail, which ends with block
    ``tail - 1`` of the request. The daemon's answer decides the request's chunks
    ``[since, ready)``. ``named``: the LoRA adapter of the request."""

    state: RequestState
    item: ReserveItem
    end: int
    since: int
    ready: int
    table: Table
    boundary_states: States
    tail: int = 0
    named: NamedAdapter | None = None

    def sources(self, spans: Spans) -> Iterator[int]:
        """The ids of all blocks that this offer may store."""
        mask = self.item.groups
        which = [range(self.item.first, self.end)] * mask.bit_count()
        for ids in spans.to_store(self.table, self.boundary_states, mask, which):
            yield from ids


@dataclass(eq=False)
class EndedRequest:
    """A request that ended with ``blocks`` computed blocks in ``table``. ``held``: those of them
    that were not offered. ``number``: the last step that was planned before the request ended."""

    state: RequestState
    table: Table
    blocks: int
    number: int
    held: list[Any]


@dataclass
class OfferBatch:
    """Offers of step ``number`` for one message. A hash has ``width`` bytes."""

    number: int
    width: int = 0
    offers: list[Offer] = field(default_factory=list)
    _keys: int = 0

    def add(self, offers: Sequence[Offer], width: int) -> bool:
        """Add all offers of one request. False: they do not fit, and none was added."""
        keys = self._keys + _keys(offers, width)
        if keys > KEYS_PER_STEP or len(self.offers) + len(offers) > ITEMS_PER_STEP:
            return False
        if offers:
            self._keys, self.width = keys, width
            self.offers += offers
        return True

    def halves(self) -> list[OfferBatch]:
        """Two batches with the same offers; none if there is one offer."""
        half = len(self.offers) // 2
        parts = (self.offers[:half], self.offers[half:]) if half else ()
        return [replace(self, offers=part) for part in parts]

    def put_off(self, grants: Sequence[Grant], chunk_blocks: int) -> OfferBatch:
        """The chunks that the daemon put off (``Grant.later``)."""
        left = []
        for offer, grant in zip(self.offers, grants, strict=True):
            if (item := offer.item).first <= grant.later < offer.end:
                decided = (grant.later - item.first) * chunk_blocks * self.width
                blocks = item.blocks[decided:]
                later = msgspec.structs.replace(item, first=grant.later, blocks=blocks)
                left.append(replace(offer, item=later))
        return replace(self, offers=left)


def _keys(offers: Sequence[Offer], width: int) -> int:
    """How many hashes of ``width`` bytes ``offers`` have."""
    return sum(len(o.item.digests) + len(o.item.blocks) for o in offers) // max(1, width)


class OfferMaker:
    def __init__(self, setup: EngineSetup, adapters: Adapters, pool: BlockPool) -> None:
        self._setup = setup
        self._spans = setup.spans
        self._adapters = adapters
        self._pool = pool
        self._blocks_per_chunk = max(1, setup.chunk_blocks)
        """1 if hits end at chunk boundaries only."""
        self._summaries = [n for n, group in enumerate(setup.groups) if group.rules.summary]

    def tokens_of_next(self, state: RequestState) -> int:
        """How many tokens must be computed before the request has something to offer. 0: it may
        have something now. For most requests in most steps this is the only call."""
        offered = state.offered
        if not offered.prefilled or offered.due > max(
            offered.tail, offered.chunks * self._blocks_per_chunk
        ):
            return 0
        following = (offered.chunks + 1) * self._setup.chunk_tokens
        most = state.most_stored_tokens
        return following if most is None or following <= most else sys.maxsize

    def of_running(self, state: RequestState, step: Step, computed: int) -> tuple[list[Offer], int]:
        """The offers of a request of ``step`` of which ``computed`` tokens are computed, and the
        width of a hash in bytes."""
        name, offered = state.request.name, state.offered
        most, computed = state.most_stored_tokens, self.may_be_stored(state, computed)
        ready = min(computed // self._setup.chunk_tokens, state.request.hashed_chunks)
        left = [*step.boundary_states.get(name, ()), *self._begins_from(state, step)]
        states = self._boundary_states(left, state.request)
        wanted = (
            state.request.known_tokens if most is None else min(most, state.request.known_tokens)
        )
        if not offered.prefilled and computed >= wanted:
            tail = self.tail(state, self.blocks(state, computed))
            offered.prompt_computed(tail, self._prompt_chunks(wanted))
        tail = (
            self.tail(state, offered.due) if offered.due // self._blocks_per_chunk == ready else 0
        )
        if ready <= offered.chunks and not states and not tail:
            return [], 0
        named = self.adapter_of(state)
        if isinstance(named, NoSalt):
            return [], 0
        return self._offers(step.block_table(name), state, ready, states, named, tail)

    def left_by(self, state: RequestState, table: Table, number: int) -> EndedRequest | bool:
        """What a request left that ended after step ``number``, with its blocks held. Else whether
        whole chunks are lost, because there are no blocks to hold for a later step."""
        request, offered, each = state.request, state.offered, self._blocks_per_chunk
        computed = min(request.computed_tokens, request.known_tokens - 1) if state.computed else 0
        computed = self.may_be_stored(state, computed)
        blocks = self.blocks(state, computed)
        if not blocks or min(map(len, table), default=0) < blocks:
            chunks = min(computed // self._setup.chunk_tokens, request.hashed_chunks)
            return chunks > offered.chunks
        if not self.tail(state, blocks) and blocks // each <= offered.chunks:
            return False
        table, first = [ids[:blocks] for ids in table], offered.chunks * each
        held = self._pool.hold(i for ids in table for i in ids[first:])
        return EndedRequest(state, table, blocks, number, held)

    def of_ended(self, ended: EndedRequest, named: NamedAdapter | None) -> tuple[list[Offer], int]:
        """The offers of a request that ended, and the width of a hash in bytes."""
        tail, ready = self.tail(ended.state, ended.blocks), ended.blocks // self._blocks_per_chunk
        return self._offers(ended.table, ended.state, ready, {}, named, tail)

    def may_be_stored(self, state: RequestState, computed: int) -> int:
        """How many of the ``computed`` tokens the request's hints and the options let it store."""
        most = state.most_stored_tokens
        return computed if most is None else min(computed, most)

    def blocks(self, state: RequestState, computed: int) -> int:
        """How many blocks of the ``computed`` tokens, which may be stored, are hashed. 0 if hits
        cannot end inside a chunk."""
        if not (each := self._setup.chunk_blocks):
            return 0
        return min(computed * each // self._setup.chunk_tokens, state.request.hashed_blocks)

    def tail(self, state: RequestState, blocks: int) -> int:
        """``blocks``, if that many blocks end inside a chunk and after the last tail that was
        offered; else 0."""
        return blocks if blocks % self._blocks_per_chunk and blocks > state.offered.tail else 0

    def adapter_of(self, state: RequestState) -> NamedAdapter | NoSalt | None:
        """The adapter whose salt is mixed into the hashes of an offer. None: the request has no
        adapter."""
        if (adapter := state.request.adapter) is None:
            return None
        named = self._adapters.to_store(adapter)
        if named is NoSalt.NEVER:
            state.offered.stop()
        return named

    def _prompt_chunks(self, tokens: int) -> int:
        """The longest hit of a prompt of ``tokens`` tokens, in chunks. It lacks the last token."""
        return max(0, (tokens - 1) // self._setup.chunk_tokens - self._setup.spare)

    def _points(self, state: RequestState) -> Points:
        """Where hits of later requests may end that begin like this one."""
        if state.offered.prefilled:
            return Points(state.offered.prompt_chunks, state.parts)
        most, known = state.most_stored_tokens, state.request.known_tokens
        return Points(self._prompt_chunks(known if most is None else min(most, known)), state.parts)

    def _begins_from(self, state: RequestState, step: Step) -> Iterator[tuple[int, int, int]]:
        """The states from which ``step`` computes the request, as ``Step.boundary_states``, unless
        they were offered or loaded. The engine had them itself, and does not tell of them."""
        tokens = state.request.computed_tokens
        chunks = tokens // self._setup.chunk_tokens
        if not self._summaries or chunks <= state.offered.chunks:
            return
        table = step.block_table(state.request.name)
        for group in self._summaries:
            for block in self._spans.row(group, table[group], chunks - 1):
                yield group, block, tokens

    def _boundary_states(self, left: Iterable[tuple[int, int, int]], request: Request) -> States:
        """The blocks of the states in ``left`` that are at a chunk's end, by group and chunk. They
        can be read until the forward pass of the step is over. A block may have been given to
        another request since, so its hash in the pool must be that of the chunk."""
        states = {}
        for group, block, tokens in left:
            chunks, rest = divmod(tokens, self._setup.chunk_tokens)
            if rest == 0 and 0 < chunks <= request.hashed_chunks:
                (digest,) = request.chunk_hashes(chunks - 1, chunks)
                if self._pool.caches(block, digest, group):
                    states[group, chunks - 1] = block
        return states

    def _offers(
        self,
        table: Table,
        state: RequestState,
        ready: int,
        boundary_states: States,
        named: NamedAdapter | None,
        tail: int,
    ) -> tuple[list[Offer], int]:
        """The offers of one request, and the width of a hash in bytes. There is one offer for each
        run of chunks of which the same groups can be stored (``Spans.runs``). If the first
        ``tail`` blocks end inside chunk ``ready``, the last offer has that tail, too."""
        name, since, each = state.short_name, state.offered.chunks, self._setup.chunk_blocks
        salt = b"" if named is None else named.salt
        ready = min(ready, self._spans.covered(table))
        states = {key: block for key, block in boundary_states.items() if key[1] < ready}
        hashes, width = state.digests(ready, salt)
        context = msgspec.structs.asdict(state.request.context)
        runs = self._spans.runs(table, states, since, ready, self._points(state))
        if not (tail > 0 and tail // each == ready and min(map(len, table)) >= tail):
            tail = 0
        if tail:
            table = [ids[:tail] for ids in table]
            if not runs or runs[-1][1] != ready:
                runs.append((ready, ready, (1 << len(table)) - 1))
        offers = []
        for begin, end, mask in runs:
            item = ReserveItem(name, hashes[: end * width], begin, mask, **context)
            last = 0
            if each and (end - begin) * each <= BLOCKS_PER_ITEM:
                last = tail if end == ready else 0
                item.blocks, width = state.block_digests(begin * each, last or end * each, salt)
                end += last > 0
            decided = max(since, ready)
            offers.append(Offer(state, item, end, since, decided, table, states, last, named))
        return offers, width
