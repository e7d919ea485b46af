"""What the scheduler's half knows of a lookup that the daemon cannot know, for ``kvass explain``.

Laws of this file:

- Nothing of a prompt leaves the process. Its tokens are kept as a hash with a random key.
- Memory is bounded. Notes wait while there is no daemon, and the oldest are dropped.
- A step sends one message at most, and waits for nothing. What is noted while a step is planned
  waits for the next one, so that it delays no first token.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import Final

from kvass.client.lookups import CLIENTS, OTHER_NODE
from kvass.client.scheduler import SchedulerClient
from kvass.engine.boundary import log
from kvass.engine.observers import Observer
from kvass.engine.request_state import LOAD_FAILED, Answer, RequestState
from kvass.engine.setup import EngineSetup
from kvass.messages import MOST_NOTES, LookupNote

PROMPTS: Final = 4096
"""How many prompts' beginnings are remembered, and how many chunks that were not stored."""
SPACES: Final = 8
"""How many salts and adapters are remembered of one beginning."""
Space = tuple[bytes, str]
"""The hash of a salt, and the text of an adapter."""


class Explainer(Observer):
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
        self._due = False
        """Whether a step was planned since the first of them."""

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

    def unasked(self, state: RequestState, local: int, why: str) -> None:
        self.note(state, local, why)

    def answered(self, state: RequestState, answer: Answer, first: bool) -> None:
        """Note why, if the daemon does not know it."""
        if answer.why in (*CLIENTS, OTHER_NODE):
            self.note(state, answer.local, answer.why, answer.detail)
        hit, why = answer.end - answer.local, answer.why or "the prompt"
        log.debug("%s: %d tokens match, ended by %s", state.short_name, hit, why)

    def loaded(self, name: str, state: RequestState | None, ok: bool) -> None:
        """Note that the engine computes what had matched, if the load failed."""
        answer = None if ok or state is None else state.answer
        if state is not None and answer is not None and answer.end > answer.local:
            self.note(state, answer.local, LOAD_FAILED)

    def note(self, state: RequestState, local: int, why: str, detail: str = "") -> None:
        """Note a reason. The engine may look up a waiting request in each step, so the same reason
        is noted once."""
        if state.noted == why:
            return
        state.noted = why
        name, tokens = state.short_name, state.request.known_tokens
        self._notes.pop(name, None)
        self._notes[name] = LookupNote(name, why, time.monotonic(), tokens, local, detail)
        if len(self._notes) > MOST_NOTES:
            self._notes.popitem(last=False)

    def stepped(self) -> None:
        """Send the notes, if a step was planned since the first of them."""
        if self._due:
            self.send()
        self._due = bool(self._notes)

    def send(self) -> None:
        """Send the notes, unless there is no daemon now."""
        if self._notes and self._client.note_lookups([*self._notes.values()]):
            self._notes.clear()
