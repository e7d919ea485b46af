"""Plays a trace through the daemon's core: engines of one rank, one request after the other.

A request looks up its prompt, releases the lease, and stores the chunks that it did not find, as
the vLLM connector does. Copies between the engine and L1 take no time. A tier takes the time that
follows from its speed. So hits and evictions are those of a daemon that gets these requests in this
order. With ``Setting.tails`` hits end at blocks, and a prompt's last, partial chunk is stored, too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, groupby
from typing import Any, Final

import msgspec

from kvass.core import effects
from kvass.core.effects import Event, Opened, PopulatedTo, Received, Send, Tick
from kvass.core.handlers.checks import scheduler_of
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.core.matching.prefix import PrefixView
from kvass.core.metrics import COUNTERS
from kvass.core.pending.ledger import soonest
from kvass.core.pending.tier_state import FlushMode
from kvass.core.rows.index import key_array
from kvass.errors import UsageError
from kvass.layout.windows import EVERYWHERE, Points, WindowRows, default_interval
from kvass.messages import (
    Commit,
    EndSession,
    FromClient,
    Grant,
    Granted,
    Hello,
    Lookup,
    Matched,
    OneWay,
    Promoting,
    Register,
    Registered,
    Release,
    Reserve,
    ReserveItem,
)
from kvass.recording import EngineLine
from kvass.simulate.prompts import WIDTH, PromptKeys, prompt_of
from kvass.simulate.tier import SimulatedStore, SimulatedTier
from kvass.simulate.traces import MOST_TOKENS, Trace, TraceRequest
from kvass.types import SCHEDULER, GroupLayout, RankLayout, chunk_blocks

_EVICTED: Final = [name for name in COUNTERS if name.startswith("evicted_")]
_REMEMBERED: Final = 10_000
_ROW_BYTES: Final = 1 << 40
"""The largest size of a row in a recording."""
_ITEM_CHUNKS: Final = 512
"""The most chunks of one item with keys of blocks. An engine, too, offers few chunks in a step."""


@dataclass(frozen=True)
class Setting:
    """One configuration. ``l2_bytes`` 0: no tier. ``l2_bytes_s``: how fast the tier loads, and how
    fast it stores. ``prefill_tokens_s``: the prefill speed that engines report; 0: not known.
    ``tails``: hits end at blocks. ``ends``: the share of sessions that say that they end;
    ``wrong_ends``: the share of these hints that are wrong (``hints.py``). The other fields are
    options of ``kvass serve``. ``windows``: the interval between windows (``layout/windows.py``);
    0: they are stored at each chunk, None: the default."""

    l1_bytes: int
    chunk_tokens: int
    l2_bytes: int = 0
    l2_bytes_s: float = 2e9
    prefill_tokens_s: float = 0.0
    flush: FlushMode = "write_through"
    keep_loaded: bool = True
    skip_slow_loads: bool = True
    tails: bool = False
    ends: float = 0.0
    wrong_ends: float = 0.0
    windows: int | None = None


@dataclass
class Outcome:
    """The results of one configuration. ``hits``: the tokens found, by request. ``from_l2_tokens``
    of them came from the tier. ``waited_s``: how long requests waited for the tier.
    ``not_worth_it``: how many loads from it were left out, because computing is faster.
    ``stored_tokens``: the tokens of rows that were written; ``tail_tokens`` of them are in tails.
    ``l2_stored_bytes``: the bytes that were written to the tier. ``stored_bytes``: of all rows that
    were written; ``window_bytes`` of them are windows."""

    setting: Setting
    input_tokens: int = 0
    hit_tokens: int = 0
    from_l2_tokens: int = 0
    stored_rows: int = 0
    stored_tokens: int = 0
    tail_tokens: int = 0
    l2_stored_bytes: int = 0
    stored_bytes: int = 0
    window_bytes: int = 0
    not_worth_it: int = 0
    evicted_rows: int = 0
    waited_s: float = 0.0
    hits: list[int] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Hit tokens of all input tokens, 0 to 1."""
        return self.hit_tokens / max(1, self.input_tokens)


@dataclass(frozen=True)
class Model:
    """The layout that an engine registers: its chunk size and its layer groups."""

    chunk_tokens: int
    groups: tuple[GroupLayout, ...]

    @cached_property
    def block_tokens(self) -> int:
        """The tokens of a block if hits may end at each block; else 0."""
        blocks = chunk_blocks(self.groups, self.chunk_tokens)
        return self.chunk_tokens // blocks if blocks else 0

    @cached_property
    def row_bytes(self) -> int:
        """The bytes of a chunk in all groups together."""
        return sum(group.shard_bytes(self.chunk_tokens) for group in self.groups)


