"""What the daemon is asked for a request, or why it is not asked."""

from __future__ import annotations

from functools import partial
from typing import Final, NamedTuple

import msgspec

from kvass.client.lookups import Found
from kvass.client.scheduler import SchedulerClient
from kvass.engine.adapters import Adapters, NamedAdapter, NoSalt
from kvass.engine.explain import Explainer
from kvass.engine.hit_limits import HitLimits
from kvass.engine.request_state import LoadState, RequestState
from kvass.engine.setup import EngineSetup
from kvass.engine.step_times import StepTimes
from kvass.messages import RequestContext

LOAD_LIMIT: Final = "load_limit"
"""The reason that is told of a request that allows no more to be loaded (docs/explain.md)."""


class Question(NamedTuple):
    """The lookup of the first ``chunks`` chunks of a request. The engine's own cache has ``local``
    tokens, and a hit has ``end`` tokens at most. ``named``: the LoRA adapter of the request.
    ``why``: why no more is asked; empty if nothing more could match."""

    local: int
    end: int
    chunks: int
    named: NamedAdapter | None
    why: str = ""


class Asking:
    """The lookups of one engine. Used from its scheduler's thread only."""

    def __init__(
        self,
        setup: EngineSetup,
        client: SchedulerClient,
        adapters: Adapters,
        times: StepTimes,
        explain: Explainer,
    ) -> None:
        self._setup = setup
        self._client = client
        self._adapters = adapters
        self._times = times
        self._explain = explain
        self._limits = HitLimits(setup)

    def question(self, state: RequestState, local: int) -> Question | str | None:
        """What to ask; or why nothing is asked, empty if the request has begun its load. None: that
        is known in a later step."""
        if state.state is LoadState.STALE:
            return "weights_changed"
        if not self._setup.loads:
            return "loads_off"
        if not state.may_load:
            return ""
        if not state.request.reads_cache:
            return "not_read"
        request, chunks = state.request, self._limits.chunks(state.request)
        last = self._limits.end(request, chunks)
        chunks, end = self._limits.allowed(request, local, chunks, last)
        named: NamedAdapter | NoSalt | None = NoSalt.UNKNOWN
        if self._client.connected and end > local:
            adapter = request.adapter
            named = None if adapter is None else self._adapters.to_load(adapter)
        if named is NoSalt.PENDING:
            return None
        if isinstance(named, NoSalt):
            self._client.give_back(request.name)
            return self._nothing_to_ask(state, local, last, end)
        return Question(local, end, chunks, named, LOAD_LIMIT if end < last else "")

    def _nothing_to_ask(self, state: RequestState, local: int, last: int, end: int) -> str:
        """Why there is no daemon to ask or nothing to ask it for. A hit could have ``last`` tokens
        at most, and ``end`` of them are allowed."""
        if self._limits.without_hashes(state.request):
            return "no_hashes"
        if last <= local:
            return "own_hit" if local else "too_short"
        if end <= local:
            return LOAD_LIMIT
        if not self._client.connected:
            return "no_daemon" if self._setup.named else "weights_unnamed"
        return "adapter_unknown"

    def ask(self, state: RequestState, question: Question) -> Found:
        """Ask the daemon, or for its answer if it was asked."""
        request, named, local = state.request, question.named, question.local
        if question.end < state.asked_end:  # the engine's own hit got shorter: a match is too long
            self._client.give_back(request.name)
        state.asked_end = question.end
        salt, first = b"" if named is None else named.salt, local // self._setup.chunk_tokens
        hashes, width = state.digests(question.chunks, salt)
        width = width or len(request.block_hashes(0, 1)[0])
        blocks = (
            partial(self._limits.blocks, state, salt, local, question.end)
            if self._limits.inside_chunks
            else None
        )
        context = self._context(state, question)
        return self._client.look_up(request.name, hashes, width, first, context, blocks)

    def _context(self, state: RequestState, question: Question) -> RequestContext:
        if_absent, absent_chunk = self._explain.if_absent(state, question.chunks)
        return msgspec.structs.replace(
            state.request.context,
            prefill_tokens_s=self._times.tokens_s,
            prompt_tokens=state.request.known_tokens,
            local_tokens=question.local,
            if_absent=if_absent,
            absent_chunk=absent_chunk,
            reported=True,
        )
