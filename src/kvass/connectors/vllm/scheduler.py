"""The scheduler's side: what of a request to look up, load and store, and which blocks to hold.

Laws of this file:

- A chunk is offered once: in the step after which it is computed for good, its hash exists and the
  daemon answers. Without an answer it is offered again; a key that is not granted is not.
- Blocks are held from the step that plans their store until every rank has reported that step;
  finish, abort and preemption need nothing more. The engine waits for them no longer than a copy
  may take: one that hangs costs its blocks.
- A request attempts one load in its life.
- A lease we took either rides in the step's metadata or is given back; ``SchedulerClient`` keeps
  every other one, and one function of it, ``settle``, ends them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvass.client.scheduler import Match, Pending, SchedulerClient
from kvass.connectors.vllm import adapt
from kvass.connectors.vllm.adapt import Pool, Salted
from kvass.connectors.vllm.adapters import Adapters, No
from kvass.connectors.vllm.engine import Setup
from kvass.connectors.vllm.metadata import Load, StepReport, StepWork, Store
from kvass.connectors.vllm.pace import Pace
from kvass.layout.spans import Spans, States, Table
from kvass.messages import Grant, Granted, ReserveItem
from kvass.types import Slots

KEYS_PER_STEP: Final = 32_768
"""Chunks named in one reserve, half of what a message may carry; the rest waits a step."""

MAX_PAUSE: Final = 8
"""At most this many steps pass before a daemon that refused a whole reserve is asked again."""

NEVER: Final = sys.maxsize

HUNG_S: Final = 5.0
"""What is reported so much after its deadline, if ever: a copy in order ends there, as too late."""

CLEAR_TIMEOUT_S: Final = 0.2
"""How long clearing the cache may hold up the engine; unanswered, it goes on in later steps."""


@dataclass
class Tracked:
    """What we know of one live request. ``offered`` chunks are decided; ``local`` tokens were the
    engine's own when it last asked for a match; ``attempted``: its one load was begun.

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


@dataclass
class Offer:
    """One item of a reserve, and what it takes to carry it out. ``since`` and ``ready``: the
    request's chunks from one to the other are decided by the answer."""

    tracked: Tracked
    item: ReserveItem
    since: int
    ready: int
    table: Table
    states: States


@dataclass
class Hold:
    """The blocks of one step's stores. ``until_s``: so long may the ranks' reports take."""

    blocks: list[Any]
    until_s: float