def recorded(engine: EngineLine) -> Model:
    """The model of a recorded engine, as one rank that has all shards. Raises ``UsageError`` for a
    layout that is not possible."""
    groups = []
    for i, group in enumerate(engine.groups):
        layout = GroupLayout(group.kind, group.block_tokens, (str(i),), (1,), group.window_tokens)
        blocks = layout.row_blocks(engine.chunk_tokens) if group.block_tokens > 0 else 0
        possible = engine.chunk_tokens <= MOST_TOKENS and 0 < group.row_bytes <= _ROW_BYTES
        if blocks <= 0 or not possible:
            raise UsageError(f"engine {engine.engine} of the recording has no layout that can be")
        page = max(1, group.row_bytes // blocks)
        groups.append(msgspec.structs.replace(layout, page_bytes=(page,)))
    return Model(engine.chunk_tokens, tuple(groups))


@dataclass
class PlayedEngine:
    """An engine, and its two connections. ``found``: by request, how many chunks its last lookup
    found. ``points``: by request, where hits of later ones may end."""

    model: Model
    scheduler: int
    worker: int
    windows: WindowRows
    found: dict[int, int] = field(default_factory=dict)
    points: dict[int, Points] = field(default_factory=dict)

    def looked_up(self, request: int, found: int, points: Points) -> None:
        """Note the result of a lookup. That of an old request is forgotten."""
        self.found[request], self.points[request] = found, points
        if len(self.found) > _REMEMBERED:
            oldest = next(iter(self.found))
            del self.found[oldest], self.points[oldest]

    def runs(self, request: TraceRequest, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The chunks from ``first`` to ``end``, in runs of chunks of which the same groups are
        stored: the first one, the end, and the mask of the groups."""
        points = self.points.get(request.name, EVERYWHERE)
        mask = request.groups or (1 << len(self.model.groups)) - 1
        if not self.windows.sparse:
            yield first, end, mask
            return
        chunks = range(first, end)
        for wanted, run in groupby(chunks, lambda c: mask & self.windows.wanted(c, points)):
            each = [*run]
            if wanted:
                yield each[0], each[-1] + 1, wanted


class Player:
    """A daemon's core with engines that have ``models``. A recording has a model for each engine;
    any other trace has one, with number 0. Raises ``UsageError`` if a model does not fit."""

    def __init__(
        self, setting: Setting, models: Mapping[int, Model], store: SimulatedStore | None = None
    ) -> None:
        """``store``: what the tier has, if other daemons use it, too."""
        self.setting, self.outcome = setting, Outcome(setting)
        self.machine = CacheMachine(
            CoreConfig(
                boot=bytes(16),
                arena_bytes=setting.l1_bytes,
                tiers=("l2",) if setting.l2_bytes else (),
                flush=setting.flush,
                keep_loaded=setting.keep_loaded,
                skip_slow_loads=setting.skip_slow_loads,
            )
        )
        self.now = 0.0
        self._seq, self._order, self._connections = count(1), count(), count(1)
        self.tier = SimulatedTier(store or SimulatedStore(setting.l2_bytes), setting.l2_bytes_s)
        self._due: list[tuple[float, int, Event]] = []
        self._answers: list[Any] = []
        self._step(PopulatedTo(setting.l1_bytes))
        self._engines = {number: self._engine(number, model) for number, model in models.items()}

    def _engine(self, number: int, model: Model) -> PlayedEngine:
        interval = self.setting.windows
        interval = default_interval(model.groups) if interval is None else interval
        windows = WindowRows(model.groups, model.chunk_tokens, interval)
        engine = PlayedEngine(model, self._connect(), self._connect(), windows)
        for rank, connection in ((SCHEDULER, engine.scheduler), (0, engine.worker)):
            reply = self._ask(
                connection,
                Register(
                    instance=f"engine {number}",
                    identity={"model": str(number)},
                    chunk_tokens=model.chunk_tokens,
                    rank=rank,
                    layout=None if rank == SCHEDULER else RankLayout(model.groups),
                ),
            )
            if not isinstance(reply, Registered):
                raise UsageError(f"a cache of {self.setting.l1_bytes} bytes: {reply.text}")
        return engine

    def play(self, trace: Trace) -> Iterator[Outcome]:
        """The outcome so far, after each request."""
        for request in trace.requests:
            self.ask(trace, request)
            yield self.outcome

    def ask(self, trace: Trace, request: TraceRequest) -> None:
        """Play one request of ``trace``, at its time or as soon as the one before has ended."""
        counters = self.machine.state.counters
        self._until(max(self.now, request.time_s - trace.requests[0].time_s))
        engine = self._engines[request.engine]
        prompt = self._prompt(trace, request, engine.model)
        first = request.first
        if request.looks_up:
            self._look_up(engine, request, prompt)
            first = max(first, engine.found[request.name])
        self._store(engine, request, prompt, first)
        if request.ends:
            self._ask(engine.scheduler, EndSession(session=request.session))
        self.outcome.evicted_rows = sum(counters[name] for name in _EVICTED)
        self.outcome.not_worth_it = counters["promotions_not_worth_it"]
        self.outcome.l2_stored_bytes = self.tier.stored_bytes

    def held_chunks(self, trace: Trace, request: TraceRequest, tier: bool = False) -> int:
        """How many chunks of the prompt L1 has from its beginning on, or with ``tier`` L1 and the
        tier. Changes nothing."""
        engine = self._engines[request.engine]
        state = self.machine.state
        ns = state.namespace_of(scheduler_of(state, state.connections[engine.scheduler]))
        if ns is None:
            return 0
        prompt = self._prompt(trace, request, engine.model)
        view = PrefixView(state.rows, ns, key_array(prompt.chunks, WIDTH), 0)
        there = view.there()
        if tier:
            for group, chunks in enumerate(there):
                chunks |= self.tier.holds(group, view.keys)
        return view.longest(there)

    def _prompt(self, trace: Trace, request: TraceRequest, model: Model) -> PromptKeys:
        """The keys of a prompt, as many as one message may have, as clients do."""
        block_tokens = model.block_tokens if self.setting.tails else 0
        most = self.machine.state.config.limits.keys_per_message
        return prompt_of(trace, request, model.chunk_tokens, block_tokens).cut(most)

    def _look_up(self, engine: PlayedEngine, request: TraceRequest, prompt: PromptKeys) -> None:
        outcome, model, found = self.outcome, engine.model, Matched()
        outcome.input_tokens += request.input_tokens
        chunks = prompt.max_hit_chunks()
        if chunks or prompt.after(chunks):
            began_s, loaded = self.now, self._loaded_rows
            found = self._ask(engine.scheduler, self._lookup(request, prompt, chunks))
            outcome.waited_s += self.now - began_s
            rows = (self._loaded_rows - loaded) // len(model.groups)
            outcome.from_l2_tokens += min(rows, found.chunks) * model.chunk_tokens
            if found.chunks < chunks and prompt.after(found.chunks):
                again = self._lookup(request, prompt, found.chunks, again=True)
                more = self._ask(engine.scheduler, again)
                found, worse = (more, found) if more.blocks else (found, more)
                self._release(engine, worse)
            self._release(engine, found)
        last = max(0, request.input_tokens - 1) // model.chunk_tokens
        last = min(last, len(prompt.chunks) // WIDTH)  # a trace does not know all of its last ones
        engine.looked_up(request.name, found.chunks, Points(last, found.whole))
        outcome.hits.append(found.chunks * model.chunk_tokens + found.blocks * model.block_tokens)
        outcome.hit_tokens += outcome.hits[-1]

    def _lookup(
        self, request: TraceRequest, prompt: PromptKeys, chunks: int, again: bool = False
    ) -> Lookup:
        """The lookup that a client sends, with the time that it waits."""
        timing, speed = self.machine.state.config.timing, self.setting.prefill_tokens_s
        tokens = chunks * self._engines[request.engine].model.chunk_tokens
        return Lookup(
            request=str(request.name),
            digests=prompt.chunks[: chunks * WIDTH],
            width=WIDTH,
            budget_ms=1000 * timing.patience_s(tokens, speed),
            prefill_tokens_s=speed,
            blocks=prompt.after(chunks),
            again=again,
            session=request.session,
        )

    def _release(self, engine: PlayedEngine, matched: Matched) -> None:
        if matched.lease:
            self._ask(engine.worker, Release(boot=matched.boot, lease=matched.lease, rank=0))

    @property
    def _loaded_rows(self) -> int:
        return sum(tier.counters["loaded_rows"] for tier in self.machine.state.tiers.all)

    def _store(
        self, engine: PlayedEngine, request: TraceRequest, prompt: PromptKeys, first: int
    ) -> None:
        """Write the chunks from ``first`` on, or from the end of this cache's hit, and the tail.
        One step of the core grants only some chunks. Its answer says where to go on."""
        if not request.looks_up:
            first = min(first, engine.found.get(request.name, first))
        for begin, end, mask in engine.runs(request, first, len(prompt.chunks) // WIDTH):
            self._store_run(engine, request, prompt, begin, end, mask)

    def _store_run(
        self,
        engine: PlayedEngine,
        request: TraceRequest,
        prompt: PromptKeys,
        first: int,
        chunks: int,
        mask: int,
    ) -> None:
        """Write the rows of ``mask`` of chunks ``[first, chunks)``, and the tail behind them."""
        each, tail = prompt.blocks_per_chunk, prompt.tail
        while 0 <= first < chunks + (tail > 0):
            end = min(chunks, first + _ITEM_CHUNKS) if each else chunks
            name, digests = str(request.name), prompt.chunks[: end * WIDTH]
            item = ReserveItem(name, digests, first, mask, session=request.session)
            item.blocks = prompt.block_hashes(first * each, end * each + tail * (end == chunks))
            granted = self._ask(engine.scheduler, Reserve(items=[item], width=WIDTH))
            assert isinstance(granted, Granted), granted
            grant = granted.grants[0]
            if grant.reservation:
                last = tail if grant.chunks[-1] == chunks else 0
                self._written(engine.model, grant, mask, last)
                commit = Commit(boot=granted.boot, reservation=grant.reservation, rank=0)
                self._ask(engine.worker, commit)
            if grant.later > first:
                first = grant.later
            elif end < chunks:
                first = end
            else:
                return

    def _written(self, model: Model, grant: Grant, mask: int, tail: int) -> None:
        """Count the granted rows of the groups of ``mask``. The last one is a tail of ``tail``
        blocks, unless that is 0."""
        outcome, tokens = self.outcome, tail * model.block_tokens
        groups = [each for g, each in enumerate(model.groups) if mask >> g & 1]
        for group, slots in zip(groups, grant.slots, strict=True):
            size = len(slots) * group.shard_bytes(model.chunk_tokens)
            outcome.stored_rows += len(slots)
            outcome.stored_bytes += size
            outcome.window_bytes += size * group.rules.windowed
        outcome.stored_tokens += tokens + (len(grant.chunks) - (tail > 0)) * model.chunk_tokens
        outcome.tail_tokens += tokens

    # ------------------------------------------------------------ the machine and its time

    def _connect(self) -> int:
        connection = next(self._connections)
        self._step(Opened(connection))
        self._ask(connection, Hello(clock_s=self.now))
        return connection

    def _ask(self, connection: int, message: FromClient) -> Any:
        """Send ``message``, and let time pass until its answer is there. Returns the answer, or
        None for a one-way message."""
        message.seq = next(self._seq)
        self._answers.clear()
        self._step(Received(connection, message))
        self._work()
        while not isinstance(message, OneWay):
            for answer in self._answers:
                if not isinstance(answer, Promoting):
                    return answer
            due = self._next_due()
            assert due is not None, "a request is never answered"
            self._until(due)
        return None

    def _next_due(self) -> float | None:
        of_tier = self._due[0][0] if self._due else None
        return soonest(of_tier, self.machine.next_deadline())

    def _until(self, end: float) -> None:
        """Let time pass until ``end``, and do everything that is due by then."""
        while (due := self._next_due()) is not None and due <= end:
            self.now = max(self.now, due)
            self._work()
        self.now = end

    def _work(self) -> None:
        while True:
            if self._due and self._due[0][0] <= self.now:
                self._step(heapq.heappop(self._due)[2])
            elif (due := self.machine.next_deadline()) is not None and due <= self.now:
                self._step(Tick())
            else:
                return

    def _step(self, event: Event) -> None:
        for effect in self.machine.step(event, self.now):
            if isinstance(effect, Send):
                self._answers.append(effect.message)
            elif isinstance(effect, effects.ToTier):
                end, result = self.tier.carry_out(effect, self.now)
                heapq.heappush(self._due, (end, next(self._order), result))
