"""Lookups of requests that wait in the engine's queue: what tiers have of them is promoted before
the engine asks.

Laws of this file:

- Nothing is sent for a request before a step has passed it over, nor after the engine has asked for
  it. So an engine without a queue sends nothing.
- It is sent for the first ``EngineSetup.early_lookups`` requests of the queue, and for ``AT_ONCE``
  at a time. How many bytes they get is the daemon's decision (``core/tiers/plan.py``).
- Nothing is held for them: a hit is leased when the engine asks.

Preempted requests are not promoted early: they come first, and were stored a moment ago.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from heapq import nsmallest
from itertools import islice
from typing import Final

from kvass.client.scheduler import Prefetching, SchedulerClient
from kvass.engine.asking import Asking
from kvass.engine.hit_limits import HitLimits
from kvass.engine.observers import Observer
from kvass.engine.protocols import BlockPool, Request
from kvass.engine.request_state import RequestState
from kvass.engine.setup import EngineSetup

AT_ONCE: Final = 4
"""How many promotions are open at a time. Their ends are noticed once a step."""


class EarlyLookups(Observer):
    """Used from the engine's scheduler thread only."""

    def __init__(
        self, setup: EngineSetup, client: SchedulerClient, asking: Asking, pool: BlockPool
    ) -> None:
        self._setup, self._client, self._asking, self._pool = setup, client, asking, pool
        self._limits = HitLimits(setup)
        self._most = setup.early_lookups if setup.loads and not setup.shadow else 0
        self._whole = [g for g, group in enumerate(setup.groups) if group.rules.whole]
        self._waiting: dict[str, RequestState] = {}
        """The requests for which the engine has not asked, in the order in which they came."""
        self._begun: dict[str, Prefetching | None] = {}
        """Those of them that had their turn. None: nothing is open for it."""
        self._moved = False
        """Whether another request may have its turn now."""

    def track(self, state: RequestState) -> None:
        """A request begins."""
        if self._most:
            self._waiting[state.request.name] = state
            self._moved = True

    def end(self) -> None:
        """Begin nothing any more."""
        self._most = 0

    def asked(self, state: RequestState) -> None:
        self.got_blocks(state.request.name)

    def unasked(self, state: RequestState, local: int, why: str) -> None:
        self.got_blocks(state.request.name)

    def got_blocks(self, name: str) -> None:
        """The engine has given a request blocks, perhaps without asking."""
        if self._waiting.pop(name, None) is not None:
            self._moved = True
            if (begun := self._begun.pop(name, None)) is not None:
                self._client.leave_prefetch(begun)

    def ended(self, state: RequestState) -> None:
        if (begun := self._begun.pop(state.request.name, None)) is not None:
            self._client.end_prefetch(begun)
        self.got_blocks(state.request.name)

    def stepped(self) -> None:
        # The requests that still wait were passed over by the step.
        if not self._waiting or not self._client.promotes_ahead:
            return
        begun = {name: one for name, one in self._begun.items() if one is not None}
        for name, one in begun.items():
            if self._client.prefetched(one):
                self._begun[name], self._moved = None, True
        if self._moved:
            self._moved = False
            self._begin_some()

    def _begin_some(self) -> None:
        free = AT_ONCE - sum(one is not None for one in self._begun.values())
        for state in self._first():
            if free <= 0:
                return
            if (name := state.request.name) not in self._begun:
                self._begin(state)
                free -= self._begun.get(name) is not None

    def _first(self) -> Iterable[RequestState]:
        if self._setup.by_priority:
            every = self._waiting.values()
            return nsmallest(self._most, every, key=lambda state: state.request.precedence)
        return [*islice(self._waiting.values(), self._most)]

    def _begin(self, state: RequestState) -> None:
        """Have promoted what a lookup of the request would have promoted."""
        local = self._own_tokens(state.request)
        question = self._asking.question(state, local)
        if question is None:
            self._moved = True  # its adapter is known in a later step
            return
        name, first = state.request.name, local // self._setup.chunk_tokens
        self._begun[name] = None
        if not isinstance(question, str) and question.chunks > first:
            salt = b"" if question.named is None else question.named.salt
            digests, width = state.digests(question.chunks, salt)
            context = state.request.context
            self._begun[name] = self._client.prefetch(name, digests, width, first, context)

    def _own_tokens(self, request: Request) -> int:
        """How many tokens the engine's own cache has: to the chunk, and for a request that waits
        perhaps not for long."""
        chunks = self._limits.chunks(request) if self._whole else 0
        hashes = request.chunk_hashes(0, chunks)

        def absent(chunk: int) -> bool:
            return not self._pool.has(hashes[chunk], self._whole)

        return self._limits.tokens(bisect_left(range(chunks), True, key=absent))
