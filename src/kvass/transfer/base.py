"""A mover carries out copy plans in the background, and reports the end of every job exactly once.

It knows bytes, not requests, and never talks to the daemon. The caller that submits a job gets its
outcome, and sends ``Commit``, ``Release`` or ``Abort``.

Duties of the caller, which a mover does not check:

- The blocks of a job are held, and its slots reserved or leased, until the job has ended. So no two
  rows of jobs that have not ended touch the same bytes, and their order does not matter.
- A store is submitted after the forward pass that computed its blocks.
- ``arena`` is the mapping of the boot that the plan's slots belong to. The job keeps it alive.
- One thread submits, polls and closes. ``on_done`` runs on another.

Promises of a mover:

- ``submit`` waits for no copy. If it raises, the job was not accepted and no byte was moved.
- The end of every accepted job is reported once by ``on_done``, on the copy thread, and then once
  by ``poll``. This holds even if the copy raised, or if the mover was closed.
- ``done`` means that every byte of the plan was moved before ``deadline_s``.
- A copy that raises fails its own job only.
- Loads go before stores, because a request waits for them. Among loads, and among stores, a smaller
  job may overtake a larger one, but only until the mover has copied as many bytes as the larger job
  has. So no job starves. A job that goes first waits for at most one row.
- The copy does not hold the GIL and takes it only a few times per row.
"""

from __future__ import annotations

import logging
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread, current_thread
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from kvass.errors import UsageError
from kvass.layout.copy_plan import CopyPlan, RowCopy
from kvass.layout.describe import GroupPlanes

U8Array = npt.NDArray[np.uint8]
Kind = Literal["store", "load"]

Outcome = Literal["done", "late", "failed", "differs", "cancelled", "lost"]
"""``late``: past its deadline (law 5), so what it wrote into blocks must not be used. ``failed``:
the copy raised. ``differs``: ``Job.verify`` found wrong bytes. ``cancelled``: the mover was closed
first. After all of these nothing reads or writes for the job any more. ``lost``: the device died or
hangs, so it may still read or write. Then send the daemon nothing; it waits for the end of this
process (law 3)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One store (blocks -> slots) or load (slots -> blocks), usually with one plan per group.

    ``arena`` is uint8 of shape ``(arena_bytes,)``. Its first ``populated`` bytes have memory, and a
    mover pins nothing beyond them. ``prepare(lo, hi)`` allocates memory for these bytes, or raises
    ``OSError``. A store calls it before it writes, because writing where there is no memory raises
    SIGBUS. ``deadline_s`` is the deadline of the lease or the reservation, in CLOCK_MONOTONIC.
    ``name`` is for the caller.
    ``verify`` is called on the copy thread after the last byte, if the job is ``done``, and before
    it ends. It returns the job's outcome and error, and must not raise.
    ``on_done`` is called on the copy thread and must not block.
    """

    kind: Kind
    plans: tuple[CopyPlan, ...]
    arena: U8Array
    deadline_s: float = math.inf
    name: object = None
    on_done: Callable[[Done], None] | None = None
    populated: int = sys.maxsize
    prepare: Callable[[int, int], None] | None = None
    verify: Callable[[Job], tuple[Outcome, str]] | None = None

    def prepare_row(self, planes: GroupPlanes, row: RowCopy) -> None:
        """Allocate memory for the slot of ``row``, which is copied next. Raises ``OSError``."""
        if self.prepare is not None and self.kind == "store":
            self.prepare(row.slot, row.slot + planes.shard_bytes)

    @property
    def bytes(self) -> int:
        """The KV bytes that this job copies."""
        return sum(plan.bytes for plan in self.plans)


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """How a job ended. ``seconds``: from ``submit`` to the last byte. ``error`` is one line if it
    failed. ``copying_s``: how long one thread would have copied; on a device, ``seconds``."""

    job: Job
    outcome: Outcome
    seconds: float = 0.0
    error: str = ""
    copying_s: float = 0.0

    @property
    def ok(self) -> bool:
        return self.outcome == "done"


