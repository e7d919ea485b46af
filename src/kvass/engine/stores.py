"""The stores of one engine, in the scheduler. Each stage gets the values of the stage before:

| stage | value | what happens |
|---|---|---|
| offered | ``Offer`` (``offers.py``) | a step completes chunks, or a request has ended |
| reserved | ``Reserved`` | the offers were sent; until the daemon answers, their blocks are held |
| granted | ``Store`` | the daemon gave rows; the store travels in a step's work |
| copied | ``CopiedBlocks`` (``held_blocks.py``) | the ranks copy; the blocks are held |
| settled | a number of a step | every rank has reported the step; the blocks are free |

Laws of this file:

- What an offer takes is not in the way of a first token, where steps are short (``_puts_off``).
- A step that only adds one token to each request of the step before, and completes no chunk, does
  no work per request here.
- If an answer does not come at once, all blocks of the offers are held until it comes or the
  reserve is given up.
- The chunks of a reserve that is given up are offered again. So are those of a reserve that was
  refused for the sake of another request's.
- A granted store is planned, also if its request has ended meanwhile. A grant is either sent in a
  step's work, or its reservation is aborted.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from kvass.client.lookups import Pending
from kvass.client.scheduler import Reserving, SchedulerClient, SendApart
from kvass.engine.adapters import Adapters, NoSalt
from kvass.engine.held_blocks import CopiedBlocks, excess, freed_by_giving_up
from kvass.engine.observers import Observer
from kvass.engine.offers import EndedRequest, Offer, OfferBatch, OfferMaker
from kvass.engine.protocols import BlockPool, Request, Step
from kvass.engine.request_state import RequestState, StoreState
from kvass.engine.setup import EngineSetup
from kvass.engine.step_times import StepTimes
from kvass.engine.step_work import StepWork, Store
from kvass.layout.spans import Table
from kvass.messages import Grant, Granted
from kvass.types import Slots

UNLIMITED: Final = sys.maxsize
MAX_PAUSE: Final = 8
"""The longest pause, in steps, after a daemon refused a whole reserve."""
ENDED_PER_STEP: Final = 64
"""The most ended requests that one step offers. The others wait for the next step."""
SHORT_STEP_S: Final = 0.05
"""Steps that take longer do not feel the time of an offer: 0.2 to 0.6 ms."""
REPORT_STEPS: Final = 4
"""The most steps that an ended request waits for the ranks' report of its LoRA adapter."""


class Backoff:
    """The pause, in steps, after the daemon refused a reserve. The first pause is 0 steps, because
    a rank that was not registered yet is often registered a step later."""

    def __init__(self) -> None:
        self.steps_left = 0
        self._next = 0

    def refused(self) -> None:
        """Pause. Each pause is longer than the one before, up to ``MAX_PAUSE``."""
        self.steps_left, self._next = self._next, min(2 * self._next + 1, MAX_PAUSE)

    def granted(self) -> None:
        """Reset: the pause after the next refusal is 0 steps."""
        self._next = 0

    def skips_step(self) -> bool:
        """Whether this step sends no reserve. Call it once per step: it counts the pause down."""
        if self.steps_left == 0:
            return False
        self.steps_left -= 1
        return True


@dataclass
class Reserved:
    """A batch that was sent and is not answered. ``held``: the blocks of its offers."""

    batch: OfferBatch
    reserving: Reserving
    held: list[Any]


