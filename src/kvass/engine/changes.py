"""Weights that are replaced while an engine runs: what of before may still be used.

Laws of this file:

- A change is noted before it happens. What was computed before it is never matched or stored after
  it: the engine begins a new generation, so nothing that was reserved before is published either.
- The engine's own prefix cache may keep blocks of before. While it does it is STALE: nothing
  matches and nothing is stored, because these blocks may be the prefix of anything. That ends when
  the cache is empty and no live request has computed anything.
- A reset of that cache alone is a change only where weights can be replaced without a word. There
  an attempt is enough. So it is with the clear that comes with a pause.
- What cannot be taken in when it happens is taken in by the next hook, before it matches or plans.
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
    """The engine's own prefix cache."""

    FRESH = "empty, and nothing was matched or stored in this generation"
    CLEAN = "all its blocks are of the present weights"
    STALE = "it may have blocks of weights that are gone"


class Changes:
    """Of one engine. Used from its scheduler's thread, ``noted`` from any. ``fixed``: a reset is no
    change, whoever runs code beside the weights. ``watched``: all changes are noted, unless one of
    them brought foreign code to the weights."""

    def __init__(
        self,
        client: SchedulerClient,
        requests: Mapping[str, RequestState],
        *,
        fixed: bool,
        watched: bool,
    ) -> None:
        self.state = OwnCache.CLEAN
        self._client = client
        self._requests = requests
        self._fixed, self._watched = fixed, watched
        self._resets_count = not (fixed or watched)
        self._noted = ""
        """The change that is to be taken in."""
        self._cause = ""
        """The change that made the cache stale, until it was logged."""
        self._thread = 0

    def bind(self, pool: BlockPool, abandon: Callable[[], None]) -> None:
        """``abandon``: gives up what was offered and not granted."""
        self._pool = pool
        self._abandon = abandon
        self._thread = threading.get_ident()

    def noted(self, what: str, foreign: bool) -> None:
        """``what`` is about to run and may replace weights. ``foreign``: it is code that may go on
        doing so without a word."""
        self._noted = what  # first: if the rest fails, the next hook does it
        self._resets_count = self._resets_count or (foreign and not self._fixed)
        if threading.get_ident() == self._thread:
            self._take_in(self._pool.was_reset())

    def notice(self) -> None:
        """Before anything is matched, stored or begun: take in what happened."""
        if self.state is OwnCache.CLEAN and not self._noted and not self._resets_count:
            return
        reset = self._pool.was_reset()
        # A cache that is switched off is never reset, but it is empty as soon as nothing runs.
        over = not reset and self.state is OwnCache.STALE and not self._has_old_blocks()
        self._take_in(reset or over)
        if self.state is OwnCache.FRESH:
            self.state = OwnCache.CLEAN

    def clear(self, timeout_s: float, pausing: bool = False) -> None:
        """Forget the namespace, for all engines that share it; then leave it, if a reset counts.
        ``pausing``: as ``Planner.clear``. Who notes all changes need not take a pause for one."""
        if pausing and self._watched and not self._resets_count:
            return  # the next hook sees the reset
        self._pool.was_reset()  # this reset need not be noticed again
        try:
            self._discard_computed()
        finally:  # a defect here must not keep what old weights computed
            try:
                self._client.clear(timeout_s)
            finally:
                self._take_in(reset=True)

    def tell(self) -> None:
        """Log, once, that the engine computes with a stale cache."""
        if self._cause:
            log.warning(
                "%s may have replaced weights, and the engine's own prefix cache may have blocks "
                "of before: it runs uncached until that is emptied. Call reset_prefix_cache() "
                "after each update, until it returns True",
                self._cause,
            )
        self._cause = ""

    def _take_in(self, reset: bool) -> None:
        """Begin a generation if there was a change."""
        what, self._noted = self._noted, ""
        before = self.state
        looks = bool(what) or (reset and before is OwnCache.STALE)
        if not looks and not (reset and self._resets_count):
            return
        stale = True  # if looking fails
        try:
            stale = looks and self._has_old_blocks()
            self._discard_computed(stale)
        finally:  # a change is not seen again
            self.state = OwnCache.STALE if stale else OwnCache.FRESH
            if before is not OwnCache.STALE:
                self._cause = what
            if before is OwnCache.CLEAN:  # else nothing was stored since the last one
                self._client.new_generation()

    def _has_old_blocks(self) -> bool:
        return not self._pool.empty or any(
            state.request.computed_tokens for state in self._requests.values()
        )

    def _discard_computed(self, stale: bool = False) -> None:
        """What live requests computed so far is never stored. What they have yet to compute is
        offered, unless they may be given stale blocks for it."""
        for state in self._requests.values():
            state.weights_changed(stale)
        self._abandon()
        for name in self._requests:
            self._client.settle(name)
