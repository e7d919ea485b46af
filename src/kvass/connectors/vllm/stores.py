"""Storing, on the scheduler's side: what of a step to store, where to, and which blocks to hold.

Laws of this file:

- A chunk is offered to the daemon in the step that computes it for good and knows its hash. It is
  offered again only if the daemon gave no answer; a key that is not granted is not.
- A step waits for the daemon's answer for a moment only. If none has come, all blocks of the offer
  are held, and the store is planned in the step in which the answer arrives, whatever has become of
  the request. Until then the engine keeps stepping.
- A late answer is not awaited for ever: not longer than ``SchedulerClient.granted`` allows, and not
  when vLLM has too few blocks. Then the blocks are given back at once.
- Blocks are held from the step that plans their store until every rank has reported that step;
  finish, abort and preemption need nothing more. The engine waits for them no longer than a copy
  may take: one that hangs costs its blocks.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from kvass.client.scheduler import Pending, Reserving, SchedulerClient
from kvass.connectors.vllm import adapt
from kvass.connectors.vllm.adapt import Pool, Salted
from kvass.connectors.vllm.engine import Setup
from kvass.connectors.vllm.metadata import StepReport, StepWork, Store
from kvass.engine.adapters import Adapters, NoSalt
from kvass.layout.spans import Spans, States, Table
from kvass.messages import Grant, Granted, ReserveItem
from kvass.types import Slots

KEYS_PER_STEP: Final = 16_384
"""Chunks named in one reserve, half of what a message may carry; the rest waits a step."""

ITEMS_PER_STEP: Final = 1024
"""Items in one reserve, as many as a message may have; the rest waits a step."""

MAX_PAUSE: Final = 8
"""At most this many steps pass before a daemon that refused a whole reserve is asked again."""

NEVER: Final = sys.maxsize

HUNG_S: Final = 5.0
"""What is reported so much after its deadline, if ever: a copy in order ends there, as too late."""

POOL_SHARE: Final = 4
"""Offers without an answer keep at most one of so many of the engine's blocks from being free."""


@dataclass
class Tracked:
    """What we know of one live request. ``offered``: chunks before this one were offered, or were
    loaded; ``local`` tokens were the engine's own when it last asked for a match; ``attempted``:
    its one load was begun.

    Of one that an adapter computes: ``asked`` is the step in which its match was first asked for,
    ``due`` the step since which so many chunks await word of the adapter; ``salted`` its hashes.
    """

    request: Any
    offered: int = 0
    local: int = 0
    attempted: bool = False
    asked: int | None = None
    due: tuple[int, int] | None = None
    salted: Salted = field(default_factory=Salted)

    def offer_again(self, since: int = 0) -> None:
        """Offer the chunks from ``since`` on once more."""
        if self.offered != NEVER:
            self.offered = min(self.offered, since)


@dataclass
class Offer:
    """One item of a reserve, which ends before chunk ``end``, and what it takes to carry it out.
    ``since`` and ``ready``: the request's chunks from one to the other are decided by the answer.
    """

    tracked: Tracked
    item: ReserveItem
    end: int
    since: int
    ready: int
    table: Table
    states: States


@dataclass
class Asked:
    """A reserve, the step that sent it, and the blocks held until it is answered."""

    reserving: Reserving
    offers: list[Offer]
    width: int
    number: int
    held: list[Any] = field(default_factory=list)


@dataclass
class Hold:
    """The blocks of one step's stores. ``until_s``: so long may the ranks' reports take."""

    blocks: list[Any]
    until_s: float


