"""The worker's half of a connector: copies between this rank's KV pages and the arena.

Laws of this file:

- Every rank reports every load as finished exactly once, and as failed unless every byte was there
  before its deadline. It reports every step with stores exactly once, also one for which the engine
  never called ``store``. The engine counts the reports of all ranks.
- Of ranks that hold equal bytes only the first stores; the others tell the daemon nothing of it.
- What a copy owes the daemon is settled on the copy thread, right after the last byte. The engine's
  thread waits for copies only in a step that computes nothing, for at most ``COPY_WAIT_S``.
- Nothing is copied for a LoRA adapter that this rank does not hold (``held_adapters.py``).
- Memory of another boot of the daemon than the one that gave the slots is never touched.
- After a forward pass that raised, or never ran, nothing is stored that it or a later step
  computed, until the engine has emptied its own prefix cache: until then it may build on blocks
  that nobody filled.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from kvass.client.worker import ArenaLease, WorkerClient
from kvass.engine import tracing
from kvass.engine.boundary import Boundary, log
from kvass.engine.held_adapters import HeldAdapters, News
from kvass.engine.memory import KVMemory, open_mover
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import Load, StepWork, Store
from kvass.engine.traffic import EngineTraffic
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Done, Job, Mover
from kvass.transfer.cuda_driver import MissingError

COPY_WAIT_S: Final = 0.005
"""In each step, even an empty one, the engine's thread keeps the GIL for 2 ms from the threads that
copy: the fewer steps the better. A request that comes meanwhile waits."""

NEVER: Final = sys.maxsize

_lost: Final[list[object]] = []
"""KV memory that a device may still use after it failed: kept until the process ends."""


class Copier:
    """Copies for one rank. Used from the worker's engine thread; ``_copied`` runs on the copy
    thread. A step calls ``catch_up``, ``load``, ``store`` after the forward pass, ``results`` and
    ``report``."""

    def __init__(
        self,
        setup: EngineSetup,
        rank: int,
        boundary: Boundary,
        make_mover: Callable[[KVMemory], Mover] | None = None,
        held: HeldAdapters | None = None,
    ) -> None:
        """``held``: the LoRA adapters that this rank holds, of an engine that serves some. Raises
        UsageError for a rank outside the engine's world."""
        self._held = held
        self._setup = setup
        self._make_mover = make_mover or partial(open_mover, single=setup.single_copies)
        self._strategy = setup.strategy.at(rank)
        self._boundary = boundary
        self._client: WorkerClient | None = None
        self._mover: Mover | None = None
        self._planes: tuple[GroupPlanes, ...] = ()
        self._owners: tuple[object, ...] = ()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._copying = 0
        self._open: Counter[int] = Counter()
        self._settled: list[int] = []
        self._unstored: StepWork | None = None
        self._computed = False
        self._idle = False
        self._number = 0
        self._raised = NEVER
        self.traffic = EngineTraffic()
        self._tracing = tracing.begin()

    def attach(self, memory: KVMemory) -> None:
        """The engine made its KV caches: register with the daemon. ``close`` first if it made
        others before. After a sleep they come back in place."""
        registration = self._setup.register(self._strategy, memory.layout)
        self._planes, self._owners = memory.planes, memory.owners
        self._mover = self._client = None
        try:
            self._mover = self._make_mover(memory)
        except MissingError as reason:  # without this rank every lookup is a miss
            log.error("kvass is off, the engine runs uncached: %s", reason)
            return
        self._client = WorkerClient(
            self._setup.socket, registration, incomplete=True, daemon_uid=self._setup.daemon_uid
        )
        self._setup.when_named(self._client.complete)

    # ------------------------------------------------------------ a step

    def load(self, work: StepWork) -> None:
        """Begin this step's loads."""
        if work.number > self._number + 1:
            self._spoil(self._number + 1)
        if work.emptied:
            self._raised = NEVER
        self._number = work.number or self._number  # 0: planning it raised before it had one
        self._unstored, self._computed, self._idle = work, False, not work.computes
        self._look(self._number)
        for load in work.loads:
            if not self._loads(load) or not self._boundary.run(False, self._begin, load):
                self._finished.add(load.request)
                self._failed.add(load.request)
                self._boundary.run(None, self._refuse, load)

    def store(self, work: StepWork, computed: bool = True) -> None:
        """Begin this step's stores. ``computed``: the forward pass did not raise."""
        self._unstored = None
        if not computed:
            self._spoil(work.number)
        self._look(work.number or self._number)
        if work.step == 0:
            return
        stores = work.stores if self._strategy.writes else []
        self._open[work.step] = len(stores) + 1
        for store in stores:
            good = store.computed < self._raised and self._computed_by(store)
            if not good or not self._boundary.run(False, self._begin, store):
                self._close_one(work.step)
                self._boundary.run(None, self._refuse, store)
        self._close_one(work.step)

    def _spoil(self, number: int) -> None:
        """Step ``number`` did not compute what was planned."""
        self._raised = min(self._raised, number)
        self._boundary.count(
            "steps_raised",
            "a step of this engine raised or never ran: it stores no more KV until its own prefix "
            "cache is emptied (reset_prefix_cache), because that may hold blocks never computed",
        )

    def catch_up(self) -> None:
        """Another step begins: begin the stores of the last one, if ``store`` was never called.

        vLLM's V1 runner with speculative decoding calls it after the drafter ran, which earlier
        pipeline stages do not have; vLLM 0.30 does not call it in a step that computes nothing.
        Elsewhere it is missing only if something raised.
        """
        if (work := self._unstored) is not None:
            skipped = not (self._strategy.last_stage and work.computes)
            self.store(work, self._computed and skipped)

    def results(self, computed: bool = True) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those of them that failed.
        ``computed``: the forward pass of the step did not raise. If it did, the engine hears of
        nothing in this step: it is told in the next."""
        self._computed = computed
        self._poll()
        if self._idle and self._mover is not None and not (self._finished or self._settled):
            self._mover.drain(COPY_WAIT_S)
            self._poll()
        if not computed:
            return set(), set()
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed

    def report(self) -> list[int]:
        """The steps (``StepWork.step``) whose stores were all settled since the last call; none in
        a step that raised."""
        self._poll()
        if not self._computed:
            return []
        settled, self._settled = self._settled, []
        return settled

    def adapter_news(self) -> dict[int, News]:
        """By rank the LoRA adapters that this one holds since the last call; none in a step that
        raised. After ``report``."""
        if self._held is None or not self._computed:
            return {}
        self._look(self._number)
        news = self._held.news()
        return {self._held.rank: news} if news else {}

    def close(self) -> None:
        """End the copies, then the session: EOF says that nothing is written any more."""
        if self._mover is not None:
            self._mover.close()
            self._poll()
        if self._client is not None:
            self._client.close()

    # ------------------------------------------------------------ adapters

    def _look(self, number: int) -> None:
        """Note which adapters this rank holds in step ``number``."""
        if self._held is not None and not self._boundary.run(False, self._seen, number):
            self._held.lost(number)

    def _seen(self, number: int) -> bool:
        assert self._held is not None
        self._held.look(number)
        return True

    def _loads(self, load: Load) -> bool:
        """Whether this rank holds the adapter whose KV ``load`` brings, or will read it."""
        return load.adapter is None or (
            self._held is not None and self._held.may_load(load.adapter)
        )

    def _computed_by(self, store: Store) -> bool:
        """Whether this rank held the adapter whose name ``store`` has whenever it computed."""
        return store.adapter is None or (
            self._held is not None
            and self._held.computed(store.adapter, store.first_step, store.computed)
        )

    # ------------------------------------------------------------ copies

    def _begin(self, copy: Load | Store) -> bool:
        """Submit one copy; False if there is nothing to read, or nowhere to write, any more."""
        if self._client is None or self._mover is None:
            return False
        if isinstance(copy, Load) and copy.lease == 0:
            return False
        arena = self._client.arena(copy.boot, copy.given_s)
        if arena is None:
            return False
        try:
            plans, ended = self._plans(copy), partial(self._copied, arena)
            self._mover.submit(
                Job(
                    copy.kind,
                    plans,
                    arena.buffer,
                    copy.deadline_s,
                    copy,
                    ended,
                    arena.populated,
                    arena.prepare,
                )
            )
        except BaseException:
            arena.close()
            raise
        self._copying += 1
        return True

    def _plans(self, copy: Load | Store) -> tuple[CopyPlan, ...]:
        """One plan per group that this rank has layers of: its rows' blocks against its slots."""
        plans = []
        skips = (isinstance(copy, Load) and copy.skip) or (0,) * len(copy.blocks)
        for planes, ids, where, skip in zip(
            self._planes, copy.blocks, copy.slots, skips, strict=True
        ):
            if ids and planes.planes:
                offsets = where.offsets(self._strategy.shard, planes.shard_bytes)
                drop = -len(ids) % planes.chunk_blocks
                table = np.array(ids + (0,) * drop, np.int64).reshape(-1, planes.chunk_blocks)
                plans.append(plan_copy(planes, table, offsets, skip=skip, drop=drop))
        return tuple(plans)

    # ------------------------------------------------------------ ends

    def _copied(self, arena: ArenaLease, done: Done) -> None:
        """On the copy thread, right after the last byte."""
        if done.outcome != "lost":  # then it may still read or write, until this process's end
            self._settle(_copy_of(done), done.ok)
            arena.close()
        if self._tracing is not None:
            self._tracing.copied(_copy_of(done), done)

    def _settle(self, copy: Load | Store, written: bool = False) -> None:
        """Tell the daemon that this copy reads or writes no more."""
        if self._client is None:
            return
        if isinstance(copy, Store):
            tell = self._client.commit if written else self._client.abort
            tell(copy.boot, copy.reservation)
        elif copy.lease:
            self._client.release(copy.boot, copy.lease)

    def _refuse(self, copy: Load | Store) -> None:
        """A copy that never began."""
        self._boundary.counters[f"{copy.kind}_refused"] += 1
        self._settle(copy)

    def _poll(self) -> None:
        if self._copying and self._mover is not None:
            for done in self._boundary.run([], self._mover.poll):
                self._copying -= 1
                self._boundary.run(None, self._ended, done)

    def _ended(self, done: Done) -> None:
        """A copy is over: note it first, so that the engine hears of it whatever else fails."""
        copy = _copy_of(done)
        self.traffic.copied(done)
        if done.outcome == "lost" and not any(kept is self._owners for kept in _lost):
            _lost.append(self._owners)
        if isinstance(copy, Store):
            self._close_one(copy.step)
        else:
            self._finished.add(copy.request)
            if not done.ok:
                self._failed.add(copy.request)
        if not done.ok:
            why = done.error or f"{done.seconds:.3f} s"
            said = "a %s ended %s and counts as a miss: %s", copy.kind, done.outcome, why
            self._boundary.count(f"{copy.kind}_{done.outcome}", *said)

    def _close_one(self, step: int) -> None:
        """One store of ``step`` (or its planning) is over; with the last, the step is reported."""
        self._open[step] -= 1
        if self._open[step] == 0:
            del self._open[step]
            self._settled.append(step)


def _copy_of(done: Done) -> Load | Store:
    copy = done.job.name
    assert isinstance(copy, Load | Store)
    return copy
