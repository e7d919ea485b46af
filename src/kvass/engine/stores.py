"""Planning of stores, in the scheduler: which chunks, into which rows, and which blocks to hold.

Laws of this file:

- A chunk is offered to the daemon in the step that computes it for good and knows its hash. It is
  offered again only if the daemon gave no answer, not if it granted nothing.
- If the answer does not come at once, all blocks of the offer are held, and the store is planned in
  the step in which the answer comes, whatever has become of the request.
- Blocks are held from the step that plans their store until every rank has reported that step. If a
  copy hangs, its blocks stay held, and the engine waits for them no longer.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import numpy as np

from kvass.client.scheduler import Pending, Reserving, SchedulerClient
from kvass.engine.adapters import Adapters, Named, NoSalt
from kvass.engine.protocols import BlockPool, Request, Step
from kvass.engine.row_events import RowEvents
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import StepWork, Store
from kvass.engine.traffic import EngineTraffic
from kvass.layout.spans import Spans, States, Table
from kvass.messages import Grant, Granted, ReserveItem
from kvass.types import Slots

NEVER: Final = sys.maxsize
KEYS_PER_STEP: Final = 16_384
ITEMS_PER_STEP: Final = 1024
"""Hashes and items in one reserve, within the limits of a message; the rest waits a step."""
ENDED_PER_STEP: Final = 64
"""What so many ended requests left is offered in one step; the rest waits a step."""
REPORT_STEPS: Final = 4
"""How long what an ended request left waits for the ranks to report its LoRA adapter."""
BLOCKS_PER_ITEM: Final = 8192
"""An item of more blocks goes without their hashes."""
MAX_PAUSE: Final = 8
"""At most this many steps pass before a daemon that refused a whole reserve is asked again."""
HUNG_S: Final = 5.0
"""How long after its deadline a copy's report is awaited. A working copy ends at its deadline."""
Answered = Callable[[Request, int, int], None]
"""Told of a request that its chunks ``[first, end)`` have a row, if the daemon has room."""
POOL_SHARE: Final = 4
"""What waits to be offered, or for an answer, keeps at most 1 / ``POOL_SHARE`` of the blocks from
being free. What waits longest stays: it is answered first."""


@dataclass
class RequestState:
    """``offered``: chunks before this one were offered for storing, or were loaded; NEVER: none is
    stored any more. ``local``: tokens that the engine had itself when it last asked for a match,
    which ended at token ``end``. ``computed``: tokens up to the end of the last step that was
    looked at (``_goes_on``); 0 while it loads. ``tail``: blocks, whole chunks included, up to the
    end of the last tail that was offered; ``due``: up to the end of the one to be offered.
    ``prefilled``: all of its prompt was computed. ``attempted``: its one load was begun.
    ``stale``: it may be given blocks of weights that are gone (``changes.py``): nothing of it
    matches. ``counted``: the answer to its lookup was counted; it is asked for again until there
    are blocks. ``matched``: the adapter of the last match. ``first_step``: of the steps that
    computed it."""

    request: Request
    offered: int = 0
    local: int = 0
    end: int = 0
    computed: int = 0
    tail: int = 0
    due: int = 0
    prefilled: bool = False
    attempted: bool = False
    stale: bool = False
    counted: bool = False
    matched: Named | None = None
    first_step: int = 0

    def offer_again(self, since: int = 0) -> None:
        """Offer the chunks from ``since`` on once more, and the tail."""
        self.tail = 0
        if self.offered != NEVER:
            self.offered = min(self.offered, since)

    def digests(self, chunks: int, salt: bytes) -> tuple[bytes, int]:
        """The hashes of the first ``chunks`` chunks, back to back, and their width. A ``salt`` is
        mixed in by XOR: the engine's hashes are as good as random, so results are equal only for
        equal hashes and salts."""
        return _joined(self.request.chunk_hashes(0, chunks) if chunks > 0 else (), salt)

    def block_digests(self, first: int, end: int, salt: bytes) -> tuple[bytes, int]:
        """As ``digests``, of blocks ``[first, end)``."""
        return _joined(self.request.block_hashes(first, end) if end > first else (), salt)


