"""Which hits are loaded inside the step that computes the rest of their request.

An asynchronous load takes its request out of the engine's queue until all ranks have reported it,
which is one step at least. A small load costs less than that: the ranks copy it before the forward
pass of the same step, and the engine's own requests wait for the copy.

Laws of this file:

- No step waits longer for such copies than its budget, as far as that is known beforehand: the time
  that the slowest rank takes for the bytes (``copy_speed.py``). An unknown speed is no budget.
- A load inside a step has a lease that is fresh, so that its end comes long before the deadline. If
  it fails all the same, the engine has computed with its blocks. So there are loads inside steps
  only in engines that can take such a step back (``InStep.enable``).
- Only verified ranks copy inside a step. After such a load failed, the next ``TRIAL`` loads are
  asynchronous. Hits that are not worth such a load count, too: else these loads might never come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from kvass.client.lookups import Match
from kvass.engine.copy_speed import CopySpeed
from kvass.engine.hit_limits import HitLimits
from kvass.engine.protocols import Request
from kvass.engine.request_state import RequestState
from kvass.engine.setup import EngineSetup
from kvass.engine.step_times import StepTimes
from kvass.layout.spans import Table

STEP_SHARE: Final = 0.5
"""The most of a step's duration that copies inside it may take."""
FRESH_S: Final = 1.0
"""A lease is fresh for the first half of its time, and while so much is left of it."""
TRIAL: Final = 16
"""How many loads must end well, or be not worth it, after one inside a step failed."""


class InStep:
    """The loads inside the steps of one engine. Used from its scheduler's thread only."""

    def __init__(
        self, setup: EngineSetup, limits: HitLimits, times: StepTimes, speed: CopySpeed
    ) -> None:
        self._setup, self._limits, self._times, self._speed = setup, limits, times, speed
        self._can_recover = False
        self._spent_s = 0.0
        """How long the copies take that the next step has so far."""
        self._trial = 0

    def enable(self) -> None:
        """From here on the engine can take back a step whose load failed."""
        self._can_recover = True

    @property
    def why_never(self) -> str:
        """Why this engine loads nothing inside steps, even if it could take one back."""
        setup = self._setup
        if setup.sync_load_s <= 0:
            return "it is switched off"
        if setup.shadow or not setup.loads:
            return "nothing is loaded"
        if len(setup.groups) != 1 or not setup.hits_whole_prompts:
            return "the engine cannot say which blocks of several layer groups are wrong"
        if setup.strategy.replicas > 1:
            return "the rank that stores what others hold, too, does not know of their failed loads"
        return ""

    @property
    def why_not(self) -> str:
        """Why this engine loads nothing inside steps; empty if it may."""
        return self.why_never or ("" if self._can_recover else "the engine cannot take back a step")

    def fits(self, blocks: Sequence[int]) -> bool:
        """Whether a load of ``blocks[g]`` blocks of each layer group ``g`` may be copied inside the
        step that is being planned."""
        seconds = self._speed.seconds(blocks)
        return seconds is not None and seconds <= self._left_s()

    def room(self, local: int, hit: int, match: Match | None = None) -> int:
        """How many of the ``hit`` tokens after the ``local`` ones could be copied inside the step
        that is being planned, up to a place where a hit may end. ``match``: what has them; None:
        nothing is matched yet."""
        if match is not None and not self._is_fresh(match):
            return 0
        if (left_s := self._left_s()) <= 0:
            return 0
        if self.fits(self._blocks(local, local + hit)):
            return hit
        tokens = self._speed.most(left_s) * self._setup.groups[0].block_tokens
        return min(hit, max(0, self._limits.end_before(local + tokens) - local))

    def tokens(self, request: Request, match: Match, local: int, end: int) -> int:
        """How many of the tokens ``[local, end)`` of ``match`` are loaded inside the step that is
        being planned; 0: its load is asynchronous. The engine must compute at least one token of
        the request."""
        if not self._is_fresh(match) or not self.fits(self._blocks(local, end)):
            return 0
        return min(end, request.known_tokens - 1) - local

    def blocks(self, state: RequestState, table: Table) -> tuple[int, ...]:
        """The ids of the blocks that are wrong if the load of a request fails: all that it has
        beyond the engine's own hit. Id 0 stands for all blocks."""
        if not table or state.answer is None:
            return (0,)
        return tuple(table[0][state.answer.local // self._setup.groups[0].block_tokens :])

    def planned(self, state: RequestState) -> None:
        """The step that is being planned gets the load of a request."""
        if state.in_step and state.answer is not None:
            blocks = self._blocks(state.answer.local, state.answer.end)
            self._spent_s += self._speed.seconds(blocks) or 0.0

    def new_step(self) -> None:
        """A step was planned; the next one begins."""
        self._spent_s = 0.0

    def ended(self, loads: int, failed: bool) -> None:
        """So many loads ended well or were not worth it, and one inside a step ``failed``."""
        self._trial = TRIAL if failed else max(0, self._trial - loads)

    def _blocks(self, local: int, end: int) -> list[int]:
        return [len(group.blocks(local, end)) for group in self._setup.groups]

    def _is_fresh(self, match: Match) -> bool:
        left_s = match.deadline_s - time.monotonic()
        return left_s >= max(FRESH_S, (match.deadline_s - match.given_s) / 2)

    def _left_s(self) -> float:
        """How long the copies may take that the step gets yet. 0: it gets none."""
        if self.why_not or self._trial or not (self._speed.verified and self._speed.in_step):
            return 0.0
        return self._budget_s() - self._spent_s

    def _budget_s(self) -> float:
        most_s, step_s = self._setup.sync_load_s, self._times.recent_s
        return min(most_s, STEP_SHARE * step_s) if step_s else most_s