class Mover(ABC):
    """A mover between arena slots and the planes of ``groups``, in regions of ``region_bytes``
    bytes.

    The copy thread starts with the first job. Raises UsageError if a plane leaves its region.
    """

    copies_now: ClassVar[bool] = False
    """Whether it has ``copy_now``."""

    def __init__(
        self,
        groups: Sequence[GroupPlanes],
        region_bytes: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        for planes in groups:
            planes.check(region_bytes)
        self._planes = {planes.group: planes for planes in groups}
        self._clock = clock
        self._changed = Condition()
        # Guarded by _changed.
        self._thread: Thread | None = None
        self._closed = False
        self._unsettled = 0
        self._settled: deque[Done] = deque()

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Queue ``job``. Raises UsageError if the mover is closed or the job does not fit arena or
        planes, RuntimeError if the copy thread cannot be started."""

    @abstractmethod
    def _run(self) -> None:
        """Run the copy thread until the mover is closed and all jobs have ended."""

    def copy_now(self, job: Job) -> None:
        """Carry out ``job`` in this thread, before all that is queued, so that ``poll`` returns it
        next. Raises UsageError as ``submit``, and if this mover cannot (``copies_now``)."""
        raise UsageError("this mover copies in the background only")

    def poll(self) -> list[Done]:
        """The jobs that ended since the last call, oldest first. Never waits."""
        if not self._settled:  # without the lock: this is called in each step
            return []
        with self._changed:
            done = list(self._settled)
            self._settled.clear()
            return done

    def drain(self, timeout_s: float) -> bool:
        """Wait until every submitted job has ended; False if ``timeout_s`` passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unsettled == 0, timeout_s)

    def close(self) -> None:
        """Cancel the queued jobs, finish rows that are being copied, end the thread. Idempotent.

        All jobs have ended when it returns; ``poll`` still returns them. Raises UsageError if it
        is called from ``on_done``.
        """
        self._join()

    def _join(self, timeout_s: float | None = None) -> bool:
        """Close, and wait for the thread. Returns whether it has ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is current_thread():
            raise UsageError("close() was called from on_done; call it from another thread")
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _start(self) -> None:
        """Start the copy thread if there is none. Raises as ``submit`` if no job can be accepted.
        The caller holds ``_changed``."""
        if self._closed:
            raise UsageError("this mover is closed; submit before close()")
        if self._thread is None:
            thread = Thread(target=self._run, name="kvass-copy", daemon=True)
            thread.start()
            self._thread = thread

    def _settle(
        self,
        job: Job,
        since: float,
        outcome: Outcome,
        error: str = "",
        copying_s: float | None = None,
    ) -> None:
        seconds = self._clock() - since
        if outcome == "done" and job.verify is not None:
            outcome, error = self._verified(job, job.verify)
        done = Done(job, outcome, seconds, error, seconds if copying_s is None else copying_s)
        if job.on_done is not None:
            try:
                job.on_done(done)
            except Exception:  # noqa: BLE001 - a caller's bug must not keep other jobs open
                _log.exception("on_done of job %r raised", job.name)
        with self._changed:
            self._settled.append(done)
            self._unsettled -= 1
            self._changed.notify_all()

    def _verified(
        self, job: Job, verify: Callable[[Job], tuple[Outcome, str]]
    ) -> tuple[Outcome, str]:
        try:
            return verify(job)
        except Exception as error:  # noqa: BLE001 - a caller's bug must not keep the job open
            _log.exception("verify of job %r raised", job.name)
            return "failed", f"{type(error).__name__}: {error}"

    def _check(self, job: Job) -> None:
        """Raise UsageError unless ``job`` fits its arena and the planes."""
        check_bytes(job.arena, "the arena")
        for plan in job.plans:
            group = plan.planes.group
            if self._planes.get(group) != plan.planes:
                raise UsageError(f"group {group}: planned for planes this mover has not")
            if plan.end > job.arena.nbytes:
                raise UsageError(
                    f"group {group}: a slot ends at byte {plan.end} of an arena of "
                    f"{job.arena.nbytes} bytes; is the plan of another boot?"
                )
            if job.kind == "load" and not plan.distinct:
                raise UsageError(f"group {group}: two pages would be loaded into one block")


def check_bytes(memory: U8Array, what: str) -> None:
    """Raise UsageError unless ``memory`` is a flat, writable array of bytes."""
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise UsageError(f"{what} is {memory.dtype} {memory.shape}; give a flat uint8 array")
    if not memory.flags.writeable:
        raise UsageError(f"{what} is read-only; give a writable array")
