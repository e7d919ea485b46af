"""The scheduler's half of a connector: which rows a request loads; ``stores.py`` plans the stores.

Laws of this file:

- A request attempts one load in its life.
- Before anything is matched or stored it is asked whether weights were replaced (``changes.py``).
- A lease that was taken either rides in the step's work or is given back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from kvass.client.lookups import Match, Pending
from kvass.client.scheduler import SchedulerClient
from kvass.engine import tracing
from kvass.engine.adapters import Adapters, Named, NoSalt
from kvass.engine.changes import Changes, OwnCache
from kvass.engine.head_of_line import HeadOfLine
from kvass.engine.held_adapters import News
from kvass.engine.protocols import BlockPool, Request, Step
from kvass.engine.request_state import Answer, LoadState, RequestState
from kvass.engine.reserves import Answered
from kvass.engine.row_events import EventMaker, RowEvents
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import Load, StepWork
from kvass.engine.stores import StorePlanner
from kvass.engine.traffic import EngineTraffic
from kvass.layout.spans import Spans, Table

CLEAR_TIMEOUT_S: Final = 0.2
"""How long clearing the cache may hold up the engine. If unanswered, it goes on in later steps."""
ENOUGH_TOKENS: Final = 512
"""Steps of fewer tokens say nothing about the speed of prefill."""
SAMPLES: Final = 16


class Planner:
    """Plans one engine's loads and stores. Used from the engine's scheduler thread only. ``bind``
    comes first. A step calls ``plan``, then ``hand_over``, or if that fails ``revoke``."""

    def __init__(
        self, setup: EngineSetup, make: EventMaker | None = None, *, watched: bool = False
    ) -> None:
        """``make``: of an engine that publishes events of its cache. ``watched``: whatever may
        replace its weights is told to ``noted``, so that a reset of its cache says nothing."""
        self._setup = setup
        self._spans = Spans(setup.groups, setup.chunk_tokens)
        self._client = SchedulerClient(
            setup.socket,
            setup.register(),
            readers=setup.strategy.readers,
            spare=setup.spare,
            incomplete=True,
            daemon_uid=setup.daemon_uid,
        )
        setup.when_named(self._client.complete)
        self._requests: dict[str, RequestState] = {}
        self._changes = Changes(
            self._client, self._requests, fixed=setup.fixed_weights, watched=watched
        )
        self._loads: list[Load] = []
        self._emptied = False
        self._speed = PrefillSpeed()
        self._adapters = Adapters(setup.strategy.ranks, setup.adapters)
        self._line = HeadOfLine() if setup.one_queue else None
        self.traffic = EngineTraffic()
        self._tracing = tracing.begin()
        self.when_answered: Answered | None = None
        """Set it before ``bind``: it is called when the daemon answered what was offered."""
        self.events: RowEvents | None = None
        if make is not None:
            self.events = RowEvents(self._client, make, self.traffic)

    def bind(self, pool: BlockPool) -> None:
        """The block pool, once the engine has made it."""
        self._stores = StorePlanner(
            self._setup,
            self._client,
            self._spans,
            self._adapters,
            self._requests,
            pool,
            self.traffic,
            self.events,
            self.when_answered,
        )
        self._changes.bind(pool, self._stores.abandon_pending)

    @property
    def client(self) -> SchedulerClient:
        """The connection, for what is asked beside prefixes."""
        return self._client

    # ------------------------------------------------------------ requests

    def track(self, request: Request) -> None:
        """A request begins."""
        self._changes.notice()
        state = self._requests[request.name] = RequestState(request)
        if self._changes.state is OwnCache.STALE:
            state.weights_changed(stale=True)
        if (adapter := request.adapter) is not None:
            self._adapters.track(adapter)

    def forget(self, name: str, table: Table = ()) -> None:
        """A request ended, in whatever way; it still has the blocks of ``table``. Those that are
        stored, or will be, stay held."""
        state = self._requests.pop(name, None)
        self._client.settle(name)
        if self._line is not None:
            self._line.ended(name)
        if self._tracing is not None:
            self._tracing.forget(name)
        if state is not None and table:
            self._stores.request_ended(state, table)

    def match(self, name: str, local: int) -> int | None:
        """Tokens to load beyond the engine's own ``local``; 0: none; None: ask again later."""
        if self._line is None:
            return self._match(name, local)
        if self._line.passes(name):
            return None
        tokens: int | None = 0  # what the engine is told if ``_match`` raises
        try:
            tokens = self._match(name, local)
        finally:
            if tokens is not None:
                self._line.answered(name)
        return tokens

    def _match(self, name: str, local: int) -> int | None:
        self._changes.notice()
        state = self._requests.get(name)
        if not self._setup.loads or state is None or not state.may_load:
            return 0
        if not state.request.reads_cache:
            return 0
        first, chunks = local // self._setup.chunk_tokens, self._matchable(state.request)
        end = self._hit_end(state.request, chunks)
        named: Named | NoSalt | None = NoSalt.UNKNOWN
        if self._client.connected and end > local:
            named = self._adapter_to_match(state)
        if named is NoSalt.PENDING:
            return None
        if isinstance(named, NoSalt):
            self._client.settle(name)
            return 0
        salt = b"" if named is None else named.salt
        hashes, width = state.digests(chunks, salt)
        width = width or len(state.request.block_hashes(0, 1)[0])
        blocks = partial(self._blocks_of, state, salt, local, end) if self._in_blocks else None
        speed, tenant = self._speed.tokens_s, state.request.tenant
        if self._tracing is not None and state.state is not LoadState.ANSWERED:
            self._tracing.asked(name)
        found = self._client.match(name, hashes, width, first, speed, tenant, blocks)
        if isinstance(found, Pending):
            if self._tracing is not None and self._client.promoting(name):
                self._tracing.promoting(name)
            return None
        hit = 0
        if found is not None:
            hit = max(0, min(end, self._tokens(found.chunks, found.blocks)) - local)
            if hit == 0:  # of the chunk in which the engine's own hit ends
                self._client.settle(name)
        if state.answered(Answer(local, local + hit, named)):
            self.traffic.looked_up(end - local, hit)
            if self._tracing is not None:
                self._tracing.answered(state.request, end - local, hit)
        return hit

    @property
    def _in_blocks(self) -> bool:
        """Whether a hit may end inside of a chunk."""
        return self._setup.chunk_blocks > 0

    def _tokens(self, chunks: int, blocks: int = 0) -> int:
        each = self._setup.chunk_tokens
        return chunks * each + blocks * each // max(1, self._setup.chunk_blocks)

    def _hit_end(self, request: Request, chunks: int) -> int:
        """The last token that a hit may have. As in the engine's own cache, one that ends at a
        block never has the last token, because that is computed again."""
        if not self._in_blocks:
            return self._tokens(chunks - self._setup.spare)
        below_last = (request.known_tokens - 1) // self._tokens(0, 1)
        return self._tokens(0, min(request.hashed_blocks, below_last))

    def _blocks_of(
        self, state: RequestState, salt: bytes, local: int, end: int, chunk: int
    ) -> bytes:
        """The hashes of the first blocks of ``chunk``, up to token ``end`` of the prompt; none if
        the engine has all these tokens itself."""
        first, block = chunk * self._setup.chunk_blocks, self._tokens(0, 1)
        last = min(first + self._setup.chunk_blocks - 1, end // block)
        if last * block <= local:
            return b""
        return state.block_digests(first, last, salt)[0]

    def _matchable(self, request: Request) -> int:
        if self._setup.spare or self._setup.hits_whole_prompts:
            return request.hashed_chunks
        below_last = (request.known_tokens - 1) // self._setup.chunk_tokens
        return min(request.hashed_chunks, below_last)

    def _adapter_to_match(self, state: RequestState) -> Named | NoSalt | None:
        """What is mixed into the hashes of a match."""
        adapter = state.request.adapter
        return None if adapter is None else self._adapters.to_load(adapter)

    def allocated(self, name: str, table: Table, external: int) -> None:
        """The engine gave a request the blocks of ``table``: begin the load of ``external`` tokens,
        or give the match back if there are none. It may call again, without tokens, while the
        request loads."""
        if self._line is not None:
            self._line.given(name)
        state = self._requests[name]
        if external == 0:
            state.given_blocks()
            self._client.settle(name)
            return
        match = self._client.take(name)
        state.begin_load()
        load = Load(name)
        if match is not None:
            load = self._load(state, match, table, external) or load
            if load.lease == 0:
                self._client.release(match.boot, match.lease)
            elif match.first == 0:
                state.offered.loaded(match.chunks)
            if load.lease:
                self._expect_events(state, match)
        self._loads.append(load)

    def _expect_events(self, state: RequestState, match: Match) -> None:
        """Announce the rows of ``match`` as soon as they are loaded."""
        if self.events is None:
            return
        named = None if state.answer is None else state.answer.named
        digests, width = state.digests(match.chunks, b"" if named is None else named.salt)
        rows = [  # in order: a router ignores a block whose parent it does not know
            (group, chunk)
            for group, slots in enumerate(match.slots)
            for chunk in range(match.chunks - len(slots) + (match.blocks > 0), match.chunks)
        ]
        self.events.expect(state.request, digests, width, rows, match.deadline_s)

    def add_load(self, load: Load) -> None:
        """One more load, whose lease was taken from ``client``."""
        self._loads.append(load)

    def ensure_load(self, name: str) -> None:
        """The engine waits for a load: if none was planned, plan one that fails."""
        if all(load.request != name for load in self._loads):
            self._loads.append(Load(name))

    def _load(self, state: RequestState, match: Match, table: Table, external: int) -> Load | None:
        """The copy of ``match``; None if the engine asks for other tokens than it holds."""
        answer = state.answer
        if answer is None or answer.local + external != answer.end:
            return None
        if answer.local < self._tokens(match.first):
            return None
        rows = list(map(len, match.slots))
        found = self._spans.to_load(table, answer.local, match.first, answer.end, rows)
        if found is None:
            return None
        blocks, skip = found
        return Load(
            request=state.request.name,
            boot=match.boot,
            lease=match.lease,
            given_s=match.given_s,
            deadline_s=match.deadline_s,
            slots=match.slots,
            blocks=blocks,
            skip=skip,
            trace=state.request.trace,
            adapter=None if answer.named is None else answer.named.held,
        )

    # ------------------------------------------------------------ a step

    def plan(self, step: Step, work: StepWork) -> None:
        """Add the loads that were planned since the last step, then the stores. If it raises, the
        loads are there, and perhaps some stores."""
        work.loads, self._loads = self._loads, []
        self._changes.notice()
        if self._changes.state is OwnCache.STALE and step.tokens:
            self._changes.tell()
        work.emptied, self._emptied = self._emptied, False
        self._speed.step(step.tokens, time.monotonic())
        self._stores.plan(step, work)

    def hand_over(self, work: StepWork) -> bool:
        """Last act of a step: from here on the ranks settle, and the next step's waits begin.
        False: the daemon cannot be told, so the ranks must not be either: ``revoke``."""
        told = True
        if work.loads or work.stores:
            loads = [load for load in work.loads if load.lease]
            leases = [load.lease for load in loads]
            writes = [store.reservation for store in work.stores]
            boots = {load.boot for load in loads} | {store.boot for store in work.stores}
            told = not boots or (
                len(boots) == 1 and self._client.handed_over(leases, writes, boots.pop())
            )
        self._client.new_step()
        if self._line is not None:
            self._line.new_step()
        return told

    def revoke(self, work: StepWork) -> None:
        """Take everything back out of a step's work; its loads fail."""
        loads, work.loads = work.loads, [Load(load.request) for load in work.loads]
        self._stores.revoke(work)
        for load in loads:
            if load.lease:
                self._client.release(load.boot, load.lease)

    def reported(
        self, steps: Mapping[int, int], failed: Iterable[str], loaded: Iterable[str] = ()
    ) -> None:
        """What the ranks reported: as ``StorePlanner.reported``, the requests whose load failed,
        which are offered for storing, and all whose load ended."""
        self._stores.reported(steps)
        if self._line is not None:
            self._line.loaded(name for name in loaded if name in self._requests)
        for name in failed:
            if (state := self._requests.get(name)) is not None:
                state.offered.again()
                state.load_failed()

    def adapters_held(self, news: Mapping[int, News]) -> None:
        """What the ranks hold since a step: ``Adapters.reported``."""
        self._adapters.reported(news)

    # ------------------------------------------------------------ the engine's questions

    def storing(self) -> bool:
        """As ``StorePlanner.storing``, or whether a row is to be announced soon."""
        return self._stores.storing() or (self.events is not None and self.events.pending)

    def frees_blocks(self) -> bool:
        """As ``StorePlanner.frees_blocks``."""
        return self._stores.frees_blocks()

    def abandon_pending(self) -> None:
        self._stores.abandon_pending()

    def take_events(self) -> list[Any]:
        """What became of rows since the last call, for the engine to publish."""
        return [] if self.events is None else self.events.take()

    def was_emptied(self) -> None:
        """The engine's own prefix cache is empty now, and it published that."""
        self._emptied = True
        self._adapters.emptied()
        if self.events is not None:
            self.events.forget()

    def noted(self, what: str, foreign: bool = True) -> None:
        """As ``Changes.noted``: weights may be replaced. From any thread."""
        self._changes.noted(what, foreign)

    def clear(self, pausing: bool = False) -> bool:
        """Forget the namespace: the weights may be about to be replaced. ``pausing``: nobody asked
        for it, the engine only pauses. True even if no daemon confirmed it in time, or an engine's
        sleep would fail: until one has, nothing matches for this engine and nothing is stored."""
        self._changes.clear(CLEAR_TIMEOUT_S, pausing)
        return True

    def close(self) -> None:
        """End the session."""
        self._client.close()


class PrefillSpeed:
    """How many tokens the engine computes per second, measured from when its steps are planned.

    The estimate is rather too high. If it were too low, a request would wait for loads that take
    longer than computing. A step's time is the longer of the two intervals after it, because with
    asynchronous scheduling the next step is planned at once. Idle time makes a sample slower, so
    the fastest of the last ``SAMPLES`` counts.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=3)
        self._samples: deque[float] = deque([0.0], maxlen=SAMPLES)

    @property
    def tokens_s(self) -> float:
        """Tokens per second; 0: unknown."""
        return max(self._samples)

    def step(self, tokens: int, now_s: float) -> None:
        """A step of ``tokens`` is planned at ``now_s`` (CLOCK_MONOTONIC)."""
        self._steps.append((now_s, tokens))
        if len(self._steps) == 3:
            (first, computed), (second, _), (third, _) = self._steps
            took_s = max(second - first, third - second)
            if computed >= ENOUGH_TOKENS and took_s > 0:
                self._samples.append(computed / took_s)
