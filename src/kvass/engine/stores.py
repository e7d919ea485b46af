"""The planning of stores in the scheduler: what each step offers to the daemon, and what the ranks
copy.

``offers.py`` makes the offers of a request. ``reserves.py`` keeps the offers that the daemon has
not answered, ``granted_stores.py`` those that it granted, ``ended_requests.py`` the requests that
ended before they were offered, ``held_blocks.py`` the blocks that are held.

Law of this file: a step that only adds one token to each request of the step before, and completes
no chunk, does no work per request here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final

from kvass.client.scheduler import SchedulerClient
from kvass.engine.adapters import Adapters, NoSalt
from kvass.engine.ended_requests import (
    ENDED_PER_STEP,
    REPORT_STEPS,
    EndedRequest,
    EndedRequests,
)
from kvass.engine.granted_stores import GrantedStores
from kvass.engine.held_blocks import POOL_SHARE, CopiedBlocks, freed_by_giving_up
from kvass.engine.offers import OfferMaker, StepOffers, fits_a_step
from kvass.engine.protocols import BlockPool, Step
from kvass.engine.request_state import RequestState
from kvass.engine.reserves import OfferAnswered, Reserves
from kvass.engine.row_events import RowEvents
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import StepWork
from kvass.engine.traffic import EngineTraffic
from kvass.layout.spans import Blocks, Spans, Table

UNLIMITED: Final = sys.maxsize


class StorePlanner:
    """The planner of one engine's stores. Used from the engine's scheduler thread only."""

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
        when_answered: OfferAnswered | None = None,
        when_unstored: Callable[[RequestState], None] | None = None,
    ) -> None:
        self._setup = setup
        self._client = client
        self._adapters = adapters
        self._requests = requests
        self._pool = pool
        self._blocks = CopiedBlocks(pool, setup.strategy.ranks)
        self._granted = GrantedStores(setup, client, spans, self._blocks, events)
        common = setup, client, spans, requests, pool, traffic, self._granted
        self._reserves = Reserves(*common, when_answered, when_unstored)
        self._ended = EndedRequests(pool, self._reserves.count_unstored)
        self._offers = OfferMaker(setup, spans, adapters, pool)
        self._stores = setup.stores
        """Whether anything is stored. ``end`` sets it to False."""
        self._blocks_per_chunk = max(1, setup.chunk_blocks)
        """1 if hits end at chunk boundaries only."""
        self._number = 0
        self._names: Set[str] = frozenset()
        self._quiet_steps = 0
        """How many of the next steps complete no chunk, if each adds one token to each request of
        ``_names``."""

    # ------------------------------------------------------------ a step

    def plan(self, step: Step, work: StepWork) -> None:
        """Add to ``work`` the stores of earlier steps that were granted since. Reserve rows for
        every chunk that this step completes, and add what is granted at once."""
        self._number += 1
        self._adapters.new_step(self._number)
        work.number, work.computes = self._number, step.tokens > 0
        if not self._stores or self._completes_nothing(step):
            return
        self._quiet_steps, self._reserves.must_offer_again = 0, False
        self._reserves.collect(work)
        ended = self._ended.take()
        try:
            if not self._client.answering:
                self._reserves.count_unstored(one.state for one in ended)
            elif self._reserves.backoff.skips_step():
                self._ended.postpone(ended, self._reserves.pending)
                for name, _ in step.requests():  # a request may end before it is offered
                    if (state := self._requests.get(name)) is not None:
                        state.step(self._number)
            else:
                offers = self._offers_of(step, ended)
                if offers.offers:
                    self._reserves.send(offers, self._number, work)
        finally:
            self._ended.taken(ended)

    def _completes_nothing(self, step: Step) -> bool:
        """Whether this step adds one token to each request of the step before and completes no
        chunk, so that there is nothing to do. This is so in most steps, also with hundreds of
        requests."""
        if self._reserves.must_offer_again:
            return False
        idle = self._quiet_steps > 0 and not self._reserves.pending and not self._ended.waiting
        if not idle or step.tokens != len(step.names) or step.names != self._names:
            return False
        self._quiet_steps -= 1
        return not step.boundary_states

    def _offers_of(self, step: Step, ended: Sequence[EndedRequest]) -> StepOffers:
        """The offers of what this step completes and of what ``ended`` requests left."""
        offers = StepOffers()
        if ended:
            self._offer_ended(ended, offers)
        states, left = step.boundary_states, UNLIMITED
        for name, tokens in step.requests():
            state = self._requests.get(name)
            if state is None or state.offered.never:
                continue
            state.step(self._number)
            # Draft tokens are computed, too, but have no hash. Hashed tokens never change.
            computed = state.request.computed_tokens + tokens
            missing = self._offers.tokens_of_next(state) - computed
            left = min(left, missing)
            if missing > 0 and name not in states:
                continue
            left = 0
            more, width = self._offers.of_running(state, step, computed)
            offers.add(more, width)
        self._names, self._quiet_steps = step.names, max(0, left - 1)
        return offers

    # ------------------------------------------------------------ ended requests

    def request_ended(self, state: RequestState, table: Table) -> None:
        """A request ended with the blocks of ``table``. Hold those that were computed and not
        offered, so that the next step can offer them. If no step has computed tokens of the
        request, nothing is held, because its blocks may still be loading."""
        request, offered = state.request, state.offered
        if not self._stores or offered.never:
            return
        computed = min(request.computed_tokens, request.known_tokens - 1) if state.computed else 0
        computed = self._offers.may_be_stored(state, computed)
        blocks = self._offers.blocks(state, computed)
        if not blocks or min(map(len, table), default=0) < blocks:
            if min(computed // self._setup.chunk_tokens, request.hashed_chunks) > offered.chunks:
                self._reserves.count_unstored(
                    [state]
                )  # its whole chunks are not held for a later step
            return
        if self._offers.tail(state, blocks) or blocks // self._blocks_per_chunk > offered.chunks:
            table, first = [ids[:blocks] for ids in table], offered.chunks * self._blocks_per_chunk
            held = self._pool.hold(i for ids in table for i in ids[first:])
            self._ended.waiting.append(EndedRequest(state, table, blocks, self._number, held))

    def _offer_ended(self, ended: Sequence[EndedRequest], offers: StepOffers) -> None:
        """Add the offers of ``ended`` requests. A request whose adapter has no name yet, or whose
        offers do not fit into this step, waits for a later step."""
        later = [*ended[ENDED_PER_STEP:]]
        for one in ended[:ENDED_PER_STEP]:
            named = self._offers.adapter_of(one.state)
            if not isinstance(named, NoSalt):
                more, width = self._offers.of_ended(one.state, one.table, one.blocks, named)
                if not offers.add(more, width) and fits_a_step(more, width):
                    later.append(one)
            elif named is NoSalt.PENDING and self._number - one.number <= REPORT_STEPS:
                self._ended.waiting.append(one)
        if later:
            self._ended.postpone(later, self._reserves.pending)

    # ------------------------------------------------------------ answers and reports

    def abandon_pending(self) -> None:
        """Give up all offers that are not answered, and free their blocks. Chunks of live requests
        are offered again some steps later."""
        self._ended.give_up()
        self._reserves.abandon()

    def end(self) -> None:
        """Store nothing more. What the daemon granted already is still copied and reported."""
        self._stores = False
        self.abandon_pending()

    def hold(self, work: StepWork, blocks: Blocks, deadline_s: float) -> int:
        """As ``GrantedStores.hold``."""
        return self._granted.hold(work, blocks, deadline_s)

    def room_for_checks(self) -> int:
        """How many blocks a check may hold: with those that are being copied, at most a share of
        the pool (``held_blocks.POOL_SHARE``)."""
        return max(0, self._pool.blocks // POOL_SHARE - self._blocks.count)

    def revoke(self, work: StepWork) -> None:
        """Remove the stores from a step's work."""
        self._reserves.offer_everything_again()
        self._granted.revoke(work)

    def reported(self, steps: Mapping[int, int]) -> None:
        """As ``CopiedBlocks.reported``."""
        self._blocks.reported(steps)

    # ------------------------------------------------------------ calls of the engine

    def storing(self) -> bool:
        """Whether the engine must keep stepping, because an answer of the daemon or a report of a
        rank is awaited."""
        return self.offers() > 0 or self._blocks.awaited

    def offers(self) -> int:
        """How many offers are not answered, or not made yet."""
        return len(self._reserves.pending) + len(self._ended.waiting)

    def only_copies(self) -> bool:
        """Whether blocks are being copied and no other block of the pool is in use. An engine may
        keep one for itself."""
        copied, pool = self._blocks.distinct, self._pool
        return copied > 0 and pool.blocks - pool.free_blocks - copied <= 1

    def frees_blocks(self) -> bool:
        """Whether a later step will have more free blocks. The engine calls this when it has too
        few; if True, it need not preempt a request. If an offer has waited for longer than a step,
        all offers are given up and their blocks are freed."""
        pending, ended = self._reserves.pending, self._ended.waiting
        if freed_by_giving_up(self._pool, (*pending, *ended)):
            if min([one.number for one in pending] + [one.number for one in ended]) < self._number:
                self.abandon_pending()
            return True
        return self._blocks.freed_by_reports() > 0
