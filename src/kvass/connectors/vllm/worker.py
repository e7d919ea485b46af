"""The worker's side: copies between this rank's KV pages and the arena, and settles what they owe.

Laws of this file:

- Every load of the metadata is reported finished exactly once, and failed unless every byte was
  there before its deadline; every step with stores is reported exactly once, also one whose
  ``store`` vLLM forgot. By every rank: the engine counts them all.
- Of ranks that hold equal bytes only the first stores; the others say nothing of it to the daemon.
- What a copy owes the daemon is settled on the copy thread, right after the last byte: commit or
  abort for a store, release for a load. The engine's thread does not copy. It waits for copies
  only in a step that computes nothing, for ``COPY_WAIT_S`` at most.
- Memory of another boot than the metadata's is never touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from kvass.client.worker import ArenaLease, WorkerClient
from kvass.connectors.vllm.engine import Setup
from kvass.connectors.vllm.memory import Memory, read_memory
from kvass.connectors.vllm.metadata import Load, StepReport, StepWork, Store
from kvass.engine.boundary import Boundary, log
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import GroupPlanes
from kvass.layout.spans import Blocks
from kvass.transfer.base import Done, Job, Mover
from kvass.transfer.cuda import CudaMover
from kvass.transfer.cuda_runtime import MissingError, open_gpu
from kvass.transfer.host import HostMover
from kvass.types import Slots

COPY_WAIT_S: Final = 0.001
"""An engine in its caller's own process does not sleep after a step that computed nothing, as a
served one does. Without this wait it would keep the GIL from the copy thread all the time."""

_lost: Final[list[object]] = []
"""KV tensors that a device may still use after it failed: never let go of."""


def open_mover(memory: Memory, single: bool = False) -> Mover:
    """What copies these pages; ``single`` as for ``open_gpu``. Raises MissingError if a GPU cannot
    be used, with the reason."""
    device = memory.device()
    if device is None:
        return HostMover(memory.regions, memory.planes)
    runtime, below = open_gpu(device, single)
    return CudaMover(runtime, memory.gpu, memory.planes, kernel_below=below)


class WorkerSide:
    """Copies for one rank. Used from the worker's engine thread; ``_loaded`` and ``_stored`` run on
    the copy thread."""

    def __init__(
        self,
        setup: Setup,
        rank: int,
        boundary: Boundary,
        make_mover: Callable[[Memory], Mover] | None = None,
    ) -> None:
        """Raises UsageError for a rank outside the engine's world."""
        self._setup = setup
        self._make_mover = make_mover
        self._strategy = setup.strategy.at(rank)
        self._boundary = boundary
        self._client: WorkerClient | None = None
        self._mover: Mover | None = None
        self._planes: tuple[GroupPlanes, ...] = ()
        self._owners: tuple[object, ...] = ()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._open: Counter[int] = Counter()
        self._settled: dict[int, int] = {}
        self._unstored: StepWork | None = None
        self._computed = False
        self._idle = False
        self._raised = -1

    def attach(self, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> None:
        """The engine made its KV caches: describe them, and register with the daemon.

        Raises UsageError if they are not where ``kv_cache_config`` says.
        """
        self.close()  # a second time; not for an engine that slept: its caches come back in place
        setup = self._setup
        memory = read_memory(kv_cache_config, kv_caches, setup.chunk_tokens, setup.groups)
        registration = setup.register(self._strategy, memory.layout)
        self._planes, self._owners = memory.planes, memory.owners
        try:
            make = self._make_mover or partial(open_mover, single=setup.single_copies)
            self._mover = make(memory)
        except MissingError as reason:  # unregistered, this rank makes every lookup a miss
            log.error("kvass is off, the engine runs uncached: %s", reason)
            self._mover = self._client = None
            return
        self._client = WorkerClient(setup.socket, registration, incomplete=True)
        setup.when_named(self._client.complete)

    # ------------------------------------------------------------ a step

    def load(self, work: StepWork) -> None:
        """Begin this step's loads."""
        self._unstored, self._computed, self._idle = work, False, not work.computes
        for load in work.loads:
            if not self._boundary.run(False, self._begin_load, load):
                self._finished.add(load.request)
                self._failed.add(load.request)
                self._boundary.run(None, self._refuse_load, load)

    def store(self, work: StepWork, computed: bool = True) -> None:
        """Begin this step's stores; the forward pass is over, and ``computed`` what it was for. If
        not, nothing that was computed up to this step is stored, in this step or later."""
        self._unstored = None
        if not computed:
            self._raised = work.number
        if work.step == 0:
            return
        stores = work.stores if self._strategy.writes else []
        self._open[work.step] = len(stores) + 1
        for store in stores:
            good = store.computed > self._raised
            if not good or not self._boundary.run(False, self._begin_store, store):
                self._close_one(work.step)
                self._boundary.run(None, self._refuse_store, store)
        self._close_one(work.step)

    def catch_up(self) -> None:
        """Another step begins: begin the stores of the last one, if ``store`` was never called.

        vLLM's V1 runner with speculative decoding calls it after the drafter ran, and earlier
        pipeline stages have none. Late is right there: the blocks are held. Where there is a
        drafter its call is missing only if something raised, and nothing is stored.
        """
        if self._unstored is not None:
            self.store(self._unstored, self._computed and not self._strategy.last_stage)

    def results(self, computed: bool = True) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those of them that failed.

        ``computed``: the forward pass of the step did not raise.
        """
        self._computed = computed
        self._poll()
        if self._idle and self._mover is not None and not (self._finished or self._settled):
            self._mover.drain(COPY_WAIT_S)
            self._poll()
        finished, failed = self._finished, self._failed
        self._finished, self._failed = set(), set()
        return finished, failed

    def report(self) -> StepReport | None:
        """The steps whose stores are all settled on this rank since the last call."""
        self._poll()
        if not self._settled:
            return None
        settled, self._settled = self._settled, {}
        return StepReport(settled)

    def close(self) -> None:
        """End the copies, then the session: EOF says that nothing is written any more."""
        if self._mover is not None:
            self._mover.close()
            self._poll()
        if self._client is not None:
            self._client.close()

    # ------------------------------------------------------------ copies

    def _begin_load(self, load: Load) -> bool:
        """Submit one load; False if there is nothing to read any more."""
        return load.lease != 0 and self._submit("load", load, self._loaded, load.skip)

    def _begin_store(self, store: Store) -> bool:
        """Submit one store; False if there is nowhere to write any more."""
        return self._submit("store", store, self._stored)

    def _submit(
        self,
        kind: Literal["store", "load"],
        what: Load | Store,
        settle: Callable[[ArenaLease, Done], None],
        skip: tuple[int, ...] = (),
    ) -> bool:
        if self._client is None or self._mover is None:
            return False
        arena = self._client.arena(what.boot, what.given_s, what.slots)
        if arena is None:
            return False
        try:
            plans = self._plans(what.blocks, what.slots, skip)
            ended = partial(settle, arena)
            self._mover.submit(
                Job(kind, plans, arena.buffer, what.deadline_s, what, ended, arena.populated)
            )
        except BaseException:
            arena.close()
            raise
        return True

    def _plans(
        self, blocks: Blocks, slots: tuple[Slots, ...], skip: tuple[int, ...]
    ) -> tuple[CopyPlan, ...]:
        """One plan per group that this rank has layers of: its rows' blocks against its slots."""
        plans = []
        skips = skip or (0,) * len(blocks)
        for planes, ids, where, less in zip(self._planes, blocks, slots, skips, strict=True):
            if ids and planes.planes:
                offsets = where.offsets(self._strategy.shard, planes.shard_bytes)
                table = np.array(ids, np.int64).reshape(-1, planes.chunk_blocks)
                plans.append(plan_copy(planes, table, offsets, skip=less))
        return tuple(plans)

    def _loaded(self, arena: ArenaLease, done: Done) -> None:
        load = done.job.name
        assert isinstance(load, Load)
        assert self._client is not None
        if done.outcome == "lost":
            return  # the copy may be reading still: only this process's end settles it
        self._client.release(load.boot, load.lease)
        arena.close()

    def _stored(self, arena: ArenaLease, done: Done) -> None:
        store = done.job.name
        assert isinstance(store, Store)
        assert self._client is not None
        if done.outcome == "lost":
            return  # and here it may be writing
        if done.ok:
            self._client.commit(store.boot, store.reservation)
        else:
            self._client.abort(store.boot, store.reservation)
        arena.close()

    # ------------------------------------------------------------ ends

    def _poll(self) -> None:
        if self._mover is not None:
            for done in self._boundary.run([], self._mover.poll):
                self._boundary.run(None, self._ended, done)

    def _ended(self, done: Done) -> None:
        """A copy is over: note it first, so that whatever fails after is no loss to the engine."""
        what = done.job.name
        assert isinstance(what, Load | Store)
        if done.outcome == "lost" and not any(kept is self._owners for kept in _lost):
            _lost.append(self._owners)
        if isinstance(what, Store):
            self._close_one(what.step)
        else:
            self._finished.add(what.request)
            if not done.ok:
                self._failed.add(what.request)
        if not done.ok:
            self._boundary.count(
                f"{done.job.kind}_{done.outcome}",
                "a %s ended %s and counts as a miss: %s",
                done.job.kind,
                done.outcome,
                done.error or f"{done.seconds:.3f} s",
            )

    def _refuse_load(self, load: Load) -> None:
        """A load that never began: its lease given back."""
        self._boundary.counters["load_refused"] += 1
        if self._client is not None and load.lease:
            self._client.release(load.boot, load.lease)

    def _refuse_store(self, store: Store) -> None:
        """A store that never began: its reservation given back."""
        self._boundary.counters["store_refused"] += 1
        if self._client is not None:
            self._client.abort(store.boot, store.reservation)

    def _close_one(self, step: int) -> None:
        """One store of ``step`` (or its planning) is over; with the last, the step is reported."""
        self._open[step] -= 1
        if self._open[step] == 0:
            del self._open[step]
            self._settled[step] = 1
