"""Pending reserves: the ``Reserve`` messages that the daemon has not answered yet.

Laws of this file:

- If the answer does not come at once, all blocks of the offers are held until the answer comes or
  the reserve is given up.
- A granted store is planned, also if its request has ended meanwhile.
- The chunks of a reserve that is given up are offered again. So are those of a reserve that was
  refused for the sake of another request's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from kvass.client.lookups import Pending
from kvass.client.scheduler import Reserving, SchedulerClient, SendApart
from kvass.engine.granted_stores import GrantedStores
from kvass.engine.held_blocks import excess
from kvass.engine.offers import Offer, StepOffers
from kvass.engine.protocols import BlockPool, Request
from kvass.engine.request_state import RequestState
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import StepWork
from kvass.engine.traffic import EngineTraffic
from kvass.layout.spans import Spans
from kvass.messages import Granted, ReserveItem

MAX_PAUSE: Final = 8
"""The longest pause, in steps, after a daemon refused a whole reserve."""
OfferAnswered = Callable[[Request, int, int], None]
"""A callback with a request, ``first`` and ``end``: the daemon answered the offer of the request's
chunks ``[first, end)``, so they have rows unless the daemon had no room."""


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
class PendingReserve:
    """A reserve that is not answered. ``width``: bytes of a hash. ``number``: the step that
    computed its chunks. ``held``: the blocks held until the answer."""

    reserving: Reserving
    offers: list[Offer]
    width: int
    number: int
    held: list[Any] = field(default_factory=list)


class Reserves:
    """The pending reserves of one engine, in the order in which they were sent."""

    def __init__(
        self,
        setup: EngineSetup,
        client: SchedulerClient,
        spans: Spans,
        requests: Mapping[str, RequestState],
        pool: BlockPool,
        traffic: EngineTraffic,
        granted: GrantedStores,
        when_answered: OfferAnswered | None = None,
        when_unstored: Callable[[RequestState], None] | None = None,
    ) -> None:
        self.pending: deque[PendingReserve] = deque()
        self.backoff = Backoff()
        self.must_offer_again = False
        """Whether some chunks must be offered again. The planner sets it back to False."""
        self._setup = setup
        self._client = client
        self._spans = spans
        self._requests = requests
        self._pool = pool
        self._traffic = traffic
        self._granted = granted
        self._when_answered = when_answered
        self._when_unstored = when_unstored
        self._boot = b""

    def send(self, step: StepOffers, number: int, work: StepWork) -> None:
        """Send a reserve with the offers of step ``number``. If the answer comes at once, add the
        granted stores to ``work``. Otherwise hold the blocks until the answer comes."""
        self._send(step.offers, step.width, number, work)

    def _send(self, offers: list[Offer], width: int, number: int, work: StepWork) -> None:
        items = [offer.item for offer in offers]
        reserving = self._client.begin_reserve(items, width, wait=not work.computes)
        if reserving is None:
            self._offer_again(offers)
            self._refused()
            return
        for offer in offers:
            offer.state.offered.sent(offer.ready, offer.tail)
        reserve = PendingReserve(reserving, offers, width, number)
        granted = self._client.granted(reserving)
        if isinstance(granted, Pending):
            reserve.held = self._pool.hold(i for o in offers for i in o.sources(self._spans))
            self.pending.append(reserve)
        else:
            self._answered(reserve, granted, work)

    def collect(self, work: StepWork) -> None:
        """Add to ``work`` the stores granted since the last step. If the pending reserves hold more
        than their share of the pool, give up the newest ones: the daemon answers in order, so the
        oldest are answered first."""
        while self.pending:
            reserve = self.pending[0]
            granted = self._client.granted(reserve.reserving)
            if isinstance(granted, Pending):
                break
            self.pending.popleft()
            try:
                self._answered(reserve, granted, work)
            finally:
                self._pool.free(reserve.held)
        if self.pending and excess(self._pool, self.pending) > 0:
            self.backoff.refused()
            while excess(self._pool, self.pending) > 0:
                self._abandon(self.pending.pop())

    def abandon(self) -> None:
        """Give up all pending reserves, and free their blocks. Chunks of live requests are offered
        again some steps later."""
        if self.pending:
            self.backoff.refused()
        while self.pending:
            self._abandon(self.pending.popleft())

    def offer_everything_again(self) -> None:
        """Offer all chunks of all live requests again, because earlier stores were lost. A chunk is
        useless without its prefix, so all of them are offered."""
        self.must_offer_again = True
        for state in self._requests.values():
            state.offered.offer_again()

    def count_unstored(self, states: Iterable[RequestState]) -> None:
        """Count those of these requests that have ended: their offers will not be stored. Live
        requests can be offered again. Without a daemon nothing is counted."""
        if self._client.connected:
            live = self._requests
            ended = {s.request.name: s for s in states if live.get(s.request.name) is not s}
            self._traffic.count("unstored_requests", len(ended))
            if self._when_unstored is not None:
                for state in ended.values():
                    self._when_unstored(state)

    def _answered(
        self, reserve: PendingReserve, granted: Granted | SendApart | None, work: StepWork
    ) -> None:
        """Add the granted stores to ``work``. ``granted`` is None if the reserve failed."""
        if isinstance(granted, SendApart):
            self._send_apart(reserve, work)
            return
        if granted is None:
            self._offer_again(reserve.offers)
            self._refused()
            return
        self.backoff.granted()
        if self._boot not in (b"", granted.boot):
            self.offer_everything_again()
        self._boot = granted.boot
        owed = {grant.reservation for grant in granted.grants} - {0}
        try:
            for offer, grant in zip(reserve.offers, granted.grants, strict=True):
                offer.state.offered.granted(offer.since, offer.ready)
                offer.state.kept_chunks = max(offer.state.kept_chunks, grant.kept)
                if grant.chunks:
                    self._granted.add(work, offer, granted, grant, reserve.number)
                    owed.remove(grant.reservation)
                if self._when_answered is not None:
                    self._when_answered(offer.state.request, offer.item.first, offer.end)
        finally:  # if planning raised: abort the reservations that are not in ``work``
            for reservation in owed:
                self._client.abort(granted.boot, reservation)
        self._reserve_later(reserve, granted, work)

    def _reserve_later(self, reserve: PendingReserve, granted: Granted, work: StepWork) -> None:
        """Reserve the chunks that the daemon put off (``Grant.later``). It puts chunks off so that
        other clients need not wait for a large reserve. If it put off everything, a later step
        offers them again."""
        pairs = list(zip(reserve.offers, granted.grants, strict=True))
        left = [
            replace(o, item=self._later(o.item, g.later, reserve.width))
            for o, g in pairs
            if o.item.first <= g.later < o.end
        ]
        decided = any(g.later != o.item.first for o, g in pairs)
        if left and decided and self._client.answering:
            self._send(left, reserve.width, reserve.number, work)
        else:
            self._offer_again(left)

    def _send_apart(self, reserve: PendingReserve, work: StepWork) -> None:
        """The daemon refused all offers for the sake of one. Reserve each half of them again. An
        offer that was refused alone is not offered again."""
        offers, half = reserve.offers, len(reserve.offers) // 2
        if not half:
            self.count_unstored(offer.state for offer in offers)
            return
        for part in (offers[:half], offers[half:]):
            self._send(part, reserve.width, reserve.number, work)

    def _later(self, item: ReserveItem, first: int, width: int) -> ReserveItem:
        """The part of ``item`` from chunk ``first`` on."""
        before = (first - item.first) * self._setup.chunk_blocks * width
        return msgspec.structs.replace(item, first=first, blocks=item.blocks[before:])

    def _abandon(self, reserve: PendingReserve) -> None:
        """Give up one reserve, and free its blocks."""
        self._client.give_up(reserve.reserving)
        self._offer_again(reserve.offers)
        self._pool.free(reserve.held)

    def _offer_again(self, offers: list[Offer]) -> None:
        """Offer the chunks of ``offers`` in a later step, if their requests live."""
        self.must_offer_again = True
        for offer in offers:
            offer.state.offered.offer_again(offer.since)
        self.count_unstored(offer.state for offer in offers)

    def _refused(self) -> None:
        """A whole reserve was refused. If the daemon is there, some rank is not registered yet, so
        pause."""
        if self._client.answering:
            self.backoff.refused()
