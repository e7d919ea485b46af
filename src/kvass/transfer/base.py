"""The Mover: carries out copy plans in the background, and settles every job exactly once.

Law of this file: a mover knows bytes, not requests. It never talks to the daemon; whoever submits a
job hears of its end and sends ``Commit``, ``Release`` or ``Abort``.

Duties of the caller (a mover relies on these and does not check them):

- the blocks of a job are held (``block_pool.touch``, or allocated to the loading request) and its
  slots are reserved or leased until the job is settled; so no two unsettled jobs touch the same
  bytes, and the order of jobs among themselves means nothing;
- a store is submitted after the forward pass that computed its blocks;
- ``arena`` is the mapping of the boot whose slots the plan names, and stays mapped until the job is
  settled (the job itself keeps the array alive);
- one thread submits and polls (``on_done`` runs on another).

Promises of a mover:

- ``submit`` never waits for a copy and raises only :class:`~kvass.errors.UsageError`, or
  RuntimeError if no thread can be started: before any byte moved, and the job is not accepted;
- every accepted job is settled exactly once, with one :class:`Done`: first ``on_done`` on the copy
  thread, then through ``poll``; also when the copy raised, and when the mover closes;
- outcome ``done`` means: every byte of the plan was moved, and before ``deadline_s``;
- a copy that raises fails its own job and no other;
- loads go before stores, since a request waits for them. Among loads (and among stores) a smaller
  job may overtake a bigger one, but only until the mover has moved as many bytes as the bigger one
  has since that came: nobody starves, and a short prompt does not wait for a long one. The unit is
  a row: whoever goes first waits for at most one;
- the copy does not hold the GIL, and takes it few times per row, not per block or layer: an engine
  thread that is busy in Python lets another thread have it only every 5 ms.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvass.layout.copy_plan import CopyPlan

U8Array = npt.NDArray[np.uint8]

Outcome = Literal["done", "late", "failed", "cancelled", "lost"]
"""``late``: past its deadline (law 5; what it wrote into blocks must not be used); ``failed``: the
copy raised; ``cancelled``: the mover closed before it was complete. Of all these, nothing reads or
writes any more. ``lost``: the device died or hangs, and nobody can say that: tell the daemon
nothing, it waits for this process's end (law 3)."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One store (blocks -> slots) or load (slots -> blocks), usually with one plan per group.

    ``arena`` is uint8 of shape ``(arena_bytes,)``. ``deadline_s`` is CLOCK_MONOTONIC, of the lease
    or the reservation, and the mover checks it (before each row and after the last). ``name`` is
    the caller's, and only for him. ``on_done`` is called on the copy thread and must not block. Of
    the arena the first ``populated`` bytes have memory; a mover pins nothing beyond.
    """

    kind: Literal["store", "load"]
    plans: tuple[CopyPlan, ...]
    arena: U8Array
    deadline_s: float = math.inf
    name: object = None
    on_done: Callable[[Done], None] | None = None
    populated: int = sys.maxsize

    @property
    def bytes(self) -> int:
        """KV bytes that this job moves."""
        return sum(plan.bytes for plan in self.plans)


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """How a job ended. ``error`` is one line if it ``failed``, else empty.

    ``seconds`` is from ``submit`` to the last byte, waiting included.
    """

    job: Job
    outcome: Outcome
    seconds: float = 0.0
    error: str = ""

    @property
    def ok(self) -> bool:
        """All bytes were moved in time."""
        return self.outcome == "done"


class Mover(Protocol):
    """See the duties and promises at the top of this file."""

    def submit(self, job: Job) -> None:
        """Queue ``job``. Raises UsageError: closed, or a plan that does not fit arena or planes."""
        ...

    def poll(self) -> list[Done]:
        """What was settled since the last call, oldest first. Never waits."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until every submitted job is settled; False if ``timeout_s`` passed first."""
        ...

    def close(self) -> None:
        """Cancel what is queued, finish the row being copied, end the thread. Idempotent.

        All jobs are settled when it returns; ``poll`` still delivers them.
        """
        ...
