"""What came of a request's lookup: in the engine's own figures, and for the daemon.

Law of this file: a lookup counts once for each time that its request gets blocks, with the last
answer before that. A hit counts when its load has ended well, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvass.client.scheduler import SchedulerClient
from kvass.engine.explain import CLIENTS
from kvass.engine.request_state import RequestState
from kvass.engine.traffic import EngineTraffic
from kvass.messages import LookupResult

LOADING: Final = 4096
"""The most loads whose end is awaited. An engine with more does not report how they end."""


class LookupResults:
    """The results of one engine's lookups. Used from its scheduler's thread only."""

    def __init__(self, client: SchedulerClient, traffic: EngineTraffic) -> None:
        self._client = client
        self._traffic = traffic
        self._loading: dict[str, tuple[LookupResult, bytes]] = {}
        """By request, what to count if its load ends well, and the boot of the daemon."""
        self.when_counted: Callable[[int, int], None] | None = None
        """Called instead of counting in the engine's own figures, with the tokens that were looked
        up and those that matched."""

    def got_blocks(self, state: RequestState, loads: int) -> None:
        """A request got blocks. The engine loads ``loads`` tokens into them."""
        if (answer := state.take_answer()) is None:
            return
        name, matched = state.request.name, answer.end - answer.local
        why = "no_answer" if answer.why in CLIENTS else answer.why
        result = LookupResult(
            state.short_name, answer.asked, tenant=state.request.context.tenant, why=why
        )
        if self.when_counted is not None:
            self.when_counted(answer.asked, matched)
        if loads:
            result.hit_tokens, result.tiers = loads, answer.tiers
            self._loading[name] = result, answer.boot
            if len(self._loading) > LOADING:
                del self._loading[next(iter(self._loading))]
            return
        if matched:
            result.why = "not_loaded"
        self._count(result, answer.boot)

    def loads_ended(self, failed: Iterable[str], loaded: Iterable[str]) -> None:
        """These loads failed, and these ended. One that failed on a rank may be in both."""
        for name in failed:
            if name in self._loading:
                result, boot = self._loading.pop(name)
                result.hit_tokens, result.failed, result.why = 0, True, "load_failed_here"
                self._count(result, boot)
        for name in loaded:
            if name in self._loading:
                self._count(*self._loading.pop(name))

    def _count(self, result: LookupResult, boot: bytes) -> None:
        if self.when_counted is None:
            self._traffic.looked_up(result.lookup_tokens, result.hit_tokens)
        if boot:
            self._client.report(result, boot)
