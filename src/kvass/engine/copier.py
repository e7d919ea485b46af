"""The worker's half of a connector: copies between this rank's KV pages and the arena.

Laws of this file:

- Every rank reports every load as finished exactly once. It reports the load as failed unless every
  byte was there before the deadline.
- Every rank reports every step with stores exactly once, also if the engine never called ``store``
  for it. The engine counts the reports of all ranks.
- Of ranks that hold equal bytes, only the first stores. The others send the daemon nothing about
  the store.
- The commit, abort or release of a copy is sent from the copy thread, right after the last byte.
- The engine's thread waits for other copies only in a step that computes nothing, for at most
  ``COPY_WAIT_S``, and where the engine needs its blocks or its memory back (``settle``, ``wait``).
- Nothing is copied for a LoRA adapter that this rank does not hold (``held_adapters.py``).
- A copy touches only the arena of the boot of the daemon that granted its slots.
- A load inside a step is copied before the forward pass, by the engine's thread. If it failed,
  nothing is stored that this step or a later one computed, until the scheduler has taken these
  steps back (``StepWork.recovered``).
- After a copy that was verified and is wrong (``verifier.py``), this rank copies nothing more. The
  scheduler is told.
- After a forward pass that raised or never ran, nothing is stored that it or a later step computed,
  until the engine has emptied its own prefix cache. Until then the engine may reuse blocks that
  were never filled.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from kvass.client.worker import ArenaLease, WorkerClient
from kvass.engine import tracing
from kvass.engine.boundary import Boundary, log
from kvass.engine.clients import worker_client
from kvass.engine.copy_speed import Copied
from kvass.engine.held_adapters import HeldAdapters, News
from kvass.engine.memory import KVMemory, MakeMover, open_mover
from kvass.engine.rank_report import NEVER, EndedLoads, RankReport
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import AdapterHeld, Compared, Load, ShadowCheck, StepWork, Store
from kvass.engine.traffic import EngineTraffic
from kvass.engine.verifier import Verifier
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes
from kvass.transfer.base import Done, Job, Mover, Outcome
from kvass.transfer.device import MissingError

if TYPE_CHECKING:
    from kvass.engine.comparer import Comparer

COPY_WAIT_S: Final = 0.005
"""How long a step that computes nothing waits for copies. Each step, even an empty one, keeps the
GIL from the copy threads for 2 ms, so fewer steps are better. A request that arrives meanwhile has
to wait."""

CLOSE_WAIT_S: Final = 30.0
"""How long the engine waits for copies before its KV memory is taken away."""

_lost: Final[list[object]] = []
"""KV memory that a failed device may still access. It is kept until the process ends."""


class Copier:
    """The copier of one rank. Used from the worker's engine thread; only ``_copied`` runs on the
    copy thread. In each step call ``catch_up`` and ``load``, and after the forward pass ``store``,
    ``results`` and ``take_report``."""

    def __init__(
        self,
        setup: EngineSetup,
        rank: int,
        boundary: Boundary,
        make_mover: MakeMover = open_mover,
        held: HeldAdapters | None = None,
    ) -> None:
        """``held``: the LoRA adapters that this rank holds; None if the engine serves none. Raises
        UsageError for a rank outside the engine's world."""
        self._held = held
        self._setup = setup
        self._make_mover = make_mover
        self.strategy = setup.strategy.at(rank)
        """This rank, and which others reach its daemon."""
        self._boundary = boundary
        self._client: WorkerClient | None = None
        self._mover: Mover | None = None
        self._comparer: Comparer | None = None
        """Only in shadow mode."""
        self._compared: list[Compared] = []
        self._verifier: Verifier | None = None
        self._wrong: list[str] = []
        """What verification found wrong and no report has, one line for each copy."""
        self._planes: tuple[GroupPlanes, ...] = ()
        self._owners: tuple[object, ...] = ()
        self._loads = EndedLoads()
        self._copying = 0
        self._open: Counter[int] = Counter()
        self._ended_steps: list[int] = []
        self._unstored: StepWork | None = None
        self._computed = False
        self._empty_step = False
        self._step_number = 0
        self._first_bad_step = NEVER
        self.traffic = EngineTraffic()
        self._tracing = tracing.begin()

    def attach(self, memory: KVMemory) -> None:
        """Register this rank's KV caches with the daemon. If the engine made other KV caches
        before, call ``close`` first. After a sleep of the engine the KV caches are in the same
        place, so no call is needed."""
        registration = self._setup.register(self.strategy, memory.layout)
        registration.cache_bytes = memory.cache_bytes
        self._planes, self._owners = memory.planes, memory.owners
        self._mover = self._client = self._comparer = None
        if self._verifier is not None and self._verifier.difference:
            return
        try:
            self._mover = self._make_mover(memory, True)
            self._comparer = self._make_comparer(memory)
        except MissingError as reason:  # without this rank every lookup is a miss
            log.error("kvass is off, the engine runs uncached: %s", reason)
            return
        self._verifier = Verifier(memory, self._setup.verification, self._boundary)
        self._client = worker_client(self._setup, registration)

    def _make_comparer(self, memory: KVMemory) -> Comparer | None:
        """The comparer of shadow mode. Raises MissingError."""
        if not self._setup.shadow:
            return None
        from kvass.engine.comparer import Comparer

        return Comparer(memory, self.strategy.rank, self._boundary, self._make_mover)

    @property
    def client(self) -> WorkerClient | None:
        """This rank's connection; None before ``attach``."""
        return self._client

    @property
    def daemon(self) -> tuple[str, int | None]:
        """Where its daemon is, and of which user."""
        return self._setup.socket, self._setup.daemon_uid

    # ------------------------------------------------------------ a step

    def load(self, work: StepWork) -> None:
        if work.number > self._step_number + 1:
            self._step_failed(self._step_number + 1)
        if work.emptied:
            self._first_bad_step = NEVER
        # The number is 0 if planning raised before it set the number.
        self._step_number = work.number or self._step_number
        self._loads.taken_back(work.recovered)
        self._unstored, self._computed, self._empty_step = work, False, not work.computes
        self._note_adapters(self._step_number)
        for load in work.loads:
            if not self._may_load(load) or not self._boundary.run(False, self._begin, load):
                self._loaded(load, False)
                self._boundary.run(None, self._refuse, load)
        if any(load.in_step for load in work.loads):
            self._poll()

    def store(self, work: StepWork, computed: bool = True) -> None:
        """Begin this step's stores. ``computed``: the forward pass did not raise."""
        self._unstored = None
        if not computed:
            self._step_failed(work.number)
        self._note_adapters(work.number or self._step_number)
        if work.step == 0:
            return
        stores = work.stores if self.strategy.writes else []
        self._open[work.step] = len(stores) + len(work.checks) + 1
        for store in stores:
            good = self._computed_well(store.adapter, store.first_step, store.computed)
            if not good or not self._boundary.run(False, self._begin, store):
                self._count_down(work.step)
                self._boundary.run(None, self._refuse, store)
        for check in work.checks:
            load = check.load
            good = self._computed_well(load.adapter, check.first_step, check.computed)
            if not good or not self._boundary.run(False, self._begin_check, check):
                self._boundary.run(None, self._settle, load)
                refused = Compared(load.request, self.strategy.rank, error="not begun")
                self._check_ended(check, refused)
        self._count_down(work.step)

    def _step_failed(self, number: int) -> None:
        """Step ``number`` did not compute what was planned: store nothing from it on."""
        self._first_bad_step = min(self._first_bad_step, number)
        self._boundary.count(
            "steps_raised",
            "a step of this engine raised or never ran: it stores no more KV until its own prefix "
            "cache is emptied (reset_prefix_cache), because that may hold blocks never computed",
        )

    def catch_up(self) -> None:
        """Begin the stores of the previous step, if ``store`` was never called for it.

        With speculative decoding, vLLM's V1 runner calls ``store`` after the drafter ran. Earlier
        pipeline stages have no drafter, so there it is never called. vLLM 0.30 does not call it in
        a step that computes nothing. In all other cases the call is missing only if something
        raised.
        """
        if (work := self._unstored) is not None:
            skipped = not (self.strategy.last_stage and work.computes)
            self.store(work, self._computed and skipped)

    def results(self, computed: bool = True) -> tuple[set[str], set[str]]:
        """The requests whose load ended since the last call, and those of them whose load failed.
        ``computed``: the forward pass of the step did not raise. If it raised, both sets are empty,
        and the next step returns what ended in this one."""
        self._computed = computed
        self._poll()
        if (
            self._empty_step
            and self._mover is not None
            and not (self._loads.finished or self._ended_steps)
        ):
            self._mover.drain(COPY_WAIT_S)
            if self._comparer is not None:
                self._comparer.wait(COPY_WAIT_S)
            self._poll()
        if not computed:
            return set(), set()
        return self._loads.take()

    def take_report(self) -> RankReport | None:
        """What is to be reported since the last call; None: nothing, or the step raised."""
        self._poll()
        if not self._computed:
            return None
        report = RankReport(
            dict.fromkeys(self._ended_steps, 1),
            self._boundary.run({}, self._news),
            self._compared,
            self._wrong,
            self._boundary.run({}, self._take_copied),
            *self._loads.take_in_step(),
        )
        self._ended_steps, self._compared, self._wrong = [], [], []
        return report if any(vars(report).values()) else None

    def _take_copied(self) -> dict[int, Copied]:
        """What was loaded since the last call, by rank."""
        copied = self._loads.take_copied()
        if not copied[0] or self._verifier is None:
            return {}
        sizes = tuple(planes.block_bytes for planes in self._planes)
        verified = self._verifier.loads_verified(self._planes)
        in_step = self._mover is not None and self._mover.copies_now
        return {self.strategy.rank: Copied(*copied, sizes, verified, in_step)}

    def take_bad_blocks(self) -> set[int]:
        """The ids of the blocks that this rank could not load inside the step."""
        return self._loads.take_bad_blocks()

    def _news(self) -> dict[int, News]:
        if self._held is None:
            return {}
        self._note_adapters(self._step_number)
        news = self._held.news()
        return {self._held.rank: news} if news else {}

    def wait(self) -> None:
        """Wait until no copy and no check runs, for at most ``CLOSE_WAIT_S``."""
        if not self._drained(CLOSE_WAIT_S):
            log.error(
                "copies have not ended for %g s, and the KV memory is taken away", CLOSE_WAIT_S
            )

    def settle(self, most_s: float) -> None:
        """Wait between two steps until no copy and no check runs, for at most ``most_s``, so that
        ``take_report`` has them."""
        if self._unstored is not None and not self._unstored.computes:
            self.catch_up()
        self._drained(most_s)

    def _drained(self, most_s: float) -> bool:
        """Wait until no copy and no check runs, for at most ``most_s``. False: a copy does."""
        until_s = time.monotonic() + most_s
        while self._comparer is not None and self._comparer.busy and time.monotonic() < until_s:
            self._comparer.wait(COPY_WAIT_S)
            self._poll()
        return self._mover is None or self._mover.drain(until_s - time.monotonic())

    def close(self) -> None:
        """End the copies, then the connection. The connection's EOF shows the daemon that this rank
        writes nothing any more."""
        if self._mover is not None:
            self._mover.close()
        if self._comparer is not None:
            self._comparer.close()
        self._poll()
        if self._client is not None:
            self._client.close()

    # ------------------------------------------------------------ adapters

    def _note_adapters(self, number: int) -> None:
        """Note which adapters this rank holds in step ``number``. If that fails, note that they are
        unknown."""
        if self._held is not None and not self._boundary.run(False, self._look_at_adapters, number):
            self._held.note_unknown(number)

    def _look_at_adapters(self, number: int) -> bool:
        assert self._held is not None
        self._held.look(number)
        return True

    def _may_load(self, load: Load) -> bool:
        """Whether this rank holds the adapter that computed the KV of ``load``, or will read it."""
        return load.adapter is None or (
            self._held is not None and self._held.may_load(load.adapter)
        )

    def _computed_well(self, adapter: AdapterHeld | None, first: int, last: int) -> bool:
        """Whether no forward pass up to step ``last`` failed, and this rank held ``adapter`` in
        every step since ``first``, the first that computed the request."""
        return last < min(self._first_bad_step, self._loads.first_bad_step) and (
            adapter is None
            or (self._held is not None and self._held.computed(adapter, first, last))
        )

    # ------------------------------------------------------------ copies

    def _begin(self, copy: Load | Store) -> bool:
        """Submit one copy. False: its lease or its arena is gone."""
        if self._client is None or self._mover is None:
            return False
        if isinstance(copy, Load) and copy.lease == 0:
            return False
        if self._verifier is not None and self._verifier.difference:
            return False
        arena = self._client.arena(copy.boot, copy.given_s)
        if arena is None:
            return False
        try:
            plans, ended = self._plans(copy), partial(self._copied, arena)
            job = Job(
                copy.kind,
                plans,
                arena.buffer,
                copy.deadline_s,
                copy,
                ended,
                arena.populated,
                arena.prepare,
                None if self._verifier is None else self._verify,
            )
            if isinstance(copy, Load) and copy.in_step:
                self._mover.copy_now(job)
            else:
                self._mover.submit(job)
        except BaseException:
            arena.close()
            raise
        self._copying += 1
        return True

    def _plans(self, copy: Load | Store) -> tuple[CopyPlan, ...]:
        """One copy plan for each group of which this rank has layers."""
        plans = []
        skips = (isinstance(copy, Load) and copy.skip) or (0,) * len(copy.blocks)
        for planes, ids, where, skip in zip(
            self._planes, copy.blocks, copy.slots, skips, strict=True
        ):
            if ids and planes.planes:
                offsets = where.offsets(self.strategy.shard, planes.shard_bytes)
                drop = -len(ids) % planes.chunk_blocks
                table = np.array(ids + (0,) * drop, np.int64).reshape(-1, planes.chunk_blocks)
                plans.append(plan_copy(planes, table, offsets, skip=skip, drop=drop))
        return tuple(plans)

    def _begin_check(self, check: ShadowCheck) -> bool:
        """Begin a check of shadow mode. False: its lease or its arena is gone."""
        if self._client is None or self._mover is None or self._comparer is None:
            return False
        load = check.load
        arena = self._client.arena(load.boot, load.given_s)
        if arena is None:
            return False
        try:
            plans, end = self._plans(load), partial(self._settle, load)
            self._comparer.begin(check, plans, arena, self._mover, end)
        except BaseException:
            arena.close()
            raise
        return True

    # ------------------------------------------------------------ ends

    def _verify(self, job: Job) -> tuple[Outcome, str]:
        """Verify a copy, on the copy thread, after the last byte."""
        assert self._verifier is not None
        copy = job.name
        assert isinstance(copy, Load | Store)
        return self._verifier.check(job, partial(self._holds, copy))

    def _holds(self, copy: Load | Store) -> bool:
        """Whether this rank's connection is still the one on which the slots of ``copy`` came.
        Else other bytes may be in them by now."""
        arena = self._client and self._client.arena(copy.boot, copy.given_s)
        if arena is None:
            return False
        arena.close()
        return True

    def _copied(self, arena: ArenaLease, done: Done) -> None:
        """The end of a copy, on the copy thread, right after the last byte."""
        if done.outcome != "lost":  # a lost copy may still run, until this process ends
            self._settle(_copy_of(done), done.ok)
            arena.close()
        if self._tracing is not None:
            self._tracing.copied(_copy_of(done), done)

    def _settle(self, copy: Load | Store, written: bool = False) -> None:
        """Send the commit, abort or release of a copy that has ended. ``written``: the copy was
        complete and in time."""
        if self._client is None:
            return
        if isinstance(copy, Store):
            if written:
                self._client.commit(copy.boot, copy.reservation)
            else:
                self._client.abort(copy.boot, copy.reservation)
        elif copy.lease:
            self._client.release(copy.boot, copy.lease)

    def _refuse(self, copy: Load | Store) -> None:
        """Count and settle a copy that never began."""
        self._boundary.counters[f"{copy.kind}_refused"] += 1
        self._settle(copy)

    def _poll(self) -> None:
        # A comparer's jobs on this mover are not counted in ``_copying``.
        if self._mover is not None and (self._copying or self._comparer is not None):
            for done in self._boundary.run([], self._mover.poll):
                if not isinstance(done.job.name, ShadowCheck):
                    self._copying -= 1
                    self._boundary.run(None, self._ended, done)
        if self._comparer is not None:
            for check, result in self._comparer.ended():
                self._check_ended(check, result)

    def _ended(self, done: Done) -> None:
        """Take in the end of a copy, and count it if it failed."""
        copy = _copy_of(done)
        self.traffic.copied(done)
        if self._verifier is not None:
            self.traffic.add(self._verifier.take_counts())
        if done.outcome == "differs":
            self._wrong.append(f"rank {self.strategy.rank}: {done.error}")
        if done.outcome == "lost" and not any(kept is self._owners for kept in _lost):
            _lost.append(self._owners)
        if isinstance(copy, Store):
            self._count_down(copy.step)
        else:
            self._loaded(copy, done.ok)
            if done.ok:
                self._loads.add_copied(done.job.bytes, done.copying_s)
        if not done.ok:
            self._boundary.count(
                f"{copy.kind}_{done.outcome}",
                "a %s ended %s and counts as a miss: %s",
                copy.kind,
                done.outcome,
                done.error or f"{done.seconds:.3f} s",
            )

    def _loaded(self, load: Load, ok: bool) -> None:
        """Note that a load ended, and whether well."""
        self._loads.add(load, ok, self._step_number)
        if ok and load.in_step:
            self.traffic.count("loads_in_step")

    def _check_ended(self, check: ShadowCheck, result: Compared) -> None:
        """Take in the end of a check."""
        self._compared.append(result)
        self._count_down(check.step)

    def _count_down(self, step: int) -> None:
        """Count down the stores and checks of ``step`` that have not ended, and 1 for the call of
        ``store`` that begins them. At 0 the step can be reported."""
        self._open[step] -= 1
        if self._open[step] == 0:
            del self._open[step]
            self._ended_steps.append(step)


def _copy_of(done: Done) -> Load | Store:
    copy = done.job.name
    assert isinstance(copy, Load | Store)
    return copy
