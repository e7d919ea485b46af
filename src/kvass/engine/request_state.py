"""What an engine's scheduler half knows of one request: how far its lookup and load came, and what
of it was offered for storing.

Laws of this file:

- A state changes only along ``LOAD_TRANSITIONS`` and ``STORE_TRANSITIONS``; any other change is a
  defect and asserts.
- A request begins one load in its life.
- A chunk or a tail counts as offered once the reserve that names it was sent, and not before
  (``Offered.sent``). What a step has no room for was not offered: a later step offers it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from kvass.engine.adapters import Named
from kvass.engine.protocols import Request


class LoadState(Enum):
    """Where a request stands between its lookup and its load."""

    UNANSWERED = "no lookup was answered since it began, or since it was last given blocks"
    ANSWERED = "its lookup was answered; the engine has not given it blocks for that yet"
    COMPUTING = "a step computed tokens of it; it has loaded nothing"
    LOADING = "its one load was begun, and no step has computed tokens of it since"
    LOADED = "its one load is over, in whatever way, and a step has computed tokens of it"
    STALE = "it may be given blocks of weights that are gone (changes.py): it loads nothing"


LOAD_TRANSITIONS: Final = frozenset(
    {
        (LoadState.UNANSWERED, LoadState.ANSWERED),
        (LoadState.UNANSWERED, LoadState.COMPUTING),
        (LoadState.UNANSWERED, LoadState.LOADING),  # a load that fails: nothing was matched
        (LoadState.UNANSWERED, LoadState.STALE),
        (LoadState.ANSWERED, LoadState.UNANSWERED),
        (LoadState.ANSWERED, LoadState.LOADING),
        (LoadState.ANSWERED, LoadState.STALE),
        (LoadState.COMPUTING, LoadState.ANSWERED),  # it was preempted, and asks again
        (LoadState.COMPUTING, LoadState.LOADED),  # a load that the planner did not begin has failed
        (LoadState.COMPUTING, LoadState.STALE),
        (LoadState.LOADING, LoadState.LOADED),
        (LoadState.LOADING, LoadState.STALE),
        (LoadState.LOADED, LoadState.STALE),
    }
)


class StoreState(Enum):
    """Whether a request's chunks are offered for storing."""

    PREFILL = "chunks are offered; part of its prompt is not computed yet"
    PREFILLED = "chunks are offered; all of its prompt was computed, and its tail was due"
    NEVER = "nothing of it is stored any more"


STORE_TRANSITIONS: Final = frozenset(
    {
        (StoreState.PREFILL, StoreState.PREFILLED),
        (StoreState.PREFILL, StoreState.NEVER),
        (StoreState.PREFILLED, StoreState.NEVER),
        (StoreState.NEVER, StoreState.PREFILL),  # weights changed before any of it was computed
    }
)


@dataclass(slots=True)
class Offered:
    """What of a request was offered for storing. Block counts are of its prompt and output, whole
    chunks included."""

    state: StoreState = StoreState.PREFILL
    chunks: int = 0
    """Chunks before this one were offered, or were loaded."""
    tail: int = 0
    """Blocks up to the end of the last tail that was offered; 0: none was."""
    due: int = 0
    """Blocks up to the end of the tail that its prompt left; 0: none, or it is not computed."""

    @property
    def never(self) -> bool:
        return self.state is StoreState.NEVER

    @property
    def prefilled(self) -> bool:
        return self.state is StoreState.PREFILLED

    def prompt_computed(self, tail: int) -> None:
        """All of the prompt is computed; ``tail``: as ``due``."""
        self._move(StoreState.PREFILLED)
        self.due = tail

    def stop(self) -> None:
        """Offer nothing of it any more."""
        self._move(StoreState.NEVER)

    def restart(self) -> None:
        """Nothing of it was computed with the present weights: offer all of it."""
        if self.never:
            self._move(StoreState.PREFILL)
            self.due = 0
        self.again()

    def sent(self, chunks: int, tail: int) -> None:
        """A reserve was sent that decides the chunks before ``chunks``, and the tail that ends at
        block ``tail`` (0: none)."""
        self.chunks = max(self.chunks, chunks)
        self.tail = max(self.tail, tail)

    def granted(self, since: int, chunks: int) -> None:
        """An answer decided the chunks ``[since, chunks)``. If earlier ones are to be offered
        again, so are these."""
        if since <= self.chunks:
            self.chunks = max(self.chunks, chunks)

    def loaded(self, chunks: int) -> None:
        """The first ``chunks`` chunks are in the daemon already."""
        self.chunks = max(self.chunks, chunks)

    def again(self, since: int = 0) -> None:
        """Offer the chunks from ``since`` on once more, and the tail."""
        self.tail, self.chunks = 0, min(self.chunks, since)

    def _move(self, to: StoreState) -> None:
        if to is not self.state:
            assert (self.state, to) in STORE_TRANSITIONS, (self.state, to)
            self.state = to


