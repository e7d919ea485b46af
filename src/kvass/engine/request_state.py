"""The state of a request in the scheduler's half of a connector: the progress of its lookup and
load, and what of it was offered for storing.

Laws of this file:

- A state changes only along ``LOAD_TRANSITIONS`` and ``STORE_TRANSITIONS``; any other change is a
  defect and asserts.
- A request begins at most one load.
- A chunk or a tail counts as offered once its reserve was sent (``OfferProgress.sent``). What does
  not fit into a step is not offered by it: a later step offers it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

import numpy as np

from kvass.engine.adapters import NamedAdapter
from kvass.engine.protocols import Request
from kvass.types import short_name

LOAD_FAILED: Final = "load_failed_here"
"""The reason that is told of a request whose load failed (docs/explain.md)."""


class LoadState(Enum):
    """The progress of a request's lookup and load."""

    UNANSWERED = "no lookup was answered since the request began, or since it last got blocks"
    ANSWERED = "a lookup was answered; the engine has not allocated blocks since"
    COMPUTING = "a step computed tokens of the request; it has loaded nothing"
    LOADING = "its only load has begun; no step has computed tokens of the request since"
    LOADED = "its only load has ended or failed, and a step has computed tokens of the request"
    STALE = "it may get blocks computed with replaced weights (changes.py), so it loads nothing"


LOAD_TRANSITIONS: Final = frozenset(
    {
        (LoadState.UNANSWERED, LoadState.ANSWERED),
        (LoadState.UNANSWERED, LoadState.COMPUTING),
        (LoadState.UNANSWERED, LoadState.LOADING),  # nothing was matched, so the load fails
        (LoadState.UNANSWERED, LoadState.STALE),
        (LoadState.ANSWERED, LoadState.UNANSWERED),
        (LoadState.ANSWERED, LoadState.LOADING),
        (LoadState.ANSWERED, LoadState.STALE),
        (LoadState.COMPUTING, LoadState.ANSWERED),  # it was preempted, and looked up again
        (LoadState.COMPUTING, LoadState.LOADED),  # a load that the planner did not begin has failed
        (LoadState.COMPUTING, LoadState.STALE),
        (LoadState.LOADING, LoadState.LOADED),
        (LoadState.LOADING, LoadState.STALE),
        (LoadState.LOADED, LoadState.STALE),
    }
)


class StoreState(Enum):
    """Whether chunks of a request are offered for storing."""

    PREFILL = "chunks are offered; part of the prompt is not computed yet"
    PREFILLED = "chunks are offered; the prompt is computed, and its tail may be offered"
    NEVER = "nothing of the request is offered any more"


STORE_TRANSITIONS: Final = frozenset(
    {
        (StoreState.PREFILL, StoreState.PREFILLED),
        (StoreState.PREFILL, StoreState.NEVER),
        (StoreState.PREFILLED, StoreState.NEVER),
        (StoreState.NEVER, StoreState.PREFILL),  # weights changed before any of it was computed
    }
)