def _joined(hashes: Sequence[bytes], salt: bytes) -> tuple[bytes, int]:
    if not hashes:
        return b"", 0
    digests, width = b"".join(hashes), len(hashes[0])
    if salt:
        mask = hashlib.blake2b(salt, digest_size=width).digest() * len(hashes)
        digests = (np.frombuffer(digests, np.uint8) ^ np.frombuffer(mask, np.uint8)).tobytes()
    return digests, width


@dataclass
class Offer:
    """One item of a reserve, up to chunk ``end``, and what it takes to carry it out. With a
    ``tail`` the last chunk ends at that block. The answer decides the request's chunks from
    ``since`` to ``ready``. ``named``: its adapter."""

    state: RequestState
    item: ReserveItem
    end: int
    since: int
    ready: int
    table: Table
    boundary_states: States
    tail: int = 0
    named: Named | None = None


@dataclass(eq=False)
class Ended:
    """What a request left that ended: ``blocks`` blocks in ``table``, of which those that were not
    offered are held until they are, or until the engine needs them. ``number``: of the step before
    its end."""

    state: RequestState
    table: Table
    blocks: int
    number: int
    held: list[Any]


def _keys(offers: Sequence[Offer], width: int) -> int:
    """How many hashes of ``width`` bytes they send."""
    return sum(len(o.item.digests) + len(o.item.blocks) for o in offers) // max(1, width)


@dataclass
class PendingReserve:
    """A reserve, the number of the step that sent it, and the blocks held until it is answered."""

    reserving: Reserving
    offers: list[Offer]
    width: int
    number: int
    held: list[Any] = field(default_factory=list)


@dataclass
class HeldBlocks:
    """The blocks of one step's stores. ``until_s``: so long may the ranks' reports take."""

    blocks: list[Any] = field(default_factory=list)
    until_s: float = 0.0
    reports: int = 0