@dataclass(frozen=True, slots=True)
class Answer:
    """A lookup was answered: tokens ``[local, end)`` can be loaded, with the adapter ``named``."""

    local: int
    end: int
    named: Named | None


@dataclass(slots=True)
class RequestState:
    """One request of the engine."""

    request: Request
    state: LoadState = LoadState.UNANSWERED
    answer: Answer | None = None
    """The last answer to its lookup."""
    offered: Offered = field(default_factory=Offered)
    first_step: int = 0
    """The first step that computed tokens of it; 0: none has."""

    @property
    def may_load(self) -> bool:
        return self.state not in (LoadState.LOADING, LoadState.LOADED, LoadState.STALE)

    @property
    def computed(self) -> bool:
        """Whether a step computed its blocks. Others may still be loading."""
        return self.state in (LoadState.COMPUTING, LoadState.LOADED)

    def answered(self, answer: Answer) -> bool:
        """Its lookup was answered. Whether that is the first answer since it was given blocks: the
        engine may ask again before it has blocks to give."""
        self.answer = answer
        first = self.state is not LoadState.ANSWERED
        self._move(LoadState.ANSWERED)
        return first

    def given_blocks(self) -> None:
        """The engine gave it blocks and asks for no load. While it loads the engine may say this
        again."""
        if self.state is LoadState.ANSWERED:
            self._move(LoadState.UNANSWERED)

    def begin_load(self) -> None:
        """The engine gave it blocks to load into."""
        if self.state is not LoadState.STALE:
            assert self.may_load, f"{self.request.name} has begun its load"
            self._move(LoadState.LOADING)

    def load_failed(self) -> None:
        """Its load failed, which may be one that the planner did not begin: it begins none."""
        if self.may_load:
            self._move(LoadState.LOADED if self.state is LoadState.COMPUTING else LoadState.LOADING)

    def step(self, number: int) -> None:
        """Step ``number`` computes tokens of it."""
        self.first_step = self.first_step or number
        if self.state is LoadState.LOADING:
            self._move(LoadState.LOADED)
        elif self.may_load:
            self._move(LoadState.COMPUTING)

    def weights_changed(self, stale: bool) -> None:
        """What was computed of it is never stored. ``stale``: it may be given blocks of the weights
        that are gone."""
        if stale:
            self._move(LoadState.STALE)
        if self.state is LoadState.STALE or self.request.computed_tokens:
            self.offered.stop()
        else:
            self.offered.restart()

    def digests(self, chunks: int, salt: bytes) -> tuple[bytes, int]:
        """The hashes of the first ``chunks`` chunks, back to back, and their width. A ``salt`` is
        mixed in by XOR: the engine's hashes are as good as random, so results are equal only for
        equal hashes and salts."""
        return _joined(self.request.chunk_hashes(0, chunks) if chunks > 0 else (), salt)

    def block_digests(self, first: int, end: int, salt: bytes) -> tuple[bytes, int]:
        """As ``digests``, of blocks ``[first, end)``."""
        return _joined(self.request.block_hashes(first, end) if end > first else (), salt)

    def _move(self, to: LoadState) -> None:
        if to is not self.state:
            assert (self.state, to) in LOAD_TRANSITIONS, (self.request.name, self.state, to)
            self.state = to


def _joined(hashes: Sequence[bytes], salt: bytes) -> tuple[bytes, int]:
    if not hashes:
        return b"", 0
    digests, width = b"".join(hashes), len(hashes[0])
    if salt:
        mask = hashlib.blake2b(salt, digest_size=width).digest() * len(hashes)
        digests = (np.frombuffer(digests, np.uint8) ^ np.frombuffer(mask, np.uint8)).tobytes()
    return digests, width
