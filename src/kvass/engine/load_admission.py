"""Which loads may begin, in an engine that counts no blocks for drafts when it admits a load.

Such an engine admits loads as long as the prompts of all of them fit. When a request begins to
decode, it needs blocks for its drafts, too. If loads have ended and nothing else runs, each may
lack these blocks and hold those that another one lacks: no block ever becomes free.

Law of this file: a load begins if no other request loads or waits for its first step after a load,
or if the free blocks suffice for all that the new request and these others need. Otherwise its
lookup is answered as pending, as ``head_of_line.py`` does; its lease is kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvass.engine.protocols import BlockPool
from kvass.engine.request_state import LoadState, RequestState
from kvass.engine.setup import EngineSetup


class LoadAdmission:
    """Used from the engine's scheduler thread only."""

    def __init__(
        self, setup: EngineSetup, requests: Mapping[str, RequestState], pool: BlockPool
    ) -> None:
        self._setup, self._requests, self._pool = setup, requests, pool

    def admits(self, name: str) -> bool:
        """Whether a request that has a match may load it now."""
        if not self._setup.uncounted_tokens:
            return True
        waiting = [one for one in self._requests.values() if one.state is LoadState.LOADING]
        if not waiting:
            return True
        needed = self._blocks(self._requests[name].request.known_tokens)
        for one in waiting:
            needed += self._blocks(one.request.known_tokens - one.loaded_tokens)
        return needed <= self._pool.free_blocks

    def _blocks(self, tokens: int) -> int:
        """The most blocks that so many tokens and drafts after them need."""
        tokens += self._setup.uncounted_tokens
        return sum(-(-tokens // group.block_tokens) for group in self._setup.groups)