class StorePlanner:
    """Plans one engine's stores. Used from the engine's scheduler thread only."""

    def __init__(
        self,
        setup: EngineSetup,
        client: SchedulerClient,
        spans: Spans,
        adapters: Adapters,
        requests: Mapping[str, RequestState],
        pool: BlockPool,
        traffic: EngineTraffic,
        events: RowEvents | None = None,
        when_answered: Answered | None = None,
    ) -> None:
        self._setup = setup
        self._client = client
        self._spans = spans
        self._adapters = adapters
        self._requests = requests
        self._pool = pool
        self._traffic = traffic
        self._events = events
        self._when_answered = when_answered
        self._number = self._step = 0
        self._pause = self._pause_left = 0
        self._names: Set[str] = frozenset()
        self._quiet = 0
        """So many steps that add one token to each of ``_names`` complete nothing."""
        self._boot = b""
        self._pending: deque[PendingReserve] = deque()
        self._ended: list[Ended] = []
        self._each = max(1, setup.chunk_blocks)
        self._held: dict[int, HeldBlocks] = {}

    # ------------------------------------------------------------ a step

    def plan(self, step: Step, work: StepWork) -> None:
        """Add the stores that earlier steps asked for and that are granted by now; reserve rows for
        every chunk that this step completes, and add what is granted at once."""
        self._number += 1
        self._adapters.new_step(self._number)
        work.number, work.computes = self._number, step.tokens > 0
        if not self._setup.stores or self._goes_on(step):
            return
        self._quiet = 0
        self._collect(work)
        ended, self._ended = self._ended, []
        try:
            if not self._client.answering:
                self._lost(one.state for one in ended)
                return
            if self._pause_left > 0:
                self._pause_left -= 1
                self._postpone(ended)
                for name, tokens in step.requests():  # it may end before it is offered
                    if (state := self._requests.get(name)) is not None:
                        state.computed = state.request.computed_tokens + tokens
                return
            offers, width = self._offers(step, ended)
            if offers:
                self._reserve(offers, width, self._number, work)
        finally:
            kept = set(self._ended)
            for one in ended:
                if one not in kept:
                    self._pool.free(one.held)

    def _postpone(self, ended: Sequence[Ended]) -> None:
        """Offer in a later step what ``ended`` requests left: as much as may be held."""
        dropped = list[Ended]()
        self._ended += ended
        excess = self._excess((*self._pending, *self._ended))
        while excess > 0 and self._ended:
            dropped.append(self._ended.pop())
            excess -= len(dropped[-1].held)
        self._lost(one.state for one in dropped)

    def _excess(self, waiting: Iterable[PendingReserve | Ended]) -> int:
        """How many blocks too many are not free because of what is ``waiting``."""
        return self._freed_by_abandoning(waiting) - self._pool.blocks // POOL_SHARE

    def _goes_on(self, step: Step) -> bool:
        """Whether nothing is to be done in this step, because it only goes on with the answers of
        the step before. Most steps are so, also with hundreds of requests."""
        idle = self._quiet > 0 and not self._pending and not self._ended
        if not idle or step.tokens != len(step.names) or step.names != self._names:
            return False
        self._quiet -= 1
        return not step.boundary_states

    def _reserve(self, offers: list[Offer], width: int, number: int, work: StepWork) -> None:
        """Send a reserve for what step ``number`` completed. If it is not answered now, hold the
        blocks and await it."""
        items = [offer.item for offer in offers]
        reserving = self._client.begin_reserve(items, width, wait=not work.computes)
        if reserving is None:
            self._lost(offer.state for offer in offers)
            self._refused()
            return
        for offer in offers:
            offer.state.offered = max(offer.state.offered, offer.ready)
            offer.state.tail = max(offer.state.tail, offer.tail)
        reserve = PendingReserve(reserving, offers, width, number)
        granted = self._client.granted(reserving)
        if isinstance(granted, Pending):
            reserve.held = self._pool.hold(i for offer in offers for i in self._sources(offer))
            self._pending.append(reserve)
        else:
            self._answered(reserve, granted, work)

    def _sources(self, offer: Offer) -> Iterator[int]:
        """Every block that ``offer`` may store."""
        mask = offer.item.groups
        which = [range(offer.item.first, offer.end)] * mask.bit_count()
        for ids in self._spans.to_store(offer.table, offer.boundary_states, mask, which):
            yield from ids

    def _collect(self, work: StepWork) -> None:
        """Plan what was granted since the last step; the daemon answers in order."""
        while self._pending:
            reserve = self._pending[0]
            granted = self._client.granted(reserve.reserving)
            if isinstance(granted, Pending):
                break
            self._pending.popleft()
            try:
                self._answered(reserve, granted, work)
            finally:
                self._pool.free(reserve.held)
        if self._pending and self._excess(self._pending) > 0:
            self._back_off()
            while self._excess(self._pending) > 0:
                self._abandon(self._pending.pop())

    def _answered(self, reserve: PendingReserve, granted: Granted | None, work: StepWork) -> None:
        """Add to the step's work what was granted; None: nothing was, or ever will be."""
        if granted is None:
            self._offer_again(reserve.offers)
            self._refused()
            return
        self._pause = 0
        if self._boot not in (b"", granted.boot):
            self._offer_everything_again()
        self._boot = granted.boot
        owed = {grant.reservation for grant in granted.grants} - {0}
        try:
            for offer, grant in zip(reserve.offers, granted.grants, strict=True):
                if offer.since <= offer.state.offered:
                    offer.state.offered = max(offer.state.offered, offer.ready)
                if grant.chunks:
                    self._add(work, offer, granted, grant, reserve.number)
                    owed.remove(grant.reservation)
                if self._when_answered is not None:
                    self._when_answered(offer.state.request, offer.item.first, offer.end)
        finally:  # what planning did not come to is given back; the rest rides in ``work``
            for reservation in owed:
                self._client.abort(granted.boot, reservation)
        self._reserve_later(reserve, granted, work)

    def _reserve_later(self, reserve: PendingReserve, granted: Granted, work: StepWork) -> None:
        """Ask for what the daemon put off, so that others need not wait for it."""
        pairs = list(zip(reserve.offers, granted.grants, strict=True))
        left = [
            replace(o, item=self._later(o.item, g.later, reserve.width))
            for o, g in pairs
            if o.item.first <= g.later < o.end
        ]
        decided = any(g.later != o.item.first for o, g in pairs)
        if left and decided and self._client.answering:
            self._reserve(left, reserve.width, reserve.number, work)
        else:
            self._offer_again(left)

    def _later(self, item: ReserveItem, first: int, width: int) -> ReserveItem:
        """The part of ``item`` from chunk ``first`` on."""
        before = (first - item.first) * self._setup.chunk_blocks * width
        return msgspec.structs.replace(item, first=first, blocks=item.blocks[before:])

    def abandon_pending(self) -> None:
        """Await no answer any more: give the blocks back, and offer the chunks again some steps
        later, if their requests live."""
        ended, self._ended = self._ended, []
        self._lost(one.state for one in ended)
        for one in ended:
            self._pool.free(one.held)
        if self._pending:
            self._back_off()
        while self._pending:
            self._abandon(self._pending.popleft())

    def _abandon(self, reserve: PendingReserve) -> None:
        self._client.give_up(reserve.reserving)
        self._offer_again(reserve.offers)
        self._pool.free(reserve.held)

    def _offer_again(self, offers: list[Offer]) -> None:
        self._quiet = 0
        for offer in offers:
            offer.state.offer_again(offer.since)
        self._lost(offer.state for offer in offers)

    def _lost(self, states: Iterable[RequestState]) -> None:
        """What these requests have is not stored, unless they are offered again. Without a daemon
        there is nothing to lose."""
        if self._client.connected:
            live = self._requests
            ended = {s.request.name for s in states if live.get(s.request.name) is not s}
            self._traffic.count("unstored_requests", len(ended))

    def _offer_everything_again(self) -> None:
        """What was offered so far is gone, and a chunk without its prefix is no use."""
        self._quiet = 0
        for state in self._requests.values():
            state.offer_again()

    def _refused(self) -> None:
        """Nothing of a reserve was granted. If the daemon is there, a rank is not, yet."""
        if self._client.answering:
            self._back_off()

    def _back_off(self) -> None:
        """Ask nothing for some steps, more each time. A rank is often there a step later."""
        self._pause_left, self._pause = self._pause, min(2 * self._pause + 1, MAX_PAUSE)

    def _offers(self, step: Step, ended: Sequence[Ended]) -> tuple[list[Offer], int]:
        """What this step completes and what ``ended`` requests left, and the width of a hash."""
        offers, width, budget = list[Offer](), 0, KEYS_PER_STEP
        if ended:
            offers, width, budget = self._offers_of_ended(ended)
        states, left = step.boundary_states, NEVER
        for name, tokens in step.requests():
            state = self._requests.get(name)
            if state is None or state.offered == NEVER:
                continue
            state.first_step = state.first_step or self._number
            # Drafts are computed too, but have no hash; what has one is never computed again.
            computed = state.computed = state.request.computed_tokens + tokens
            missing = self._next_offer(state) - computed
            left = min(left, missing)
            if missing > 0 and name not in states:
                continue
            left = 0
            ready = min(computed // self._setup.chunk_tokens, state.request.hashed_chunks)
            boundary_states = self._boundary_states(states.get(name, ()), state.request)
            if not state.prefilled and computed >= state.request.known_tokens:
                state.prefilled, state.due = True, self._tail(state, self._blocks(state, computed))
            tail = self._tail(state, state.due) if state.due // self._each == ready else 0
            if ready <= state.offered and not boundary_states and not tail:
                continue
            named = self._adapter_to_store(state)
            if isinstance(named, NoSalt):
                continue
            table = step.block_table(name)
            more, width_of = self._offers_of(table, state, ready, boundary_states, named, tail)
            keys = _keys(more, width_of)
            if more and keys <= budget and len(offers) + len(more) <= ITEMS_PER_STEP:
                budget -= keys
                width = width_of
                offers += more
        self._names, self._quiet = step.names, max(0, left - 1)
        return offers, width

    def _next_offer(self, state: RequestState) -> int:
        """Before so many tokens are computed there is nothing to offer; 0: there may be. Most
        requests of most steps go on with their answer, so this is all that they take."""
        if not state.prefilled or state.due > max(state.tail, state.offered * self._each):
            return 0
        return (state.offered + 1) * self._setup.chunk_tokens

    def _boundary_states(self, left: Iterable[tuple[int, int, int]], request: Request) -> States:
        """Of the states that a step leaves behind, those at a chunk's end; good until its forward
        pass is over. The block may be free or another request's by now: its hash says what it
        holds."""
        states = {}
        for group, block, tokens in left:
            chunks, rest = divmod(tokens, self._setup.chunk_tokens)
            if rest == 0 and 0 < chunks <= request.hashed_chunks:
                (digest,) = request.chunk_hashes(chunks - 1, chunks)
                if self._pool.caches(block, digest, group):
                    states[group, chunks - 1] = block
        return states

    def _blocks(self, state: RequestState, computed: int) -> int:
        """The blocks that are computed and have a hash, if parts of chunks are stored; else 0."""
        each = self._setup.chunk_blocks
        if not each or not self._client.knows_blocks:
            return 0
        return min(computed * each // self._setup.chunk_tokens, state.request.hashed_blocks)

    def _tail(self, state: RequestState, blocks: int) -> int:
        """``blocks``, if they end inside of a chunk and later than what was offered; else 0."""
        return blocks if blocks % self._each and blocks > state.tail else 0

    def _offers_of(
        self,
        table: Table,
        state: RequestState,
        ready: int,
        boundary_states: States,
        named: Named | None,
        tail: int,
    ) -> tuple[list[Offer], int]:
        """What is complete of one request: an item for each run of chunks of which the same groups
        can be stored, and one for each state that it left at a chunk's end. If ``tail`` lies in the
        chunk after those that are ready, the last item has the blocks up to there."""
        name, since, each = state.request.name, state.offered, self._setup.chunk_blocks
        salt = b"" if named is None else named.salt
        ready = min(ready, self._spans.covered(table))
        states = {key: block for key, block in boundary_states.items() if key[1] < ready}
        hashes, width = state.digests(ready, salt)
        runs = self._spans.runs(table, states, since, ready)
        there = tail > 0 and tail // each == ready and min(map(len, table)) >= tail
        if not there or not self._client.knows_blocks:
            tail = 0
        if tail:
            table = [ids[:tail] for ids in table]
            if not runs or runs[-1][1] != ready:
                runs.append((ready, ready, (1 << len(table)) - 1))
        offers = []
        for begin, end, mask in runs:
            item = ReserveItem(name, hashes[: end * width], begin, mask, state.request.tenant)
            last = 0
            if each and self._client.knows_blocks and (end - begin) * each <= BLOCKS_PER_ITEM:
                last = tail if end == ready else 0
                blocks = state.block_digests(begin * each, last or end * each, salt)
                item.blocks, width = blocks
                end += last > 0
            decided = max(since, ready)
            offers.append(Offer(state, item, end, since, decided, table, states, last, named))
        return offers, width

    def request_ended(self, state: RequestState, table: Table) -> None:
        """Hold what a request leaves that was not stored, in the blocks of ``table``, for the next
        step to offer it. Blocks that were computed in no step may still be loading."""
        request = state.request
        computed = min(request.computed_tokens, request.known_tokens - 1) if state.computed else 0
        if not self._setup.stores or state.offered == NEVER:
            return
        blocks = self._blocks(state, computed)
        if not blocks or min(map(len, table), default=0) < blocks:
            if min(computed // self._setup.chunk_tokens, request.hashed_chunks) > state.offered:
                self._lost([state])  # whole chunks alone are not held for a later step
            return
        if self._tail(state, blocks) or blocks // self._each > state.offered:
            table, first = [ids[:blocks] for ids in table], state.offered * self._each
            held = self._pool.hold(i for ids in table for i in ids[first:])
            self._ended.append(Ended(state, table, blocks, self._number, held))

    def _offers_of_ended(self, ended: Sequence[Ended]) -> tuple[list[Offer], int, int]:
        """What ``ended`` requests left, the width of a hash, and how many keys the step may still
        send. Some wait for their salt, and what does not fit waits a step."""
        offers, width, budget = list[Offer](), 0, KEYS_PER_STEP
        later = [*ended[ENDED_PER_STEP:]]
        for one in ended[:ENDED_PER_STEP]:
            named = self._adapter_to_store(one.state)
            if not isinstance(named, NoSalt):
                tail, ready = self._tail(one.state, one.blocks), one.blocks // self._each
                more, width_of = self._offers_of(one.table, one.state, ready, {}, named, tail)
                keys = _keys(more, width_of)
                if more and keys <= budget:
                    budget -= keys
                    width = width_of
                    offers += more
                elif more and keys <= KEYS_PER_STEP:
                    later.append(one)
            elif named is NoSalt.PENDING and self._number - one.number <= REPORT_STEPS:
                self._ended.append(one)
        if later:
            self._postpone(later)
        return offers, width, budget

    def _adapter_to_store(self, state: RequestState) -> Named | NoSalt | None:
        """What is mixed into the hashes of an offer."""
        if (adapter := state.request.adapter) is None:
            return None
        named = self._adapters.to_store(adapter)
        if named is NoSalt.NEVER:
            state.offered = NEVER
        return named

    def _add(
        self, work: StepWork, offer: Offer, granted: Granted, grant: Grant, number: int
    ) -> None:
        """Hold the blocks of one grant and add its store to the step's work."""
        mask, count = offer.item.groups, len(self._setup.groups)
        blocks = self._spans.to_store(offer.table, offer.boundary_states, mask, grant.rows())
        where = iter(grant.slots)
        store = Store(
            step=work.step or self._step + 1,
            boot=granted.boot,
            reservation=grant.reservation,
            given_s=granted.given_s,
            deadline_s=granted.deadline_s,
            slots=tuple(next(where) if mask >> g & 1 else Slots() for g in range(count)),
            blocks=blocks,
            computed=number,
            request=offer.state.request.name,
            trace=offer.state.request.trace,
            adapter=None if offer.named is None else offer.named.held,
            first_step=offer.state.first_step,
        )
        held = self._pool.hold(i for ids in blocks for i in ids)
        self._step = work.step = store.step
        hold = self._held.setdefault(work.step, HeldBlocks())
        hold.blocks += held
        hold.until_s = max(hold.until_s, granted.deadline_s + HUNG_S)
        work.stores.append(store)
        if self._events is not None:
            asked = [g for g in range(count) if mask >> g & 1]
            each = zip(asked, grant.rows(), strict=True)
            whole = offer.end - (offer.tail > 0)  # a tail is announced to nobody
            rows = [(g, c) for g, chunks in each for c in chunks if c < whole]
            digests, width = offer.item.digests, len(offer.item.digests) // max(1, whole)
            self._events.expect(offer.state.request, digests, width, rows, granted.deadline_s)

    def revoke(self, work: StepWork) -> None:
        """Take the stores back out of a step's work."""
        self._offer_everything_again()
        stores, step = work.stores, work.step
        work.stores, work.step = [], 0
        if step in self._held:
            self._pool.free(self._held.pop(step).blocks)
        for store in stores:
            self._client.abort(store.boot, store.reservation)

    def settled(self, steps: Mapping[int, int]) -> None:
        """``steps[s]`` more ranks have settled all stores of step ``s``; the last frees blocks."""
        for step in steps.keys() & self._held.keys():
            hold = self._held[step]
            hold.reports += steps[step]
            if hold.reports >= self._setup.strategy.ranks:
                del self._held[step]
                self._pool.free(hold.blocks)

    # ------------------------------------------------------------ the engine's questions

    def storing(self) -> bool:
        """Whether an answer or a rank's report may come, so that the engine must keep stepping."""
        return bool(self._pending or self._ended or self._awaited())

    def frees_blocks(self) -> bool:
        """The engine has too few blocks: whether it has more in a later step if it preempts
        nobody. Blocks that have awaited a grant for longer than a step are given back for it."""
        if self._freed_by_abandoning((*self._pending, *self._ended)):
            since = [one.number for one in self._pending] + [one.number for one in self._ended]
            if min(since) < self._number:
                self.abandon_pending()
            return True
        return self._pool.freed_by(block for hold in self._awaited() for block in hold.blocks) > 0

    def _freed_by_abandoning(self, waiting: Iterable[PendingReserve | Ended]) -> int:
        return self._pool.freed_by(block for one in waiting for block in one.held)

    def _awaited(self) -> list[HeldBlocks]:
        """What is held for copies that are not known to hang."""
        now_s = time.monotonic()
        return [hold for hold in self._held.values() if now_s < hold.until_s]
