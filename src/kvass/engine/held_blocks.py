"""Held blocks: blocks that the engine must not reuse, because a store reads them or may read them
later.

Laws of this file:

- The blocks of a store are held from the step that plans it until every rank has reported that
  step.
- If a copy hangs, its blocks stay held, but the engine stops waiting for them.
- Pending reserves and ended requests together keep at most 1 / ``POOL_SHARE`` of the pool's blocks
  from being free. A check of shadow mode holds no more than that, together with the stores.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvass.engine.protocols import BlockPool
from kvass.engine.step_work import StepWork
from kvass.layout.spans import Blocks

HUNG_S: Final = 5.0
"""How long after a copy's deadline its report is awaited. A copy that does not hang ends at its
deadline."""
POOL_SHARE: Final = 4
"""The divisor of the pool's size, in the law above."""


class Holding(Protocol):
    """A pending reserve or an ended request: it holds blocks while it waits."""

    @property
    def held(self) -> list[Any]:
        """Blocks of the engine's pool."""
        ...


def freed_by_giving_up(pool: BlockPool, waiting: Iterable[Holding]) -> int:
    """How many blocks would become free if all of ``waiting`` were given up."""
    return pool.freed_by(block for one in waiting for block in one.held)


def excess(pool: BlockPool, waiting: Iterable[Holding]) -> int:
    """How many blocks ``waiting`` holds beyond its share of the pool. Not positive: none."""
    return freed_by_giving_up(pool, waiting) - pool.blocks // POOL_SHARE


@dataclass
class _StepBlocks:
    """The blocks of one step's stores. ``reports`` ranks have reported the step. After ``until_s``
    (CLOCK_MONOTONIC) the copies of the other ranks count as hung."""

    blocks: list[Any] = field(default_factory=list)
    until_s: float = 0.0
    reports: int = 0


class CopiedBlocks:
    """The blocks that the ranks are copying or checking, by step (``StepWork.step``). ``ranks``:
    how many ranks report each step."""

    def __init__(self, pool: BlockPool, ranks: int) -> None:
        self._pool = pool
        self._ranks = ranks
        self._step = 0
        """The number of the last step that has stores or checks."""
        self._steps: dict[int, _StepBlocks] = {}

    def hold(self, work: StepWork, blocks: Blocks, deadline_s: float) -> int:
        """Hold ``blocks`` until all ranks have reported the step of ``work``, which is returned.
        The ranks' copies end by ``deadline_s``."""
        self._step = work.step = work.step or self._step + 1
        held = self._pool.hold(i for ids in blocks for i in ids)
        one = self._steps.setdefault(work.step, _StepBlocks())
        one.blocks += held
        one.until_s = max(one.until_s, deadline_s + HUNG_S)
        return work.step

    def room_for_checks(self) -> int:
        """How many blocks a check may hold: with those that are being copied, at most a share of
        the pool."""
        return max(0, self._pool.blocks // POOL_SHARE - self.count)

    def revoke(self, work: StepWork) -> None:
        """Free the blocks of the step of ``work``, because no rank will get it."""
        step, work.step = work.step, 0
        if step in self._steps:
            self._pool.free(self._steps.pop(step).blocks)

    def reported(self, steps: Mapping[int, int]) -> None:
        """``steps[s]`` more ranks have ended all copies of step ``s``. After the last rank the
        blocks of the step are freed."""
        for step in steps.keys() & self._steps.keys():
            one = self._steps[step]
            one.reports += steps[step]
            if one.reports >= self._ranks:
                del self._steps[step]
                self._pool.free(one.blocks)

    @property
    def count(self) -> int:
        """How many blocks are held; one that is held twice counts twice."""
        return sum(len(one.blocks) for one in self._steps.values())

    @property
    def distinct(self) -> int:
        """How many different blocks are held."""
        return len({id(block) for one in self._steps.values() for block in one.blocks})

    @property
    def awaited(self) -> bool:
        """Whether a report of a rank is awaited."""
        return bool(self._awaited())

    def freed_by_reports(self) -> int:
        """How many blocks will become free when the ranks have reported."""
        return self._pool.freed_by(block for one in self._awaited() for block in one.blocks)

    def _awaited(self) -> list[_StepBlocks]:
        """The steps whose reports are awaited: all but those of which a copy hangs."""
        now_s = time.monotonic()
        return [one for one in self._steps.values() if now_s < one.until_s]
