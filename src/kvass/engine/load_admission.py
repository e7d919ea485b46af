"""Which loads may begin, in an engine that counts too few blocks when it admits a load.

Such an engine admits loads as long as its own count of the blocks that they need fits. Then loads
may have ended while nothing else runs, and each may lack blocks that another one holds: no block
ever becomes free, and the engine is stuck. ``Admission`` says what the count lacks: drafts, or
blocks of windows. In a window an engine needs blocks for all tokens of a step, because it frees
those before the window only when the step has ended.

Law of this file: a load begins if no other request loads or waits for its first step after a load,
or if the free blocks suffice for all that the new request and these others need. Otherwise its
lookup is answered as pending, as ``head_of_line.py`` does; its lease is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvass.engine.protocols import BlockPool
from kvass.engine.request_state import LoadState, RequestState
from kvass.engine.setup import Admission, EngineSetup
from kvass.types import GroupLayout


class LoadAdmission:
    """Used from the engine's scheduler thread only."""

    def __init__(
        self, setup: EngineSetup, requests: Mapping[str, RequestState], pool: BlockPool
    ) -> None:
        self._setup, self._requests, self._pool = setup, requests, pool

    def admits(self, name: str) -> bool:
        """Whether a request that has a match may load it now."""
        admission = self._setup.admission
        if admission is None:
            return True
        waiting = [one for one in self._requests.values() if one.state is LoadState.LOADING]
        if not waiting:
            return True
        new, needed = self._requests[name], 0
        for group in self._setup.groups:
            end = _end(new)
            needed += len(group.blocks(group.needs(end), end))
            needed += sum(_to_compute(group, one, admission) for one in (new, *waiting))
        return needed <= self._pool.free_blocks


def _end(state: RequestState) -> int:
    """How many tokens a request has when its load has ended."""
    return 0 if state.answer is None else state.answer.end


def _to_compute(group: GroupLayout, state: RequestState, admission: Admission) -> int:
    """The most blocks of a group that a request lacks after its load at any time until it
    decodes."""
    tokens = state.request.known_tokens - _end(state)
    if group.kind == "full" or group.kind == "state":
        return -(-(tokens + admission.draft_tokens) // group.block_tokens)
    tokens = min(tokens, admission.step_tokens) + admission.draft_tokens
    return 1 + -(-tokens // group.block_tokens)  # a step may begin inside a block
