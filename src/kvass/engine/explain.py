"""What the scheduler's half knows of a lookup that the daemon cannot know, for ``kvass explain``.

Laws of this file:

- Nothing of a prompt leaves the process. Its tokens are kept as a hash with a random key.
- Memory is bounded. Notes wait while there is no daemon, and the oldest are dropped.
- A step sends one message at most, and waits for nothing.
- A client gets only those reasons that do not say whether somebody else computed its prompt.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

from kvass.client.scheduler import SchedulerClient
from kvass.engine.boundary import log
from kvass.engine.protocols import Request
from kvass.engine.request_state import LoadState, RequestState
from kvass.engine.setup import EngineSetup
from kvass.messages import MOST_NOTES, LookupNote

PROMPTS: Final = 4096
"""How many prompts' beginnings are remembered, and how many chunks that were not stored."""
SPACES: Final = 8
"""How many salts and adapters are remembered of one beginning."""
UNASKED: Final = ("no_daemon", "not_sent", "clearing")
"""The reasons of ``SchedulerClient.ended_by`` of lookups that no daemon got."""
CLIENTS: Final = (*UNASKED, "no_answer", "refused")
"""The reasons of ``SchedulerClient.ended_by`` that the daemon does not know."""
TOLD: Final = frozenset(
    {
        *("", "own_hit"),  # a hit shows in the latency, too
        *("too_short", "too_long", "no_hashes", "not_read"),
        *("no_daemon", "no_answer", "refused", "not_sent", "clearing", "ranks_missing"),
        *("weights_unnamed", "weights_changed", "loads_off"),
    }
)
"""The reasons that a client is told: of hits, of its own request, of the whole service."""
NOT_FOUND: Final = "not_found"
"""What a client is told instead of any other reason."""
Space = tuple[bytes, str]
"""The hash of a salt, and the text of an adapter."""


def told(why: str) -> str:
    """What the client of a request is told of the reason ``why``."""
    return why if why in TOLD else NOT_FOUND


class Explainer:
    """The notes of one engine. Used from its scheduler's thread only."""

    def __init__(self, setup: EngineSetup, client: SchedulerClient) -> None:
        self._setup = setup
        self._client = client
        self._key = os.urandom(16)
        self._spaces: OrderedDict[bytes, list[Space]] = OrderedDict()
        """By the hash of a prompt's beginning, under which salts and adapters it was looked up."""
        self._unstored: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of chunks that were computed, and whose blocks were not held for a store."""
        self._notes: OrderedDict[str, LookupNote] = OrderedDict()
        """By request; the oldest is first."""

    # ------------------------------------------------------------ before a lookup

    def if_absent(self, state: RequestState, chunks: int) -> tuple[str, int]:
        """``if_absent`` and ``absent_chunk`` of the lookups of a request's ``chunks`` chunks."""
        if state.hint is None:
            state.hint = self._other_space(state) or self._not_held(state, chunks) or ("", 0)
        return state.hint

    def _other_space(self, state: RequestState) -> tuple[str, int] | None:
        """The reason if the request's beginning was looked up only under another salt or adapter.
        Remembers that it is looked up under its own."""
        request, count = state.request, self._setup.chunk_tokens
        if request.known_tokens < count and self._setup.chunk_blocks:
            count = request.hashed_blocks * count // self._setup.chunk_blocks
        tokens = request.first_tokens(count)
        if not tokens:
            return None
        adapter, salt = request.adapter, self._hash(request.salt.encode(errors="surrogatepass"))
        own = salt, "" if adapter is None else adapter.text
        spaces = self._spaces.setdefault(beginning := self._hash(tokens), [])
        self._spaces.move_to_end(beginning)
        if len(self._spaces) > PROMPTS:
            self._spaces.popitem(last=False)
        if own in spaces:
            return None
        others = [text for _, text in spaces]
        spaces.append(own)
        del spaces[:-SPACES]
        if not others:
            return None
        return "other_salt" if own[1] in others else "other_adapter", 0

    def _not_held(self, state: RequestState, chunks: int) -> tuple[str, int] | None:
        """The reason for the first chunk that was computed and whose blocks were not held."""
        if not self._unstored:
            return None
        hashes = enumerate(state.request.chunk_hashes(0, chunks))
        found = next((chunk for chunk, each in hashes if each in self._unstored), None)
        return None if found is None else ("engine_busy", found)

    def unstored(self, state: RequestState) -> None:
        """A request ended, and its chunks from the next one that it would offer are not stored."""
        chunk = state.offered.chunks
        if chunk < state.request.hashed_chunks:
            (digest,) = state.request.chunk_hashes(chunk, chunk + 1)
            self._unstored[digest] = None
            if len(self._unstored) > PROMPTS:
                self._unstored.popitem(last=False)

    def _hash(self, text: bytes) -> bytes:
        return blake2b(text, digest_size=16, key=self._key).digest()

    # ------------------------------------------------------------ after a lookup

    def not_looked_up(self, state: RequestState | None, local: int) -> None:
        """A request is not looked up, because it cannot load or this engine loads nothing."""
        if state is None:
            return
        if state.state is LoadState.STALE:
            self.note(state, local, "weights_changed")
        elif not self._setup.loads:
            self.note(state, local, "loads_off")

    def not_asked(self, state: RequestState, local: int, end: int) -> None:
        """The daemon is not asked: there is none, the adapter is not known, or there is nothing to
        ask for after the ``local`` tokens of the engine's own cache. ``end``: the largest number of
        tokens that could match."""
        if self._has_no_hashes(state.request):
            self.note(state, local, "no_hashes")
        elif end <= local:
            self.note(state, local, "own_hit" if local else "too_short")
        elif not self._client.connected:
            self.note(state, local, "no_daemon" if self._setup.named else "weights_unnamed")
        else:
            self.note(state, local, "adapter_unknown")

    def _has_no_hashes(self, request: Request) -> bool:
        """Whether the engine's hashes do not name the content of ``request``."""
        blocks = self._setup.chunk_blocks
        hashed = request.hashed_blocks if blocks else request.hashed_chunks
        return not hashed and request.known_tokens >= self._setup.chunk_tokens // max(1, blocks)

    def answered(self, state: RequestState, local: int, hit: int, why: str) -> str:
        """A lookup ended. ``hit``: tokens that can be loaded after the ``local`` ones. ``why``:
        ``SchedulerClient.ended_by``. Returns why it was not more; empty if nothing more could
        match."""
        state.missed_because = why
        if why in CLIENTS:
            self.note(state, local, why)
        log.debug("%s: %d tokens match, ended by %s", state.short_name, hit, why or "the prompt")
        return why

    def load_failed(self, state: RequestState) -> None:
        """A load of the request failed, so the engine computes what had matched."""
        answer = state.answer
        if answer is not None and answer.end > answer.local:
            self.note(state, answer.local, "load_failed_here")

    def note(self, state: RequestState, local: int, why: str) -> None:
        """Note a reason. The engine may look up a waiting request in each step, so the same reason
        is noted once."""
        if state.noted == why:
            return
        state.noted = state.missed_because = why
        name, tokens = state.short_name, state.request.known_tokens
        self._notes.pop(name, None)
        self._notes[name] = LookupNote(name, why, time.monotonic(), tokens, local)
        if len(self._notes) > MOST_NOTES:
            self._notes.popitem(last=False)

    def send(self) -> None:
        """Send the notes, unless there is no daemon now."""
        if self._notes and self._client.note_lookups([*self._notes.values()]):
            self._notes.clear()
