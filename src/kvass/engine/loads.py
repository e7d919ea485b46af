"""Loads as a step's work has them: made of a match, or such that they fail.

Law of this file: a load is of the tokens that were matched, or fails.
"""

from __future__ import annotations

from kvass.client.lookups import Match
from kvass.engine.hit_limits import HitLimits
from kvass.engine.in_step import InStep
from kvass.engine.request_state import RequestState
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import Load
from kvass.layout.spans import Table


class LoadMaker:
    """Used from the engine's scheduler thread only."""

    def __init__(self, setup: EngineSetup, limits: HitLimits, in_step: InStep) -> None:
        self._spans, self._limits, self._in_step = setup.spans, limits, in_step

    def failing(self, name: str, state: RequestState | None, table: Table) -> Load:
        if state is None or not state.in_step:
            return Load(name)
        return Load(name, in_step=self._in_step.blocks(state, table))

    def load(self, state: RequestState, match: Match, table: Table, external: int) -> Load | None:
        """The load of ``match``. None if the engine wants other tokens than were matched."""
        answer = state.answer
        if answer is None or external not in (answer.end - answer.local, state.in_step):
            return None
        if answer.local < self._limits.tokens(match.first):
            return None
        slots = self._limits.slots(match, answer.end)
        rows = list(map(len, slots))
        found = self._spans.to_load(table, answer.local, match.first, answer.end, rows)
        if found is None:
            return None
        blocks, skip = found
        return Load(
            request=state.request.name,
            boot=match.boot,
            lease=match.lease,
            given_s=match.given_s,
            deadline_s=match.deadline_s,
            slots=slots,
            blocks=blocks,
            skip=skip,
            trace=state.request.trace,
            adapter=None if answer.named is None else answer.named.held,
            in_step=self._in_step.blocks(state, table) if state.in_step else (),
        )
