"""The scheduler's side: what of a request to look up and load; ``stores.py`` plans the stores.

Laws of this file:

- A request attempts one load in its life.
- vLLM tells nobody when its prefix cache is reset, as is done after new weights. So whatever
  matches or stores looks first whether it was, or should have been: a reset that vLLM refused is
  one too. If so, nothing of before matches any more.
- A lease we took either rides in the step's metadata or is given back; ``SchedulerClient`` keeps
  every other one, and one function of it, ``settle``, ends them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvass.client.scheduler import Match, Pending, SchedulerClient
from kvass.connectors.vllm import adapt
from kvass.connectors.vllm.adapt import Pool
from kvass.connectors.vllm.engine import Setup
from kvass.connectors.vllm.metadata import Load, StepReport, StepWork
from kvass.connectors.vllm.stores import NEVER, Stores, Tracked
from kvass.engine.adapters import Adapters, NoSalt
from kvass.engine.boundary import Boundary
from kvass.engine.prefill_speed import PrefillSpeed
from kvass.layout.spans import Spans

CLEAR_TIMEOUT_S: Final = 0.2
"""How long clearing the cache may hold up the engine; unanswered, it goes on in later steps."""


class SchedulerSide:
    """Plans one engine's stores and loads. Used from the engine's scheduler thread only."""

    def __init__(self, setup: Setup, client: SchedulerClient) -> None:
        self._setup = setup
        self._spans = Spans(setup.groups, setup.chunk_tokens)
        self._client = client
        self._pool: Pool | None = None
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._speed = PrefillSpeed()
        self._adapters = Adapters(setup.adapters)
        self._stores = Stores(setup, client, self._spans, self._adapters, self._tracked)

    def bind(self, block_pool: Any, boundary: Boundary) -> None:
        """The block pool, once the engine has made it."""
        self._pool = Pool(block_pool, lambda: boundary.run(None, self._stores.drop))
        self._stores.bind(self._pool)

    # ------------------------------------------------------------ requests

    def track(self, request: Any) -> None:
        """A request begins."""
        self._notice_reset()
        self._tracked[request.request_id] = Tracked(request)

    def forget(self, request_id: str) -> None:
        """A request ended, in whatever way. Blocks that are being stored stay held."""
        self._tracked.pop(request_id, None)
        self._client.settle(request_id)

    def match(self, request: Any, local: int) -> int | None:
        """Tokens to load beyond the engine's own ``local``; 0: none; None: ask again later."""
        self._notice_reset()
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
        if salt is NoSalt.PENDING:
            return None
        if isinstance(salt, NoSalt):
            self._client.settle(request.request_id)
            return 0
        hashes, width = adapt.chunk_hashes(request, chunks, self._setup, salt, tracked.salted)
        speed = self._speed.tokens_s
        found = self._client.match(request.request_id, hashes, width, first, speed)
        if isinstance(found, Pending):
            return None
        tracked.local = local
        return 0 if found is None else found.chunks * self._setup.chunk_tokens - local

    def _salt_to_read(self, tracked: Tracked) -> bytes | NoSalt:
        """What the keys of a match need beyond vLLM's hashes. A look at an adapter's files goes for
        all asks of one match, however long that takes."""
        if (adapter := adapt.adapter(tracked.request)) is None:
            return b""
        if tracked.asked is None:
            tracked.asked = self._adapters.step
        return self._adapters.salt(*adapter, tracked.asked)

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
        """Add the step's stores to its metadata."""
        self._notice_reset()
        self._speed.step(sum(n for _, n in adapt.step_tokens(output)), time.monotonic())
        self._stores.plan(output, work)

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
        loads, work.loads = work.loads, [Load(load.request) for load in work.loads]
        self._stores.revoke(work)
        for load in loads:
            if load.lease:
                self._client.release(load.boot, load.lease)

    def settled(self, report: StepReport | None, failed: Iterable[str]) -> None:
        """What the ranks reported: finished stores free blocks, failed loads are stored anew."""
        if report is not None:
            self._stores.settled(report)
        for request_id in failed:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.offer_again()
                tracked.due = None

    # ------------------------------------------------------------ the engine's questions

    def storing(self) -> bool:
        """Whether a store is under way, so that the engine must keep stepping."""
        return self._stores.storing()

    def frees_blocks(self) -> bool:
        """Whether a store in progress is all that keeps some block from being free."""
        return self._stores.frees_blocks()

    def clear(self) -> bool:
        """Forget the namespace, and leave it: the weights may be about to be replaced.

        True even if no daemon confirmed it in time: until one has, nothing matches for this engine
        and nothing is stored. vLLM's sleep and pause would fail at anything else.
        """
        if self._pool is not None:
            self._pool.was_reset()  # no second time for this one
        try:
            self._distrust()
        finally:  # a defect of ours must not keep what old weights computed
            try:
                self._client.clear(CLEAR_TIMEOUT_S)
            finally:
                if not self._setup.fixed_weights:
                    self._client.new_generation()
        return True

    def _notice_reset(self) -> None:
        """If vLLM's own prefix cache was reset, take it that the weights are others now."""
        if self._setup.fixed_weights:
            return
        assert self._pool is not None, "without the block pool no reset can be seen"
        if self._pool.was_reset():
            try:
                self._distrust()
            finally:  # the reset is not seen again
                self._client.new_generation()

    def _distrust(self) -> None:
        """What live requests computed so far may come from weights that are gone: it is never
        stored. What they have yet to compute, all of it, is offered anew."""
        self._stores.drop()
        for request_id, tracked in self._tracked.items():
            self._client.settle(request_id)
            tracked.offered = NEVER if adapt.has_computed(tracked.request) else 0

    def close(self) -> None:
        """End the session."""
        self._client.close()
        self._adapters.close()