class Stores:
    """Plans one engine's stores. Used from the engine's scheduler thread only.

    ``tracked`` are the engine's live requests, by name.
    """

    def __init__(
        self,
        setup: Setup,
        client: SchedulerClient,
        spans: Spans,
        adapters: Adapters,
        tracked: Mapping[str, Tracked],
    ) -> None:
        self._setup = setup
        self._client = client
        self._spans = spans
        self._adapters = adapters
        self._tracked = tracked
        self._pool: Pool | None = None
        self._number = self._step = 0
        self._pause = self._resting = 0
        self._boot = b""
        self._asked: deque[Asked] = deque()
        self._held: dict[int, Hold] = {}
        self._reported: dict[int, int] = {}

    def bind(self, pool: Pool) -> None:
        """The block pool, once the engine has made it."""
        self._pool = pool

    # ------------------------------------------------------------ a step

    def plan(self, output: Any, work: StepWork) -> None:
        """Add the stores that earlier steps asked for and that are granted by now; reserve rows for
        every chunk that this step completes, and add what is granted at once."""
        self._number += 1
        work.number, work.computes = self._number, adapt.computes(output)
        if not self._setup.stores:
            return
        self._collect(work)
        if not self._client.answering:
            return
        if self._resting > 0:
            self._resting -= 1
            return
        offers, width = self._offers(output)
        if offers:
            self._ask(offers, width, self._number, work)

    def _ask(self, offers: list[Offer], width: int, number: int, work: StepWork) -> None:
        """Send a reserve for what step ``number`` completed. If it is not answered now, hold the
        blocks and await it."""
        reserving = self._client.begin_reserve([offer.item for offer in offers], width)
        if reserving is None:
            self._refused()
            return
        for offer in offers:
            offer.tracked.offered = max(offer.tracked.offered, offer.ready)
        asked = Asked(reserving, offers, width, number)
        granted = self._client.granted(reserving)
        if isinstance(granted, Pending):
            assert self._pool is not None
            asked.held = self._pool.hold(i for offer in offers for i in self._sources(offer))
            self._asked.append(asked)
        else:
            self._answered(asked, granted, work)

    def _sources(self, offer: Offer) -> Iterator[int]:
        """Every block that ``offer`` may store."""
        mask, first = offer.item.groups, offer.item.first
        which = [range(first, offer.end)] * mask.bit_count()
        for ids in self._spans.to_store(offer.table, offer.states, mask, which):
            yield from ids

    def _collect(self, work: StepWork) -> None:
        """Plan what was granted since the last step; the daemon answers in order."""
        while self._asked:
            asked = self._asked[0]
            granted = self._client.granted(asked.reserving)
            if isinstance(granted, Pending):
                break
            self._asked.popleft()
            try:
                self._answered(asked, granted, work)
            finally:
                self._give_back(asked)
        if self._asked and self._pool and POOL_SHARE * self._kept() > self._pool.blocks:
            self.drop()

    def _answered(self, asked: Asked, granted: Granted | None, work: StepWork) -> None:
        """Add to the step's metadata what was granted; None: nothing was, or ever will be."""
        if granted is None:
            self._offer_again(asked)
            self._refused()
            return
        self._pause = 0
        if self._boot not in (b"", granted.boot):
            self.offer_anew()
        self._boot = granted.boot
        owed = [grant.reservation for grant in granted.grants if grant.reservation]
        try:
            for offer, grant in zip(asked.offers, granted.grants, strict=True):
                if offer.since <= offer.tracked.offered:
                    offer.tracked.offered = max(offer.tracked.offered, offer.ready)
                if grant.chunks:
                    self._add(work, offer, granted, grant, asked.number)
                    owed.remove(grant.reservation)
        finally:  # what planning did not come to is given back; the rest rides in ``work``
            for reservation in owed:
                self._client.abort(granted.boot, reservation)
        self._ask_again(asked, granted, work)

    def _ask_again(self, asked: Asked, granted: Granted, work: StepWork) -> None:
        """Ask for what the daemon put off, so that others need not wait for it."""
        pairs = list(zip(asked.offers, granted.grants, strict=True))
        left = [
            replace(o, item=msgspec.structs.replace(o.item, first=g.later))
            for o, g in pairs
            if o.item.first <= g.later < o.end
        ]
        decided = any(g.later != o.item.first for o, g in pairs)
        if left and decided and self._client.answering:
            self._ask(left, asked.width, asked.number, work)
        else:
            for offer in left:
                offer.tracked.offer_again(offer.since)

    def drop(self) -> None:
        """Await no answer any more: give the blocks back, and offer the chunks again some steps
        later, if their requests live."""
        if self._asked:
            self._rest()
        while self._asked:
            asked = self._asked.popleft()
            self._client.give_up(asked.reserving)
            self._offer_again(asked)
            self._give_back(asked)

    def _offer_again(self, asked: Asked) -> None:
        for offer in asked.offers:
            offer.tracked.offer_again(offer.since)

    def _give_back(self, asked: Asked) -> None:
        assert self._pool is not None
        held, asked.held = asked.held, []
        self._pool.free(held)

    def _refused(self) -> None:
        """Nothing of a reserve was granted. If the daemon is there, a rank is not, yet."""
        if self._client.answering:
            self._rest()

    def _rest(self) -> None:
        """Ask nothing for some steps, ever more each time."""
        self._resting, self._pause = self._pause, min(2 * self._pause + 1, MAX_PAUSE)

    def _offers(self, output: Any) -> tuple[list[Offer], int]:
        """What this step completes, and the width of a hash."""
        assert self._pool is not None
        offers: list[Offer] = []
        width, budget = 0, KEYS_PER_STEP
        for request_id, scheduled in adapt.step_tokens(output):
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.offered == NEVER:
                continue
            ready = adapt.stored_chunks(tracked.request, scheduled, self._setup)
            left = adapt.boundary_states(output, tracked.request, self._setup, self._pool)
            if ready <= tracked.offered and not left:
                continue
            salt, ready = self._salt_to_store(tracked, ready)
            if salt is None:
                continue
            more, width_of = self._offers_of(output, tracked, ready, left, salt)
            keys = sum(len(offer.item.digests) for offer in more) // max(1, width_of)
            if more and keys <= budget and len(offers) + len(more) <= ITEMS_PER_STEP:
                budget -= keys
                width = width_of
                offers += more
        return offers, width

    def _offers_of(
        self,
        output: Any,
        tracked: Tracked,
        ready: int,
        left: Iterable[tuple[int, int, int]],
        salt: bytes,
    ) -> tuple[list[Offer], int]:
        """What this step completes of one request: an item for each run of chunks of which the
        same groups can be stored, and one for each state that it left at a chunk's end."""
        name = tracked.request.request_id
        table = adapt.step_blocks(output, name)
        assert table is not None, "a request of the step has a block table"
        ready = min(ready, self._spans.covered(table))
        states = {(group, chunk): block for group, block, chunk in left if chunk < ready}
        since = tracked.offered
        hashes, width = adapt.chunk_hashes(
            tracked.request, max(ready, 0), self._setup, salt, tracked.salted
        )
        return [
            Offer(
                tracked,
                ReserveItem(name, hashes[: end * width], begin, mask),
                end,
                since,
                max(since, ready),
                table,
                states,
            )
            for begin, end, mask in self._spans.runs(table, states, since, ready)
        ], width

    def _salt_to_store(self, tracked: Tracked, ready: int) -> tuple[bytes | None, int]:
        """What the keys of an offer need beyond vLLM's hashes, and of how many chunks: those that
        were ready when it was asked for. None: nothing can be offered now."""
        if (adapter := adapt.adapter(tracked.request)) is None:
            return b"", ready
        now = self._adapters.step, ready
        if tracked.due is None or not tracked.offered < tracked.due[1] <= ready:
            tracked.due = now
        since, due = tracked.due
        salt = self._adapters.salt(*adapter, since)
        if isinstance(salt, bytes):
            tracked.due = now
            return salt, due
        if salt is NoSalt.NEVER:
            tracked.offered = NEVER
        return None, 0

    def offer_anew(self) -> None:
        """What was offered so far is gone, and a chunk without its prefix is no use."""
        for tracked in self._tracked.values():
            tracked.offer_again()

    def _add(
        self, work: StepWork, offer: Offer, granted: Granted, grant: Grant, number: int
    ) -> None:
        """Hold the blocks of one grant and put it into the step's metadata."""
        assert self._pool is not None
        mask, count = offer.item.groups, len(self._setup.groups)
        blocks = self._spans.to_store(offer.table, offer.states, mask, grant.rows())
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
        )
        held = self._pool.hold(i for ids in blocks for i in ids)
        self._step = work.step = store.step
        hold = self._held.setdefault(work.step, Hold([], 0.0))
        hold.blocks += held
        hold.until_s = max(hold.until_s, granted.deadline_s + HUNG_S)
        work.stores.append(store)

    def revoke(self, work: StepWork) -> None:
        """Take the stores back out of a step's metadata."""
        self.offer_anew()
        stores, step = work.stores, work.step
        work.stores, work.step = [], 0
        if step in self._held:
            assert self._pool is not None
            self._pool.free(self._held.pop(step).blocks)
        for store in stores:
            self._client.abort(store.boot, store.reservation)

    def settled(self, report: StepReport) -> None:
        """What the ranks reported: finished stores free blocks."""
        for step, ranks in report.steps.items():
            self._reported[step] = self._reported.get(step, 0) + ranks
            if self._reported[step] >= self._setup.strategy.ranks and step in self._held:
                assert self._pool is not None
                self._pool.free(self._held.pop(step).blocks)
                del self._reported[step]

    # ------------------------------------------------------------ the engine's questions

    def storing(self) -> bool:
        """Whether an answer of the daemon or a report of a rank may come, so that the engine must
        keep stepping."""
        return bool(self._asked) or any(True for _ in self._awaited())

    def frees_blocks(self) -> bool:
        """vLLM has too few blocks: whether it has more in the next step if it preempts nobody.

        What awaits a grant is given back for it; for a copy in progress it is to wait.
        """
        if self._pool is None:
            return False
        if self._kept():
            self.drop()
            return True
        return self._pool.waiting(block for hold in self._awaited() for block in hold.blocks) > 0

    def _kept(self) -> int:
        """How many blocks would be free but for offers that await their answer."""
        assert self._pool is not None
        return self._pool.waiting(block for asked in self._asked for block in asked.held)

    def _awaited(self) -> Iterator[Hold]:
        """What is held for copies of which none hangs, as far as we can tell."""
        now_s = time.monotonic()
        return (hold for hold in self._held.values() if now_s < hold.until_s)
