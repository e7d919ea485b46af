"""The scheduler's half of a connector. This file plans loads; ``stores.py`` plans stores.

Laws of this file:

- A request attempts at most one load.
- Before it matches or stores anything, the planner checks whether weights were replaced
  (``changes.py``).
- A lease that was taken is either sent in the step's work or released.
- After a rank found a wrong copy (``verifier.py``), nothing is matched or stored any more, and the
  namespace is cleared: other engines may have read what this one stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final

from kvass.client.explanation import told
from kvass.client.lookups import Found, Match, Pending
from kvass.engine import tracing
from kvass.engine.adapters import Adapters
from kvass.engine.answers import Answers
from kvass.engine.asking import Asking, Question
from kvass.engine.boundary import log
from kvass.engine.changes import OwnCache, WeightChanges
from kvass.engine.clients import scheduler_client
from kvass.engine.copy_speed import CopySpeed
from kvass.engine.early_lookups import EarlyLookups
from kvass.engine.explain import Explainer
from kvass.engine.head_of_line import HeadOfLine
from kvass.engine.hit_limits import HitLimits
from kvass.engine.in_step import InStep
from kvass.engine.load_admission import LoadAdmission
from kvass.engine.loads import LoadMaker
from kvass.engine.observers import Observer
from kvass.engine.protocols import BlockPool, Request, Step
from kvass.engine.rank_report import RankReport
from kvass.engine.request_state import Answer, LoadState, RequestState
from kvass.engine.results import LookupResults
from kvass.engine.row_events import EventMaker, RowEvents
from kvass.engine.setup import EngineSetup
from kvass.engine.step_times import StepTimes
from kvass.engine.step_work import Load, ShadowCheck, StepWork, comparable
from kvass.engine.stores import StorePlanner
from kvass.engine.traffic import EngineTraffic
from kvass.engine.worth import CHEAPER, TOO_LITTLE, Worth
from kvass.layout.spans import Table

ASK_AGAIN_S: Final = 0.1
"""How long a miss stays one while the request waits for blocks: the engine may ask in every step.
After blocks came free it is looked up again, because another may have stored what it needs."""
CLEAR_TIMEOUT_S: Final = 0.2
"""How long the engine may wait for a clear. Without an answer by then, later steps continue it."""

Observers = Callable[["Planner"], Iterable[Observer]]
"""Takes a planner that has its ``client`` and its ``traffic``, and nothing else yet."""


class Planner:
    """The planner of one engine's loads and stores. Used from the engine's scheduler thread only.
    In each step call ``plan``, then ``hand_over``. If ``hand_over`` returns False or raises, call
    ``revoke``."""

    def __init__(
        self,
        setup: EngineSetup,
        pool: BlockPool,
        event_maker: EventMaker | None = None,
        observers: Observers | None = None,
        *,
        watched: bool = False,
    ) -> None:
        """``event_maker``: None if the engine publishes no KV events. ``observers``: makes what
        else observes the requests. ``watched``: the connector calls ``weights_may_change`` before
        anything that may replace weights. A reset of the engine's own cache is then no sign of a
        change."""
        self._setup = setup
        self._spans = setup.spans
        self._limits = limits = HitLimits(setup)
        self.client = scheduler_client(setup)
        self._requests: dict[str, RequestState] = {}
        self._loads: list[Load] = []
        self._emptied = False
        self._freed_s = 0.0
        """CLOCK_MONOTONIC at which blocks last came free."""
        self.off = False
        """Whether a copy was wrong, so that the engine runs uncached until it ends."""
        self._times = times = StepTimes()
        self.copy_speed = CopySpeed(ranks := setup.strategy.ranks)
        self.in_step = InStep(setup, limits, times, self.copy_speed)
        self._make = LoadMaker(setup, self._limits, self.in_step)
        self._recovered = 0
        self._adapters = Adapters(ranks, setup.adapters, several_nodes=setup.several_nodes)
        self._head_of_line = HeadOfLine(setup.one_queue)
        self._admission = LoadAdmission(setup, self._requests, pool)
        self.traffic = EngineTraffic()
        self._explain = explain = Explainer(setup, self.client)
        self._asking = Asking(setup, self.client, self._adapters, self._times, explain)
        self._early = EarlyLookups(setup, self.client, self._asking, pool)
        self.events: RowEvents | None = None
        if event_maker is not None:
            tier_s = setup.tier_events_s
            self.events = RowEvents(self.client, event_maker, self.traffic, tier_s)
        results = LookupResults(self.client, self.traffic, counts=not setup.shadow)
        self._worth = Worth(setup, limits, times, self.in_step, self.copy_speed, self._requests)
        self._answers = Answers(setup)
        learns = self._worth, self._early, self._answers
        own = tracing.begin(), results, explain, self.events, *learns
        others = () if observers is None else observers(self)
        self._observers = (*(one for one in own if one is not None), *others)
        idle = Observer.stepped
        self._stepped = [one.stepped for one in self._observers if type(one).stepped is not idle]
        self.stores = StorePlanner(
            setup, self.client, self._adapters, self._requests, pool, self._observers, self._times
        )
        self._changes = WeightChanges(
            self.client,
            self._requests,
            pool,
            self.stores.abandon_pending,
            fixed=setup.fixed_weights,
            watched=watched,
        )

    # ------------------------------------------------------------ requests

    def track(self, request: Request) -> None:
        self._changes.notice()
        state = self._requests[request.name] = RequestState(request)
        if self._changes.state is OwnCache.STALE:
            state.weights_changed(stale=True)
        self._answers.begin(state)
        if (adapter := request.adapter) is not None:
            self._adapters.track(adapter)
        self._early.track(state)

    def forget(self, name: str, table: Table = ()) -> None:
        """A request ended: it finished or was aborted. ``table``: the blocks that it still has.
        Blocks that are being stored, or are to be stored, stay held."""
        state = self._requests.pop(name, None)
        self._freed_s = time.monotonic()
        self.client.give_back(name)
        self._head_of_line.ended(name)
        if state is not None:
            for each in self._observers:
                each.ended(state)
            if table:
                self.stores.request_ended(state, table)
            if state.request.ends_session:
                self.client.end_session(state.request.context)
        if not self._requests:  # perhaps no step follows
            self._report_all()

    def _report_all(self) -> None:
        """Report all results and notes now, and the engine's speed, unless the daemon has it."""
        self._explain.send()
        self.client.speed(self._times.tokens_s)
        self.client.report_all()

    def outcome(self, name: str) -> tuple[int, int, str]:
        """What the client of a live request is told: how many tokens kvass has brought, how many it
        retains so far, and why it were not more (``explanation.told``)."""
        state = self._requests[name]
        kept = min(self._limits.tokens(state.kept_chunks), state.request.known_tokens)
        return state.loaded_tokens, kept, told(state.missed_because)

    def match(self, name: str, local: int) -> int | None:
        """How many tokens can be loaded after the ``local`` tokens of the engine's own cache. None:
        the lookup is pending, so the engine must call again in a later step."""
        if self._head_of_line.passes(name):
            return None
        tokens: int | None = 0  # the engine gets a miss if ``_match`` raises
        try:
            tokens = self._match(name, local)
            if tokens and not self._admission.admits(name):
                tokens = None
                self._head_of_line.held_back()
        finally:
            if tokens is not None:
                self._head_of_line.answered(name)
        return tokens

    def _match(self, name: str, local: int, most: int | None = None) -> int | None:
        """``match``. A hit ends at token ``most`` or before it; None: anywhere."""
        self._changes.notice()
        if (state := self._requests.get(name)) is None:
            return 0
        began_s, first = self._times.clock(), not (state.asking or state.fresh)
        since_s = max(self._freed_s, time.monotonic() - ASK_AGAIN_S)
        if not self.off and self.client.connected and state.missed_since(local, since_s):
            return 0
        state.parts = max(state.parts, local // self._setup.chunk_tokens)
        question: Question | str | None = "loads_off"
        if not self.off:
            state.fresh = False
            question = self._asking.question(state, local)
        if question is None:
            return None
        if first and not isinstance(question, str) and not self._worth.asks(state, question):
            question = TOO_LITTLE
        if isinstance(question, str):
            return self._unasked(state, local, question)
        for each in self._observers:
            each.asked(state)
        found = self._asking.ask(state, question)
        state.asking, hit = isinstance(found.match, Pending), None
        if not state.asking:
            hit = self._answered(state, question, found, most)
        elif found.promoting:
            for each in self._observers:
                each.promoting(state)
        if first:
            self._worth.looked_up(question.chunks, began_s)
        return hit

    def _unasked(self, state: RequestState, local: int, why: str) -> int:
        """The answer to a request for which the daemon is not asked: nothing matches."""
        if why:
            state.missed_because = why
            for each in self._observers:
                each.unasked(state, local, why)
        return 0

    def _answered(
        self, state: RequestState, question: Question, found: Found, most: int | None
    ) -> int:
        """How many tokens of what was ``found`` can be loaded."""
        state.kept_chunks = max(state.kept_chunks, found.kept)
        state.parts = max(state.parts, found.whole - self._setup.spare)
        local, end, named = question.local, question.end, question.named
        hit, inside, tiers, why = 0, 0, tuple[int, ...](), found.why or question.why
        if isinstance(match := found.match, Match):
            tiers = match.tiers
            found_end = self._limits.tokens(match.chunks, match.blocks)
            matched = max(0, min(found_end, end if most is None else min(end, most)) - local)
            room = self.in_step.room(local, matched, match)
            if (hit := self._worth.choose(state, local, matched, room)) < matched:
                why = CHEAPER
            if hit == 0:  # or the match ends in the chunk in which the engine's own hit ends
                self.client.give_back(state.request.name)
            else:
                inside = self.in_step.tokens(state.request, match, local, local + hit)
        asked, now_s = end - local, time.monotonic()
        said = found.boot, now_s, found.detail
        answer = Answer(local, local + hit, named, asked, why, tiers, *said)
        first, state.in_step = state.answered(answer), inside
        for each in self._observers:
            each.answered(state, answer, first)
        return hit

    def allocated(self, name: str, table: Table, external: int) -> None:
        """The engine allocated the blocks of ``table`` for a request. Plan the load of ``external``
        tokens. If ``external`` is 0, release the match. While the request loads, the engine may
        call this again with 0."""
        if external == 0:
            self.got_blocks(name)
            self.client.give_back(name)
            return
        self._head_of_line.got_blocks(name)
        state = self._requests[name]
        match = self.client.take(name)
        self._got_blocks(state, external)
        state.begin_load()
        load = self._make.failing(name, state, table)
        if match is not None:
            load = self._make.load(state, match, table, external) or load
            if load.lease == 0:
                self.client.release(match.boot, match.lease)
            elif match.first == 0:
                state.offered.loaded(match.chunks, self._limits.tail(match))
            if load.lease:
                state.loaded_tokens = external
                self.in_step.planned(state)
                for each in self._observers:
                    each.loading(state, match)
        self._loads.append(load)

    def got_blocks(self, name: str) -> None:
        """The engine allocated the blocks of a request that loads nothing. Its match stays held."""
        self._head_of_line.got_blocks(name)
        state = self._requests[name]
        self._got_blocks(state, 0)
        state.got_blocks()

    def _got_blocks(self, state: RequestState, loads: int) -> None:
        self._early.got_blocks(state.request.name)
        self.client.speed(self._times.tokens_s)
        if (answer := state.take_answer()) is not None:
            self.in_step.ended(answer.why == CHEAPER and not loads, failed=False)
            for each in self._observers:
                each.allocated(state, answer, loads)

    def look_up_late(self, name: str, local: int) -> int | None:
        """``match`` for a request that the engine computes already. What the request itself has
        stored meanwhile is no hit."""
        state = self._requests.get(name)
        own = None if state is None else state.first_stored
        hit = self._match(name, local, None if own is None else self._limits.tokens(own))
        if state is not None:
            self._got_blocks(state, 0)
            state.got_blocks()
            if state.first_step:
                state.step(state.first_step)
        return hit

    def computed_tokens(self, name: str) -> int | None:
        """``Request.computed_tokens`` of a request; None if it is not known."""
        state = self._requests.get(name)
        return None if state is None else state.request.computed_tokens

    def check(self, name: str, table: Table, end: int, work: StepWork) -> ShadowCheck | None:
        """The check of the held match (``shadow.py``), whose tokens end at ``end``, against the
        blocks of ``table``. Its blocks are held. None: no match is held any more, it does not fit,
        or nothing can be compared."""
        state, match = self._requests[name], self.client.take(name)
        if match is None or state.answer is None:
            return None
        load = self._make.load(state, match, table, state.answer.end - state.answer.local)
        if load is not None and time.monotonic() < match.deadline_s:
            row_blocks = self._spans.row_blocks()
            load = comparable(load, self.stores.copied.room_for_checks(), row_blocks)
        if load is None or not any(load.blocks):
            self.client.release(match.boot, match.lease)
            return None
        return ShadowCheck(
            step=self.stores.copied.hold(work, load.blocks, match.deadline_s),
            load=load,
            chunks=-(-end // self._setup.chunk_tokens),
            computed=work.number,
            first_step=state.first_step,
        )

    def add_load(self, load: Load) -> None:
        """Add a load that the caller planned with a lease from ``client``."""
        self._loads.append(load)

    def loads_in_step(self, name: str) -> int:
        """How many tokens of the match that is held are loaded inside this step; 0: its load is
        asynchronous. Call it after ``match``."""
        return self._requests[name].in_step

    def ensure_load(self, name: str, table: Table = ()) -> None:
        """The engine waits for a load of this request into ``table``. If none is planned, plan one
        that fails."""
        if all(load.request != name for load in self._loads):
            self._loads.append(self._make.failing(name, self._requests.get(name), table))

    # ------------------------------------------------------------ a step

    def plan(self, step: Step, work: StepWork) -> None:
        """Add to ``work`` the loads planned since the last step, then the stores. If this raises,
        ``work`` has all the loads and perhaps some stores."""
        work.loads, self._loads = self._loads, []
        self._changes.notice()
        if self._changes.state is OwnCache.STALE and step.tokens:
            self._changes.warn_if_stale()
        work.emptied, self._emptied = self._emptied, False
        work.recovered = self._recovered
        self.in_step.new_step()
        try:
            self.stores.plan(step, work)
        finally:
            loads = sum(bool(load.in_step) for load in work.loads)
            self._times.planned(step.tokens, step.names, loads=loads)

    def hand_over(self, work: StepWork) -> bool:
        """End the planning of a step. From here on only the ranks settle the leases and
        reservations of ``work``, and the wait budget of the next step begins. False: the daemon
        was not notified. Then the ranks must not get ``work``: call ``revoke``."""
        leases, writes, boots = work.lent()
        handed_over = not boots or (
            len(boots) == 1 and self.client.handed_over(leases, writes, boots.pop())
        )
        self.client.new_step()
        if not self._requests:
            self._report_all()
        for stepped in self._stepped:
            stepped()
        self._head_of_line.new_step()
        return handed_over

    def revoke(self, work: StepWork) -> None:
        """Remove all stores and checks from a step's work, and replace its loads by loads that
        fail."""
        lent = work.leased()
        work.loads = [Load(load.request, in_step=load.in_step) for load in work.loads]
        work.checks = []
        self.stores.revoke(work)
        for load in lent:
            self.client.release(load.boot, load.lease)

    def step_ended(self) -> None:
        """The result of the oldest step that has not ended is there. Its reports are taken in."""
        self._times.ended()

    def reported(
        self, steps: Mapping[int, int], failed: Iterable[str], loaded: Iterable[str] = ()
    ) -> None:
        """Take in the ranks' reports. ``steps``: as in ``CopiedBlocks.reported``. ``failed``:
        requests whose load failed; all their chunks are offered for storing again. ``loaded``:
        all requests whose load ended."""
        self.stores.copied.reported(steps)
        if steps:
            self._freed_s = time.monotonic()
        failed, loaded = set(failed), set(loaded)
        self._head_of_line.loaded(name for name in loaded if name in self._requests)
        ours = self._requests.keys() & (loaded - failed)  # others loaded by another connector
        loading = sum(self._requests[name].state is LoadState.LOADING for name in ours)
        self.in_step.ended(loading, failed=False)
        self._ended(failed, loaded)

    def loaded_in_step(self, report: RankReport) -> None:
        """Take in the ends of loads inside steps. The engine has taken back those that failed."""
        if loads := report.in_step:
            failed = {name for name, good in loads.items() if not good}
            self._recovered = max(self._recovered, report.failed_step)
            self.in_step.ended(len(loads) - len(failed), failed=bool(failed))
            self._ended(failed, set(loads))

    def took_back(self) -> None:
        """The engine forgets what it computed with failed loads inside steps. What is not granted
        yet of that is not stored; the ranks store nothing that is."""
        self.stores.abandon_pending()

    def _ended(self, failed: set[str], loaded: set[str]) -> None:
        for name in failed | loaded:
            state, ok = self._requests.get(name), name not in failed
            if state is not None and not ok:
                state.offered.offer_again()
                state.load_failed()
            for each in self._observers:
                each.loaded(name, state, ok)

    def copied_wrong(self, report: RankReport) -> None:
        """If ranks found that copies are wrong, the engine runs uncached from here on. The clear is
        sent at once, and confirmed or repeated by later steps."""
        if self.off or not report.wrong:
            return
        self.off = True
        why = (
            f"{'; '.join(report.wrong)}. Restart the engine: its own prefix cache may have KV of "
            "earlier wrong loads. What is stored for this model is cleared"
        )
        log.error("kvass is off, the engine runs uncached: %s", why)
        self.stores.end()
        self._early.end()
        self.client.tell_uncached(why)
        self.client.clear(0.0)

    def adapters_held(self, report: RankReport) -> None:
        """Take in the LoRA adapters that the ranks hold."""
        self._adapters.reported(report.adapters)

    def copied(self, report: RankReport) -> None:
        """Take in what the ranks loaded."""
        self.copy_speed.reported(report.copied)

    TAKE_IN: ClassVar = adapters_held, copied_wrong, copied, loaded_in_step
    """What takes in parts of a report, before ``reported`` its steps. One that raises must not keep
    the others from their part."""

    # ------------------------------------------------------------ calls of the engine

    def storing(self) -> bool:
        """Whether the engine must keep stepping: ``StorePlanner.storing``, or a KV event is
        pending, or the client owes something to a daemon that only steps reach."""
        events = self.events is not None and self.events.pending
        return self.stores.storing() or events or self.client.owes

    def frees_blocks(self) -> bool:
        """As ``StorePlanner.frees_blocks``."""
        return self.stores.frees_blocks()

    def take_events(self) -> list[Any]:
        """The KV events since the last call, for the engine to publish."""
        return [] if self.events is None else self.events.take()

    def was_emptied(self) -> None:
        """The engine emptied its own prefix cache and published that."""
        self._emptied = True
        self._adapters.emptied()
        if self.events is not None:
            self.events.forget()

    def weights_may_change(self, what: str, foreign: bool = True) -> None:
        """As ``WeightChanges.weights_may_change``. May be called from any thread."""
        self._changes.weights_may_change(what, foreign)

    def clear(self, pausing: bool = False) -> bool:
        """Clear the namespace, because the weights may be about to be replaced. ``pausing``: the
        clear is part of a pause of the engine, and no user requested it. Always True, also if the
        daemon did not confirm the clear in time: False would make the engine's sleep fail. Until
        the daemon confirms, this engine matches nothing and stores nothing."""
        self._changes.clear(CLEAR_TIMEOUT_S, pausing)
        return True

    def close(self) -> None:
        """End the connection."""
        self.client.close()
