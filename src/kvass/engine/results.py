"""What came of a request's lookup: in the engine's own figures, and for the daemon.

Law of this file: a lookup counts once for each time that its request gets blocks, with the last
answer before that. A hit counts when its load has ended well, on all ranks.
"""

from __future__ import annotations

from typing import Final

from kvass.client.lookups import CLIENTS
from kvass.client.scheduler import SchedulerClient
from kvass.engine.observers import Observer
from kvass.engine.request_state import LOAD_FAILED, Answer, RequestState
from kvass.engine.traffic import EngineTraffic
from kvass.messages import LookupResult

LOADING: Final = 4096
"""The most loads whose end is awaited. An engine with more does not report how they end."""


class LookupResults(Observer):
    """The results of one engine's lookups. ``counts``: whether they count in the engine's own
    figures, too; in shadow mode they do not."""

    def __init__(self, client: SchedulerClient, traffic: EngineTraffic, *, counts: bool) -> None:
        self._client = client
        self._traffic = traffic
        self._counts = counts
        self._loading: dict[str, tuple[LookupResult, bytes]] = {}
        """By request, what to count if its load ends well, and the boot of the daemon."""

    def allocated(self, state: RequestState, answer: Answer, tokens: int) -> None:
        """Count the lookup, unless the end of its load is awaited."""
        why = "no_answer" if answer.why in CLIENTS else answer.why
        result = LookupResult(
            state.short_name, answer.asked, tenant=state.request.context.tenant, why=why
        )
        (result.answer_tokens, result.repeated_tokens), state.turn = state.turn, (0, 0)
        if tokens:
            result.hit_tokens, result.tiers = tokens, answer.tiers
            self._loading[state.request.name] = result, answer.boot
            if len(self._loading) > LOADING:
                del self._loading[next(iter(self._loading))]
            return
        if answer.end > answer.local:
            result.why = "not_loaded"
        self._count(result, answer.boot)

    def loaded(self, name: str, state: RequestState | None, ok: bool) -> None:
        """Count the lookup whose load ended."""
        if name in self._loading:
            result, boot = self._loading.pop(name)
            if not ok:
                result.hit_tokens, result.failed, result.why = 0, True, LOAD_FAILED
            self._count(result, boot)

    def unstored(self, state: RequestState) -> None:
        """Count a request of which something was not stored."""
        self._traffic.count("unstored_requests")

    def _count(self, result: LookupResult, boot: bytes) -> None:
        if self._counts:
            self._traffic.looked_up(result.lookup_tokens, result.hit_tokens)
        if boot:
            self._client.report(result, boot)