class StorePlanner:
    """The planner of one engine's stores. Used from the engine's scheduler thread only.
    ``observers``: told of each answer, and of each ended request that is not stored whole.
    ``times``: of the engine's steps."""

    def __init__(
        self,
        setup: EngineSetup,
        client: SchedulerClient,
        adapters: Adapters,
        requests: Mapping[str, RequestState],
        pool: BlockPool,
        observers: Sequence[Observer],
        times: StepTimes,
    ) -> None:
        self._setup = setup
        self._client = client
        self._adapters = adapters
        self._requests = requests
        self._pool = pool
        self._observers, self._times = observers, times
        self._spans = setup.spans
        self._offers = OfferMaker(setup, adapters, pool)
        self._ended: list[EndedRequest] = []
        """Ended requests that wait to be offered, oldest first."""
        self._reserved: deque[Reserved] = deque()
        """Oldest first: the daemon answers in order."""
        self.copied = CopiedBlocks(pool, setup.strategy.ranks)
        self._backoff = Backoff()
        self._boot = b""
        self._stores = setup.stores
        """Whether anything is stored. ``end`` sets it to False."""
        self._number = 0
        self._names: Set[str] = frozenset()
        self._quiet_steps = 0
        """How many of the next steps complete no chunk, if each adds one token to each request of
        ``_names``."""
        self._must_offer_again = False
        """Whether some chunks must be offered again."""
        self._may_put_off = setup.skip_slow_loads and setup.chunk_blocks > 0
        """Whether a request that ends before the next step leaves its offers."""
        self._put_off = False
        """Whether the last step put its offers off."""

    def plan(self, step: Step, work: StepWork) -> None:
        """Add to ``work`` the stores of earlier steps that were granted since. Reserve rows for
        every chunk that this step completes, and add what is granted at once."""
        self._number += 1
        self._adapters.new_step(self._number)
        work.number, work.computes = self._number, step.tokens > 0
        if not self._stores or self._completes_nothing(step):
            return
        self._quiet_steps, self._must_offer_again = 0, False
        self._collect(work)
        ended, self._ended = self._ended, []
        try:
            if not self._client.answering:
                self._unstored(one.state for one in ended)
            elif self._backoff.skips_step() or self._puts_off(step, work, ended):
                self._wait(ended)
                for name, _ in step.requests():  # a request may end before it is offered
                    if (state := self._requests.get(name)) is not None:
                        state.step(self._number)
            else:
                batch = self._offered(step, ended)
                self._reserve([batch] if batch.offers else [], work)
        finally:
            waiting = set(self._ended)
            for one in ended:
                if one not in waiting:
                    self._pool.free(one.held)

    def _completes_nothing(self, step: Step) -> bool:
        """Whether this step adds one token to each request of the step before and completes no
        chunk, so that there is nothing to do. This is so in most steps, also with hundreds of
        requests."""
        if self._must_offer_again:
            return False
        idle = self._quiet_steps > 0 and not self._reserved and not self._ended
        if not idle or step.tokens != len(step.names) or step.names != self._names:
            return False
        self._quiet_steps -= 1
        return not step.boundary_states

    def _puts_off(self, step: Step, work: StepWork, ended: Sequence[EndedRequest]) -> bool:
        """Whether the offers are left to the next step, because this one computes a first token,
        which would come later. Not twice in a row, not in long steps, and not if blocks are short:
        a request that is preempted before the next step leaves nothing, and ``ended`` requests
        that hold too much are dropped if they wait. Nor if a request ends with that token: as soon
        as it is there, another engine may be asked for what comes next, and look for its prompt."""
        last, self._put_off = self._put_off, False
        short = 0 < self._times.recent_s < SHORT_STEP_S
        if last or not (work.computes and self._may_put_off and short):
            return False
        if 2 * self._pool.free_blocks < self._pool.blocks:
            return False
        if ended and excess(self._pool, (*self._reserved, *ended)) > 0:
            return False
        first = list[Request]()
        for name, tokens in step.requests():
            state = self._requests.get(name)
            if state is None or state.offered.state is not StoreState.PREFILL:
                continue
            if state.request.computed_tokens + tokens >= state.request.known_tokens:
                first.append(state.request)
        self._put_off = bool(first) and not any(one.ends_at_once for one in first)
        return self._put_off

    # ------------------------------------------------------------ offered

    def _offered(self, step: Step, ended: Sequence[EndedRequest]) -> OfferBatch:
        batch = OfferBatch(self._number)
        if ended:
            self._offer_ended(ended, batch)
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
            batch.add(more, width)
        self._names, self._quiet_steps = step.names, max(0, left - 1)
        return batch

    def request_ended(self, state: RequestState, table: Table) -> None:
        """A request ended with the blocks of ``table``. Hold those that were computed and not
        offered, so that the next step can offer them. If no step has computed tokens of the
        request, nothing is held, because its blocks may still be loading."""
        if not self._stores or state.offered.never:
            return
        ended = self._offers.left_by(state, table, self._number)
        if isinstance(ended, EndedRequest):
            self._ended.append(ended)
        elif ended:
            self._unstored([state])

    def _offer_ended(self, ended: Sequence[EndedRequest], batch: OfferBatch) -> None:
        """Add the offers of ``ended`` requests. A request whose adapter has no name yet, or whose
        offers do not fit into this step, waits for a later step."""
        later = [*ended[ENDED_PER_STEP:]]
        for one in ended[:ENDED_PER_STEP]:
            named = self._offers.adapter_of(one.state)
            if not isinstance(named, NoSalt):
                more, width = self._offers.of_ended(one, named)
                if not batch.add(more, width) and OfferBatch(0).add(more, width):
                    later.append(one)
            elif named is NoSalt.PENDING and self._number - one.number <= REPORT_STEPS:
                self._ended.append(one)
        if later:
            self._wait(later)

    def _wait(self, ended: Sequence[EndedRequest]) -> None:
        """Let ``ended`` wait for a later step. If what waits then holds more than its share of the
        pool, give up the newest requests."""
        self._ended += ended
        dropped = list[EndedRequest]()
        over = excess(self._pool, (*self._reserved, *self._ended))
        while over > 0 and self._ended:
            dropped.append(self._ended.pop())
            over -= len(dropped[-1].held)
        self._unstored(one.state for one in dropped)

    def _unstored(self, states: Iterable[RequestState]) -> None:
        """The offers of these requests will not be stored, if they have ended. Live requests can be
        offered again. Without a daemon nobody is told."""
        if self._client.connected:
            live = self._requests
            ended = {s.request.name: s for s in states if live.get(s.request.name) is not s}
            for state in ended.values():
                for each in self._observers:
                    each.unstored(state)

    # ------------------------------------------------------------ reserved

    def _reserve(self, batches: list[OfferBatch], work: StepWork) -> None:
        """Reserve rows for ``batches``. What is granted at once is added to ``work``."""
        while batches:
            batch = batches.pop(0)
            answer = self._send(batch, wait=not work.computes)
            if not isinstance(answer, Pending):
                batches[:0] = self._answered(batch, answer, work)

    def _send(self, batch: OfferBatch, wait: bool) -> Granted | SendApart | Pending | None:
        """Send a batch, and hold its blocks if the answer does not come at once. None: it cannot be
        sent now, or nothing of it is stored."""
        items = [offer.item for offer in batch.offers]
        reserving = self._client.begin_reserve(items, batch.width, wait=wait)
        if reserving is None:
            return None
        for offer in batch.offers:
            offer.state.offered.sent(offer.ready, offer.tail)
        answer = self._client.granted(reserving)
        if isinstance(answer, Pending):
            held = self._pool.hold(i for o in batch.offers for i in o.sources(self._spans))
            self._reserved.append(Reserved(batch, reserving, held))
        return answer

    def _collect(self, work: StepWork) -> None:
        """Take in the answers that came since the last step. If the pending reserves hold more
        than their share of the pool, give up the newest ones."""
        while self._reserved:
            reserved = self._reserved[0]
            answer = self._client.granted(reserved.reserving)
            if isinstance(answer, Pending):
                break
            self._reserved.popleft()
            try:
                self._reserve(self._answered(reserved.batch, answer, work), work)
            finally:
                self._pool.free(reserved.held)
        if self._reserved and excess(self._pool, self._reserved) > 0:
            self._backoff.refused()
            while excess(self._pool, self._reserved) > 0:
                self._give_up(self._reserved.pop())

    def _give_up(self, reserved: Reserved) -> None:
        """Give up one reserve, and free its blocks."""
        self._client.give_up(reserved.reserving)
        self._offer_again(reserved.batch.offers)
        self._pool.free(reserved.held)

    def _offer_again(self, offers: Sequence[Offer]) -> None:
        """Offer the chunks of ``offers`` in a later step, if their requests live."""
        self._must_offer_again = True
        for offer in offers:
            offer.state.offered.offer_again(offer.since)
        self._unstored(offer.state for offer in offers)

    def _offer_everything_again(self) -> None:
        """Offer all chunks of all live requests again, because earlier stores were lost. A chunk is
        useless without its prefix, so all of them are offered."""
        self._must_offer_again = True
        for state in self._requests.values():
            state.offered.offer_again()

    # ------------------------------------------------------------ granted

    def _answered(
        self, batch: OfferBatch, answer: Granted | SendApart | None, work: StepWork
    ) -> list[OfferBatch]:
        """Add the granted stores to ``work``. Returns what must be reserved next."""
        if isinstance(answer, SendApart):  # all was refused for the sake of one offer
            if not (halves := batch.halves()):  # this one: it is not offered again
                self._unstored(offer.state for offer in batch.offers)
            return halves
        if answer is None:
            self._offer_again(batch.offers)
            if self._client.answering:  # some rank is not registered yet
                self._backoff.refused()
            return []
        self._backoff.granted()
        if self._boot not in (b"", answer.boot):
            self._offer_everything_again()
        self._boot = answer.boot
        self._grant(batch, answer, work)
        # The daemon puts chunks off so that other clients need not wait for a large reserve.
        left, grants = batch.put_off(answer.grants, self._setup.chunk_blocks), answer.grants
        decided = any(g.later != o.item.first for o, g in zip(batch.offers, grants, strict=True))
        if decided and left.offers:
            return [left]
        self._offer_again(left.offers)
        return []

    def _grant(self, batch: OfferBatch, granted: Granted, work: StepWork) -> None:
        """Add to ``work`` a store for each grant of rows."""
        owed = {grant.reservation for grant in granted.grants} - {0}
        try:
            for offer, grant in zip(batch.offers, granted.grants, strict=True):
                state = offer.state
                state.offered.granted(offer.since, offer.ready)
                state.kept_chunks = max(state.kept_chunks, grant.kept)
                if grant.chunks:
                    first, before = min(grant.chunks), state.first_stored
                    state.first_stored = first if before is None else min(first, before)
                    work.stores.append(self._store(offer, grant, granted, batch.number, work))
                    owed.remove(grant.reservation)
                for each in self._observers:
                    each.stored(offer, grant, granted)
        finally:  # if planning raised: abort the reservations that are not in ``work``
            for reservation in owed:
                self._client.abort(granted.boot, reservation)

    def _store(
        self, offer: Offer, grant: Grant, granted: Granted, computed: int, work: StepWork
    ) -> Store:
        """The store of one grant. Its blocks are held for the step of ``work``."""
        mask, count, state = offer.item.groups, len(self._setup.groups), offer.state
        blocks = self._spans.to_store(offer.table, offer.boundary_states, mask, grant.rows())
        slots = iter(grant.slots)
        return Store(
            step=self.copied.hold(work, blocks, granted.deadline_s),
            boot=granted.boot,
            reservation=grant.reservation,
            given_s=granted.given_s,
            deadline_s=granted.deadline_s,
            slots=tuple(next(slots) if mask >> g & 1 else Slots() for g in range(count)),
            blocks=blocks,
            computed=computed,
            request=state.request.name,
            trace=state.request.trace,
            adapter=None if offer.named is None else offer.named.held,
            first_step=state.first_step,
        )

    def revoke(self, work: StepWork) -> None:
        """Remove the stores from a step's work, and abort their reservations."""
        self._offer_everything_again()
        stores, work.stores = work.stores, []
        self.copied.revoke(work)
        for store in stores:
            self._client.abort(store.boot, store.reservation)

    # ------------------------------------------------------------ given up

    def abandon_pending(self) -> None:
        """Give up all offers that are not answered, and free their blocks. Chunks of live requests
        are offered again some steps later."""
        ended, self._ended = self._ended, []
        self._unstored(one.state for one in ended)
        for one in ended:
            self._pool.free(one.held)
        if self._reserved:
            self._backoff.refused()
        while self._reserved:
            self._give_up(self._reserved.popleft())

    def end(self) -> None:
        """Store nothing more. What the daemon granted already is still copied and reported."""
        self._stores = False
        self.abandon_pending()

    # ------------------------------------------------------------ calls of the engine

    def storing(self) -> bool:
        """Whether the engine must keep stepping, because an answer of the daemon or a report of a
        rank is awaited."""
        return self.offers() > 0 or self.copied.awaited

    def offers(self) -> int:
        """How many offers are not answered, or not made yet."""
        return len(self._reserved) + len(self._ended)

    def only_copies(self) -> bool:
        """Whether blocks are being copied and no other block of the pool is in use. An engine may
        keep one for itself."""
        copied, pool = self.copied.distinct, self._pool
        return copied > 0 and pool.blocks - pool.free_blocks - copied <= 1

    def frees_blocks(self) -> bool:
        """Whether a later step will have more free blocks. The engine calls this when it has too
        few; if True, it need not preempt a request. If an offer has waited for longer than a step,
        all offers are given up and their blocks are freed."""
        if freed_by_giving_up(self._pool, (*self._reserved, *self._ended)):
            numbers = [one.batch.number for one in self._reserved]
            if min(numbers + [one.number for one in self._ended]) < self._number:
                self.abandon_pending()
            return True
        return self.copied.freed_by_reports() > 0
