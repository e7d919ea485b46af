"""Blocks that the engine must not reuse yet, because a store still reads them or may yet read them.

Laws of this file:

- The blocks of a store are held from the step that plans it until every rank has reported that
  step.
- If a copy hangs, its blocks stay held, and the engine waits for them no longer.
- What waits to be offered, or for an answer, keeps at most 1 / ``POOL_SHARE`` of the blocks from
  being free.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvass.engine.protocols import BlockPool

HUNG_S: Final = 5.0
"""How long after its deadline a copy's report is awaited. A working copy ends at its deadline."""
POOL_SHARE: Final = 4


class Holding(Protocol):
    """Something that waits and holds blocks meanwhile."""

    @property
    def held(self) -> list[Any]:
        """Blocks of the engine's pool."""
        ...


def freed_by_giving_up(pool: BlockPool, waiting: Iterable[Holding]) -> int:
    """How many blocks would be free if all that is ``waiting`` were given up."""
    return pool.freed_by(block for one in waiting for block in one.held)


def excess(pool: BlockPool, waiting: Iterable[Holding]) -> int:
    """How many blocks what is ``waiting`` holds beyond its share of the pool; at most 0: none."""
    return freed_by_giving_up(pool, waiting) - pool.blocks // POOL_SHARE


@dataclass
class _StepBlocks:
    """The blocks of one step's stores. The ranks report before ``until_s`` (CLOCK_MONOTONIC), or a
    copy hangs; ``reports`` ranks have."""

    blocks: list[Any] = field(default_factory=list)
    until_s: float = 0.0
    reports: int = 0


class CopiedBlocks:
    """The blocks that ``ranks`` ranks copy, by the step of their stores."""

    def __init__(self, pool: BlockPool, ranks: int) -> None:
        self._pool = pool
        self._ranks = ranks
        self._steps: dict[int, _StepBlocks] = {}

    def hold(self, step: int, blocks: Iterable[int], deadline_s: float) -> None:
        """Hold ``blocks`` for a store of ``step`` whose copies end by ``deadline_s``."""
        held = self._pool.hold(blocks)
        one = self._steps.setdefault(step, _StepBlocks())
        one.blocks += held
        one.until_s = max(one.until_s, deadline_s + HUNG_S)

    def revoke(self, step: int) -> None:
        """No rank is told of this step's stores: free its blocks."""
        if step in self._steps:
            self._pool.free(self._steps.pop(step).blocks)

    def reported(self, steps: Mapping[int, int]) -> None:
        """``steps[s]`` more ranks ended all copies of step ``s``. The last one frees its blocks."""
        for step in steps.keys() & self._steps.keys():
            one = self._steps[step]
            one.reports += steps[step]
            if one.reports >= self._ranks:
                del self._steps[step]
                self._pool.free(one.blocks)

    @property
    def awaited(self) -> bool:
        """Whether a rank's report may still come."""
        return bool(self._awaited())

    def freed_by_reports(self) -> int:
        """How many blocks will be free when the ranks have reported."""
        return self._pool.freed_by(block for one in self._awaited() for block in one.blocks)

    def _awaited(self) -> list[_StepBlocks]:
        """Without the steps of which a copy hangs."""
        now_s = time.monotonic()
        return [one for one in self._steps.values() if now_s < one.until_s]
