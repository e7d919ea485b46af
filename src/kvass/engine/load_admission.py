"""Which loads may begin, in an engine that counts too few blocks when it admits a load.

Such an engine admits loads as long as its own count of the blocks that they need fits. Then loads
may have ended while nothing else runs, and each may lack blocks that another one holds: no block
ever becomes free, and the engine is stuck. ``Admission`` says what the count lacks: drafts, or
blocks of windows. In a window an engine needs blocks for all tokens of a step, because it frees
those before the window only when the step has ended.

Law of this file: a load begins if no other request holds blocks and waits, or if the free blocks
suffice for all that the new request and these others need. Otherwise its lookup is answered as
pending, as ``head_of_line.py`` does; its lease is kept.

A load of another connector is counted once it has begun. It may begin after one of kvass: that is
the engine's decision, and its count lacks the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvass.engine.protocols import BlockPool
from kvass.engine.request_state import RequestState
from kvass.engine.setup import Admission, EngineSetup
from kvass.types import GroupLayout


class LoadAdmission:
    """Used from the engine's scheduler thread only."""

    def __init__(
        self, setup: EngineSetup, requests: Mapping[str, RequestState], pool: BlockPool
    ) -> None:
        assert setup.admission is None or setup.one_queue  # else no lookup is held back
        self._setup, self._requests, self._pool = setup, requests, pool

    def admits(self, name: str) -> bool:
        """Whether a request that has a match may load it now."""
        admission, new = self._setup.admission, self._requests[name]
        if admission is None:
            return True
        assert new.answer is not None  # it has a match
        waiting = [one.request for one in self._requests.values() if one.request.waits_with_blocks]
        if not waiting:
            return True
        end, needed = new.answer.end, 0
        left = [(one.computed_tokens, one.known_tokens) for one in waiting]
        left.append((end, new.request.known_tokens))
        for number, group in enumerate(self._setup.groups):
            if number in admission.rings:
                needed += 1  # the others have theirs
                continue
            needed += len(group.blocks(group.needs(end), end))
            needed += sum(_to_compute(group, *one, admission) for one in left)
        return needed <= self._pool.free_blocks


def _to_compute(group: GroupLayout, computed: int, known: int, admission: Admission) -> int:
    """The most blocks of a group that a request of ``known`` tokens needs until it decodes, beyond
    those that it has with ``computed`` tokens."""
    tokens = known - computed
    if group.rules.windowed:
        held = computed - group.needs(computed)
        tokens = min(tokens, group.window_tokens - held + admission.step_tokens)
    return -(-(tokens + admission.draft_tokens) // group.block_tokens)
