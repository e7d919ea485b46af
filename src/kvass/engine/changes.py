"""Changes of an engine's weights while it runs: what was computed before must not be used after.

Laws of this file:

- A change is noted before it happens. KV that was computed before it is never matched or stored
  after it. The engine begins a new generation, so the daemon does not publish earlier reservations
  either.
- The engine's own prefix cache may still have blocks of the old weights. Then it is STALE: nothing
  is matched or stored, because such a block may be part of any prefix. This ends when the cache is
  empty and no live request has computed tokens.
- A reset of that cache counts as a change only where weights can be replaced without a call of
  ``weights_may_change``. There an attempted reset is enough. The same holds for the clear that is
  part of a pause.
- A change that cannot be taken in at once, for example because it is noted on another thread, is
  taken in by the next hook, before it matches or plans.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import Enum

from kvass.client.scheduler import SchedulerClient
from kvass.engine.boundary import log
from kvass.engine.protocols import BlockPool
from kvass.engine.request_state import RequestState


class OwnCache(Enum):
    """The state of the engine's own prefix cache."""

    FRESH = "it is empty, and nothing was matched or stored in this generation"
    CLEAN = "all its blocks were computed with the present weights"
    STALE = "it may have blocks that were computed with replaced weights"


class WeightChanges:
    """The changes of one engine's weights. Used from its scheduler thread; ``weights_may_change``
    may be called from any thread. ``abandon`` gives up all offers that are not granted.

    ``fixed``: a reset of the cache is never a change. ``watched``: ``weights_may_change`` is called
    before every change, as long as no foreign code can reach the weights."""

    def __init__(
        self,
        client: SchedulerClient,
        requests: Mapping[str, RequestState],
        pool: BlockPool,
        abandon: Callable[[], None],
        *,
        fixed: bool,
        watched: bool,
    ) -> None:
        self.state = OwnCache.CLEAN
        self._client = client
        self._requests = requests
        self._pool = pool
        self._abandon = abandon
        self._fixed, self._watched = fixed, watched
        self._resets_count = not (fixed or watched)
        self._noted = ""
        """The noted change that is not taken in yet; empty: none."""
        self._cause = ""
        """The change that made the cache stale; empty once it was logged."""
        self._thread = threading.get_ident()

    def weights_may_change(self, what: str, foreign: bool) -> None:
        """Note that ``what`` is about to run and may replace weights. ``foreign``: it runs code
        that is not the engine's and that may replace weights later without another call of this."""
        self._noted = what  # set first: if the rest fails, the next hook takes it in
        self._resets_count = self._resets_count or (foreign and not self._fixed)
        if threading.get_ident() == self._thread:
            self._take_in(self._pool.was_reset())

    def notice(self) -> None:
        """Take in changes. Every hook calls this before it matches, stores or tracks anything."""
        if self.state is OwnCache.CLEAN and not self._noted and not self._resets_count:
            return
        reset = self._pool.was_reset()
        # A cache that is switched off is never reset, but it is empty as soon as nothing runs.
        over = not reset and self.state is OwnCache.STALE and not self._has_old_blocks()
        self._take_in(reset or over)
        if self.state is OwnCache.FRESH:
            self.state = OwnCache.CLEAN

    def clear(self, timeout_s: float, pausing: bool = False) -> None:
        """Clear the namespace for all engines that share it. If a reset counts as a change, begin a
        new generation, too. ``pausing``: as ``Planner.clear``. If all changes are noted anyway, a
        pause clears nothing."""
        if pausing and self._watched and not self._resets_count:
            return  # the next hook sees the reset
        self._pool.was_reset()  # so the next hook does not see this reset again
        try:
            self._discard_computed()
        finally:  # also if this raises: rows of the old weights must not stay in the daemon
            try:
                self._client.clear(timeout_s)
            finally:
                self._take_in(reset=True)

    def warn_if_stale(self) -> None:
        """Log that the engine computes with a stale cache, once each time it became stale."""
        if self._cause:
            log.warning(
                "%s may have replaced weights, and the engine's own prefix cache may have blocks "
                "of before: it runs uncached until that is emptied. Call reset_prefix_cache() "
                "after each update, until it returns True",
                self._cause,
            )
        self._cause = ""

    def _take_in(self, reset: bool) -> None:
        """Begin a new generation if a change was noted, or if ``reset`` counts as one. ``reset``:
        the engine's own cache was reset, or has no blocks of old weights any more."""
        what, self._noted = self._noted, ""
        before = self.state
        may_be_stale = bool(what) or (reset and before is OwnCache.STALE)
        if not may_be_stale and not (reset and self._resets_count):
            return
        stale = True  # assumed if ``_has_old_blocks`` raises
        try:
            stale = may_be_stale and self._has_old_blocks()
            self._discard_computed(stale)
        finally:  # also if this raises: the change is not noticed again
            self.state = OwnCache.STALE if stale else OwnCache.FRESH
            if before is not OwnCache.STALE:
                self._cause = what
            if before is OwnCache.CLEAN:  # else nothing was stored in this generation
                self._client.new_generation()

    def _has_old_blocks(self) -> bool:
        """Whether the engine's own cache has blocks, or a live request has computed tokens."""
        return not self._pool.empty or any(
            state.request.computed_tokens for state in self._requests.values()
        )

    def _discard_computed(self, stale: bool = False) -> None:
        """Never store what live requests have computed so far. What they compute later is offered,
        unless they may get stale blocks."""
        for state in self._requests.values():
            state.weights_changed(stale)
        self._abandon()
        for name in self._requests:
            self._client.give_back(name)