@dataclass(slots=True)
class OfferProgress:
    """What of a request was offered for storing. Numbers of blocks are counted from the beginning
    of the request."""

    state: StoreState = StoreState.PREFILL
    chunks: int = 0
    """How many chunks were offered or loaded."""
    tail: int = 0
    """How many blocks the request has up to the end of the last tail that was offered or loaded; 0:
    none was."""
    due: int = 0
    """How many blocks the request has up to the end of its prompt's tail; 0: the prompt has no
    tail, or is not computed yet."""
    prompt_chunks: int = 0
    """Where the longest hit of the same prompt ends; 0: it is not computed yet."""

    @property
    def never(self) -> bool:
        """Whether nothing of the request is offered any more."""
        return self.state is StoreState.NEVER

    @property
    def prefilled(self) -> bool:
        """Whether the prompt is computed."""
        return self.state is StoreState.PREFILLED

    def prompt_computed(self, tail: int, chunks: int) -> None:
        """The prompt is computed. ``tail``: as ``due``. ``chunks``: as ``prompt_chunks``."""
        self._move(StoreState.PREFILLED)
        self.due, self.prompt_chunks = tail, chunks

    def stop(self) -> None:
        """Offer nothing of the request any more."""
        self._move(StoreState.NEVER)

    def restart(self) -> None:
        """Offer all of the request: none of its tokens are computed yet."""
        if self.never:
            self._move(StoreState.PREFILL)
            self.due = 0
        self.offer_again()

    def sent(self, chunks: int, tail: int) -> None:
        """A reserve was sent. It decides the chunks before ``chunks``, and the tail that ends after
        ``tail`` blocks (0: no tail)."""
        self.chunks = max(self.chunks, chunks)
        self.tail = max(self.tail, tail)

    def granted(self, since: int, chunks: int) -> None:
        """An answer of the daemon decided the chunks ``[since, chunks)``. If earlier chunks must be
        offered again, these must be, too."""
        if since <= self.chunks:
            self.chunks = max(self.chunks, chunks)

    def loaded(self, chunks: int, tail: int = 0) -> None:
        """The first ``chunks`` chunks were loaded, so the daemon has them. If ``tail`` is not 0, it
        has the first ``tail`` blocks, too."""
        self.chunks, self.tail = max(self.chunks, chunks), max(self.tail, tail)

    def offer_again(self, since: int = 0) -> None:
        self.tail, self.chunks = 0, min(self.chunks, since)

    def _move(self, to: StoreState) -> None:
        if to is not self.state:
            assert (self.state, to) in STORE_TRANSITIONS, (self.state, to)
            self.state = to


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a lookup of ``asked`` tokens: tokens ``[local, end)`` can be loaded. ``named``:
    the LoRA adapter of the request. ``why``, ``tiers``: as in ``messages.LookupResult``. ``boot``:
    the run of the daemon that counts the result; empty: none does. ``when_s``: CLOCK_MONOTONIC.
    ``detail``: as in ``lookups.Found``."""

    local: int
    end: int
    named: NamedAdapter | None
    asked: int = 0
    why: str = ""
    tiers: tuple[int, ...] = ()
    boot: bytes = b""
    when_s: float = 0.0
    detail: str = ""


@dataclass(slots=True)
class RequestState:
    request: Request
    state: LoadState = LoadState.UNANSWERED
    answer: Answer | None = None
    """The last answer to its lookup."""
    fresh: bool = False
    """Whether the request has got no blocks since, and nothing else was asked."""
    asking: bool = False
    """Whether the answer to its lookup is pending."""
    offered: OfferProgress = field(default_factory=OfferProgress)
    first_step: int = 0
    """The number of the first step that computed tokens of the request; 0: none has."""
    first_stored: int | None = None
    """The first chunk of which the daemon granted this request a row to store; None: none."""
    asked_end: int = 0
    """Up to which token it was looked up last."""
    hint: tuple[str, int] | None = None
    """``if_absent`` and ``absent_chunk`` of its lookups; None: they are not determined yet."""
    noted: str = ""
    """The reason in its last note (``explain.py``)."""
    missed_because: str = ""
    """Why its last lookup matched no more; empty if nothing more could match."""
    parts: int = 0
    """How many of its first chunks were seen before: it may part there from other requests."""
    kept_chunks: int = 0
    """How many of its first chunks the daemon retains, as it said last."""
    loaded_tokens: int = 0
    """How many tokens its load brings or has brought."""
    stores_answer: bool = True
    """Whether what it generates is stored, too (``answers.py``)."""
    turn: tuple[int, int] = (0, 0)
    """If its prompt goes on from an earlier request: the tokens of that one's answer, and how many
    of them it repeats. Until this is reported."""
    in_step: int = 0
    """How many tokens of its match are loaded inside a step (``in_step.py``); 0: the load is
    asynchronous."""
    _short_name: str = ""

    @property
    def short_name(self) -> str:
        """The request's name for all that leaves the engine (``types.short_name``)."""
        self._short_name = self._short_name or short_name(self.request.name)
        return self._short_name

    @property
    def most_stored_tokens(self) -> int | None:
        """How many of its first tokens are stored; None: all."""
        most = self.request.most_stored_tokens
        if self.stores_answer:
            return most
        prompt = self.request.prompt_tokens
        return prompt if most is None else min(most, prompt)

    @property
    def may_load(self) -> bool:
        """Whether a load of the request may begin."""
        return self.state not in (LoadState.LOADING, LoadState.LOADED, LoadState.STALE)

    @property
    def computed(self) -> bool:
        """Whether a step has computed tokens of the request. In other states its blocks may still
        be loading."""
        return self.state in (LoadState.COMPUTING, LoadState.LOADED)

    def answered(self, answer: Answer) -> bool:
        """A lookup was answered. True: it is the first answer since the request last got blocks.
        The engine may repeat the lookup before it has free blocks."""
        self.answer, self.fresh, self.missed_because = answer, True, answer.why
        first = self.state is not LoadState.ANSWERED
        self._move(LoadState.ANSWERED)
        return first

    def take_answer(self) -> Answer | None:
        """The answer to the lookup with which the request gets blocks; None if there was none."""
        answer, self.fresh = self.answer if self.fresh else None, False
        return answer

    def missed_since(self, local: int, when_s: float) -> bool:
        """Whether a lookup after ``local`` tokens was a miss after ``when_s``."""
        answer = self.answer
        if not self.fresh or answer is None or not self.may_load:
            return False
        return answer.local == answer.end == local and answer.when_s > when_s

    def got_blocks(self) -> None:
        """The engine allocated blocks, and no load is needed. The engine may call this again while
        the request loads."""
        if self.state is LoadState.ANSWERED:
            self._move(LoadState.UNANSWERED)

    def begin_load(self) -> None:
        """The engine allocated blocks to load into."""
        if self.state is not LoadState.STALE:
            assert self.may_load, f"{self.short_name} has begun its load"
            self._move(LoadState.LOADING)

    def load_failed(self) -> None:
        """A load of the request failed. If the planner did not begin that load, it begins no load
        of this request later."""
        self.loaded_tokens = 0
        if self.answer is not None and self.answer.end > self.answer.local:
            self.missed_because = LOAD_FAILED
        if self.may_load:
            self._move(LoadState.LOADED if self.state is LoadState.COMPUTING else LoadState.LOADING)

    def step(self, number: int) -> None:
        """Step ``number`` computes tokens of the request."""
        self.first_step = self.first_step or number
        if self.state is LoadState.LOADING:
            self._move(LoadState.LOADED)
        elif self.may_load:
            self._move(LoadState.COMPUTING)

    def weights_changed(self, stale: bool) -> None:
        """Weights may have been replaced: what was computed of the request is never stored.
        ``stale``: the request may get blocks that were computed with the old weights."""
        if stale:
            self._move(LoadState.STALE)
        if self.state is LoadState.STALE or self.request.computed_tokens:
            self.offered.stop()
        else:
            self.offered.restart()

    def digests(self, chunks: int, salt: bytes) -> tuple[bytes, int]:
        """The hashes of the first ``chunks`` chunks, concatenated, and the width of one. If
        ``salt`` is not empty, its hash is mixed into each of them by XOR. The engine's hashes are
        as good as random, so results are equal only for equal hashes and salts."""
        return _joined(self.request.chunk_hashes(0, chunks) if chunks > 0 else (), salt)

    def block_digests(self, first: int, end: int, salt: bytes) -> tuple[bytes, int]:
        """The hashes of blocks ``[first, end)``, as ``digests``."""
        return _joined(self.request.block_hashes(first, end) if end > first else (), salt)

    def _move(self, to: LoadState) -> None:
        if to is not self.state:
            assert (self.state, to) in LOAD_TRANSITIONS, (self.short_name, self.state, to)
            self.state = to


def _joined(hashes: Sequence[bytes], salt: bytes) -> tuple[bytes, int]:
    if not hashes:
        return b"", 0
    digests, width = b"".join(hashes), len(hashes[0])
    if salt:
        mask = hashlib.blake2b(salt, digest_size=width).digest() * len(hashes)
        digests = (np.frombuffer(digests, np.uint8) ^ np.frombuffer(mask, np.uint8)).tobytes()
    return digests, width