class SchedulerSide:
    """Plans one engine's stores and loads. Used from the engine's scheduler thread only."""

    def __init__(self, setup: Setup, client: SchedulerClient) -> None:
        self._setup = setup
        self._spans = Spans(setup.groups, setup.chunk_tokens)
        self._client = client
        self._pool: Pool | None = None
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._step = 0
        self._pause = self._resting = 0
        self._boot = b""
        self._held: dict[int, Hold] = {}
        self._reported: dict[int, int] = {}
        self._pace = Pace()
        self._adapters = Adapters(setup.adapters)

    def bind(self, pool: Pool) -> None:
        """The block pool, once the engine has made it."""
        self._pool = pool

    # ------------------------------------------------------------ requests

    def track(self, request: Any) -> None:
        """A request begins."""
        self._tracked[request.request_id] = Tracked(request)

    def forget(self, request_id: str) -> None:
        """A request ended, in whatever way. Blocks that are being stored stay held."""
        self._tracked.pop(request_id, None)
        self._client.settle(request_id)

    def match(self, request: Any, local: int) -> int | None:
        """Tokens to load beyond the engine's own ``local``; 0: none; None: ask again later."""
        tracked = self._tracked.get(request.request_id)
        if not self._setup.loads or tracked is None or tracked.attempted:
            return 0
        if not adapt.reads_cache(request):
            return 0
        if not self._client.connected:
            self._client.settle(request.request_id)
            return 0
        chunks, spare = adapt.hashed_chunks(request, self._setup), self._setup.spare
        if not spare and not self._setup.hits_whole_prompts:
            chunks = min(chunks, (adapt.known_tokens(request) - 1) // self._setup.chunk_tokens)
        first = local // self._setup.chunk_tokens
        if chunks - spare <= first:
            self._client.settle(request.request_id)
            return 0
        salt = self._salt_to_read(tracked)
        if salt is No.YET:
            return None
        if isinstance(salt, No):
            self._client.settle(request.request_id)
            return 0
        hashes, width = adapt.chunk_hashes(request, chunks, self._setup, salt, tracked.salted)
        speed = self._pace.tokens_s
        found = self._client.match(request.request_id, hashes, width, first, speed)
        if isinstance(found, Pending):
            return None
        tracked.local = local
        return 0 if found is None else found.chunks * self._setup.chunk_tokens - local

    def _salt_to_read(self, tracked: Tracked) -> bytes | No:
        """What the keys of a match need beyond vLLM's hashes. A look at an adapter's files goes for
        all asks of one match, however long that takes."""
        if (adapter := adapt.adapter(tracked.request)) is None:
            return b""
        if tracked.asked is None:
            tracked.asked = self._adapters.step
        return self._adapters.salt(*adapter, tracked.asked)

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
        if salt is No.EVER:
            tracked.offered = NEVER
        return None, 0

    def allocated(self, request_id: str, blocks: Any, external: int) -> None:
        """The engine gave a request its blocks: begin the load, or give the match back.

        The second call for a request that loaded finds nothing left to give back.
        """
        if (begun := self._tracked.get(request_id)) is not None:
            begun.asked = begun.due = None  # it may have been preempted: its adapter is loaded anew
        if external == 0:
            self._client.settle(request_id)
            return
        tracked, match = self._tracked[request_id], self._client.take(request_id)
        tracked.attempted = True
        load = Load(request_id)
        if match is not None:
            load = self._load(tracked, match, adapt.block_table(blocks), external) or load
            if load.lease == 0:
                self._client.release(match.boot, match.lease)
            elif match.first == 0:
                tracked.offered = max(tracked.offered, match.chunks)
        self._loads.append(load)

    def ensure_load(self, request_id: str) -> None:
        """The engine waits for a load: if none was planned, let it fail."""
        if all(load.request != request_id for load in self._loads):
            self._loads.append(Load(request_id))

    def _load(
        self, tracked: Tracked, match: Match, table: Sequence[Sequence[int]], external: int
    ) -> Load | None:
        """The copy of ``match``; None if the engine asks for other tokens than it holds."""
        chunk_tokens = self._setup.chunk_tokens
        begin = match.first * chunk_tokens
        if tracked.local + external != match.chunks * chunk_tokens or tracked.local < begin:
            return None
        rows = list(map(len, match.slots))
        found = self._spans.to_load(table, tracked.local, match.first, match.chunks, rows)
        if found is None:
            return None
        blocks, skip = found
        return Load(
            request=tracked.request.request_id,
            boot=match.boot,
            lease=match.lease,
            given_s=match.given_s,
            deadline_s=match.deadline_s,
            slots=match.slots,
            blocks=blocks,
            skip=skip,
        )

    # ------------------------------------------------------------ a step

    def take_loads(self) -> StepWork:
        """A new step's metadata, with the loads planned since the last one."""
        work = StepWork(loads=self._loads)
        self._loads = []
        return work

    def plan_stores(self, output: Any, work: StepWork) -> None:
        """Reserve rows for every chunk that this step completes, and add what was granted."""
        self._pace.step(sum(n for _, n in adapt.step_tokens(output)), time.monotonic())
        if not self._setup.stores or not self._client.answering:
            return
        if self._resting > 0:
            self._resting -= 1
            return
        offers, width = self._offers(output)
        if not offers:
            return
        granted = self._client.reserve([offer.item for offer in offers], width)
        if granted is None:
            if self._client.answering:  # refused whole: a rank is not there yet
                self._resting, self._pause = self._pause, min(2 * self._pause + 1, MAX_PAUSE)
            return
        self._pause = 0
        if self._boot not in (b"", granted.boot):
            self._offer_anew()
        self._boot = granted.boot
        owed = [grant.reservation for grant in granted.grants if grant.reservation]
        try:
            for offer, grant in zip(offers, granted.grants, strict=True):
                if offer.since <= offer.tracked.offered:
                    offer.tracked.offered = offer.ready
                if grant.chunks:
                    self._add_store(work, offer, granted, grant)
                    owed.remove(grant.reservation)
        finally:  # what planning did not come to is given back; the rest rides in ``work``
            for reservation in owed:
                self._client.abort(granted.boot, reservation)

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
            if more and keys <= budget:
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
                since,
                max(since, ready),
                table,
                states,
            )
            for begin, end, mask in self._spans.runs(table, states, since, ready)
        ], width

    def _offer_anew(self) -> None:
        """What was offered so far is gone, and a chunk without its prefix is no use."""
        for tracked in self._tracked.values():
            if tracked.offered != NEVER:
                tracked.offered = 0

    def _add_store(self, work: StepWork, offer: Offer, granted: Granted, grant: Grant) -> None:
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
        )
        held = self._pool.hold(i for ids in blocks for i in ids)
        self._step = work.step = store.step
        hold = self._held.setdefault(work.step, Hold([], granted.deadline_s + HUNG_S))
        hold.blocks += held
        work.stores.append(store)

    def hand_over(self, work: StepWork) -> bool:
        """Last act of a step: from here on the ranks settle, and the next step's waits begin.

        False: the daemon cannot be told, so the ranks must not be either: ``revoke``.
        """
        leases = [load.lease for load in work.loads if load.lease]
        writes = [store.reservation for store in work.stores]
        boots = {load.boot for load in work.loads if load.lease}
        boots |= {store.boot for store in work.stores}
        told = not boots or (
            len(boots) == 1 and self._client.handed_over(leases, writes, boots.pop())
        )
        self._client.new_step()
        self._adapters.new_step()
        return told

    def revoke(self, work: StepWork) -> None:
        """Take everything back out of a step's metadata; its loads fail."""
        self._offer_anew()
        loads, stores, step = work.loads, work.stores, work.step
        work.loads, work.stores, work.step = [Load(load.request) for load in loads], [], 0
        if step in self._held:
            assert self._pool is not None
            self._pool.free(self._held.pop(step).blocks)
        for load in loads:
            if load.lease:
                self._client.release(load.boot, load.lease)
        for store in stores:
            self._client.abort(store.boot, store.reservation)

    def settled(self, report: StepReport | None, failed: Iterable[str]) -> None:
        """What the ranks reported: finished stores free blocks, failed loads are stored anew."""
        for step, ranks in report.steps.items() if report is not None else ():
            self._reported[step] = self._reported.get(step, 0) + ranks
            if self._reported[step] >= self._setup.strategy.ranks and step in self._held:
                assert self._pool is not None
                self._pool.free(self._held.pop(step).blocks)
                del self._reported[step]
        for request_id in failed:
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.offered != NEVER:
                tracked.offered, tracked.due = 0, None

    # ------------------------------------------------------------ the engine's questions

    def storing(self) -> bool:
        """Whether ranks still owe a report that may come, so that the engine must keep stepping."""
        return any(True for _ in self._awaited())

    def frees_blocks(self) -> bool:
        """Whether a store in progress is all that keeps some block from being free."""
        held = (block for hold in self._awaited() for block in hold.blocks)
        return self._pool is not None and self._pool.waiting(held)

    def _awaited(self) -> Iterator[Hold]:
        """What is held for copies of which none hangs, as far as we can tell."""
        now_s = time.monotonic()
        return (hold for hold in self._held.values() if now_s < hold.until_s)

    def clear(self) -> bool:
        """Forget the namespace. What live requests computed so far is never stored: it may come
        from weights that are being replaced.

        True even if no daemon confirmed it in time: until one has, nothing matches for this engine
        and nothing is stored. vLLM's sleep and pause would fail at anything else.
        """
        for request_id, tracked in self._tracked.items():
            self._client.settle(request_id)
            if adapt.has_computed(tracked.request):
                tracked.offered = NEVER
        self._client.clear(CLEAR_TIMEOUT_S)
        return True

    def close(self) -> None:
        """End the session."""
        self._client.close()
        self._adapters.close()
