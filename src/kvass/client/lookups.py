"""The lookups of an engine's requests, and the matches held until the scheduler takes them.

Laws of this file:

- A request's state changes only along ``TRANSITIONS``. Any other change asserts.
- This file holds each lease for exactly one request until ``take`` or ``give_back``.
- When a connection is lost, its lookups and held matches are void.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from kvass.client.client import bounded
from kvass.client.connection import DaemonConnection
from kvass.client.endpoint import Endpoint
from kvass.client.results import counts_results
from kvass.client.step_budget import StepBudget
from kvass.errors import Unavailable
from kvass.messages import Error, FromDaemon, Lookup, Matched, Release

ANSWER_S: Final = 0.02
"""Seconds by which the daemon's deadline for an answer is earlier than ours."""

Match = Matched
"""The answer to a lookup that found at least one chunk or one block. ``slots[g]`` are the slots of
the rows that the hit needs of group ``g``: those of its last ``len(slots[g])`` chunks."""
BlockHashes = Callable[[int], bytes]
"""Takes a chunk's index. Returns the concatenated hashes of its first blocks, as far as a hit that
ends inside this chunk may use them."""


class Pending:
    """The daemon has not answered yet: ask again in a later step. Test with ``is PENDING``."""


PENDING: Final = Pending()


UNASKED: Final = ("no_daemon", "not_sent", "clearing")
"""The reasons in ``Found.why`` of lookups that no daemon got."""
CLIENTS: Final = (*UNASKED, "no_answer", "refused")
"""The reasons in ``Found.why`` that the daemon does not know."""
OTHER_NODE: Final = "other_node"
"""The reason of a hit that the daemon of another node of the engine cut (``nodes.py``)."""


class Found(NamedTuple):
    match: Match | Pending | None
    """The match, which is held for the request; None: a miss. ``PENDING``: ask again."""
    why: str = ""
    """Why no more matched (docs/explain.md); empty if nothing more could."""
    kept: int = 0
    """How many first chunks of the request are retained, as the daemon said last."""
    boot: bytes = b""
    """The run of the daemon that counts the result of the lookup; empty: none does."""
    promoting: bool = False
    """Whether a pending answer waits for tiers, or for what another engine stores."""
    whole: int = 0
    """``Matched.whole`` of the last answer."""
    detail: str = ""
    """More about ``why``, for people."""


class LookupState(Enum):
    """The state of a request's lookup."""

    IDLE = "nothing is asked and nothing is held"
    ASKED = "its lookup is in flight"
    ASKED_AGAIN = "a second lookup is in flight, for blocks after the chunk where the first ended"
    MATCHED = "a match is held, whose lease is ours"


_S = LookupState
TRANSITIONS: Final = frozenset(
    {
        (_S.IDLE, _S.ASKED),
        (_S.IDLE, _S.ASKED_AGAIN),
        (_S.ASKED, _S.IDLE),
        (_S.ASKED, _S.MATCHED),
        (_S.ASKED_AGAIN, _S.IDLE),
        (_S.ASKED_AGAIN, _S.MATCHED),
        (_S.MATCHED, _S.ASKED_AGAIN),
        (_S.MATCHED, _S.IDLE),
    }
)


@dataclass(slots=True, eq=False)
class RequestLookup:
    """The lookup of one request. ``connection``: the connection on which it was sent.

    ``seq``: the message in flight. It asks for the chunks from ``first`` up to ``chunks``, for
    ``blocks`` blocks of the chunk after them, and for ``start`` blocks of chunk ``first``.
    ``match``: the held match. During a second lookup it is the first lookup's, or None if that
    missed.
    """

    state: LookupState = LookupState.IDLE
    connection: DaemonConnection | None = None
    first: int = 0
    seq: int = 0
    chunks: int = 0
    blocks: int = 0
    start: int = 0
    match: Match | None = None
    why: str = ""
    """Why the match was not longer: ``Matched.why``, or a reason of this file."""
    kept: int = 0
    """``Matched.kept`` of the last answer."""
    whole: int = 0
    """``Matched.whole`` of the last answer."""
    give_up_s: float = 0.0
    """CLOCK_MONOTONIC until which the caller may get ``PENDING``; 0: nothing was sent yet."""
    acknowledged_by_s: float = 0.0
    """CLOCK_MONOTONIC by which the daemon must have answered or sent ``Promoting``."""

    @property
    def in_flight(self) -> bool:
        return self.state in (LookupState.ASKED, LookupState.ASKED_AGAIN)

    def move(self, to: LookupState) -> None:
        """Change the state to ``to``."""
        assert (self.state, to) in TRANSITIONS, (self.state, to)
        self.state = to
        if not self.in_flight:
            self.seq = 0

    def end(self, match: Match | None = None) -> None:
        """End the message in flight, and hold ``match``."""
        self.match = match
        to = LookupState.IDLE if match is None else LookupState.MATCHED
        if to is not self.state:
            self.move(to)

    def blocks_after(self, end: int) -> int:
        """How many blocks a match of ``end`` chunks may have of the next chunk."""
        if end == self.chunks:
            return self.blocks
        return self.start if end == self.first else 0

    def may_go_on(self, end: int, most: int) -> bool:
        """Whether blocks after chunk ``end`` may match that the first lookup did not ask for.
        ``most``: how many chunks are of use by now."""
        return end < self.chunks and end <= most and not (self.start and end == self.first)


class Lookups:
    """The lookups of one engine, by request. Used from its scheduler's thread only.

    ``readers``: the ranks that each release a match; None: rank 0 alone. ``spare``: as in
    ``Lookup``. ``budget_s``: how long a request may wait for its answer in all; None: as long as
    computing its tokens takes, but at least the daemon's ``lookup_budget_ms``.
    """

    def __init__(
        self,
        client: Endpoint,
        step: StepBudget,
        *,
        readers: tuple[int, ...] | None,
        spare: int,
        chunk_tokens: int,
        budget_s: float | None,
    ) -> None:
        self.budget_s = budget_s
        self.readers = readers
        self._client = client
        self._step = step
        self._spare = spare
        self._chunk_tokens = chunk_tokens
        self._of: dict[str, RequestLookup] = {}

    def look_up(self, request: str, message: Lookup, blocks: BlockHashes | None) -> Found:
        """Do what ``SchedulerClient.look_up`` says. ``message`` says what to look up."""
        lookup = self._of.setdefault(request, RequestLookup())
        match = self._match(lookup, message, blocks)
        if isinstance(match, Pending):
            connection = lookup.connection
            waits = connection is not None and lookup.seq in connection.requests.promoting
            return Found(match, promoting=waits)
        connection, boot = self._client.connection, b""
        if lookup.why not in UNASKED and connection is not None and counts_results(connection):
            boot = connection.boot
        return Found(match, lookup.why, lookup.kept, boot, whole=lookup.whole)

    def _match(
        self, lookup: RequestLookup, message: Lookup, blocks: BlockHashes | None
    ) -> Match | Pending | None:
        client, wait_s = self._client, 0.0
        if lookup.first != message.first or self._lapsing(lookup):
            self._void(lookup)
        if lookup.match is None and not lookup.in_flight:
            wait_s = self._ask(lookup, message, blocks)
        while lookup.seq:
            asked_again = lookup.state is LookupState.ASKED_AGAIN
            end = self._answer(lookup, wait_s)
            if isinstance(end, Pending):
                return end
            if end is None:
                break
            most = len(message.digests) // max(1, message.width)
            if not asked_again and blocks is not None and lookup.may_go_on(end, most):
                if lookup.connection is not client.connection:  # its match was lost with it
                    lookup.end(None)
                    break
                message.digests, message.again = message.digests[: end * message.width], True
                message.first_blocks = b""
                wait_s = self._ask(lookup, message, blocks)
            if not lookup.seq:
                client.counters["misses" if lookup.match is None else "hits"] += 1
        return lookup.match

    def take(self, request: str) -> Match | None:
        """Return the held match and hand its lease to the caller. None: none is held, or its
        connection is lost."""
        lookup, taken = self._of.get(request), None
        if (
            lookup is not None
            and lookup.connection is self._client.connection
            and lookup.state is LookupState.MATCHED
        ):
            taken = lookup.match
            lookup.end(None)
        self.give_back(request)
        return taken

    def give_back(self, request: str) -> None:
        """Give back the match of ``request``, discard its lookup and forget both. Idempotent."""
        if (lookup := self._of.pop(request, None)) is not None:
            self._void(lookup)

    def restart(self, request: str) -> None:
        """Give back the match of ``request``. What is asked next has what is left of its time."""
        if (lookup := self._of.get(request)) is not None:
            self._void(lookup)

    def in_flight(self, request: str) -> tuple[int, int]:
        """The message in flight for ``request``, and how many chunks it asks for; 0: none is."""
        known = self._of.get(request)
        return (known.seq, known.chunks) if known is not None and known.in_flight else (0, 0)

    def share_time(self, request: str, own: Lookups) -> None:
        """Look up ``request`` within the time that ``own`` gave it."""
        if (known := own._of.get(request)) is not None:
            self._of.setdefault(request, RequestLookup()).give_up_s = known.give_up_s

    def give_back_all(self) -> None:
        for request in list(self._of):
            self.give_back(request)

    def _lapsing(self, lookup: RequestLookup) -> bool:
        """Whether ``lookup`` is void, or less than half of its lease's time is left."""
        if lookup.connection is not self._client.connection:
            return True
        if lookup.match is None or lookup.connection is None:
            return False
        half_s = lookup.connection.welcome.timing.lease_s / 2
        return lookup.match.deadline_s - time.monotonic() < half_s

    def _void(self, lookup: RequestLookup) -> None:
        if lookup.connection is self._client.connection:  # else it was lost with its connection
            if lookup.match is not None:
                self._client.post(Release(boot=lookup.match.boot, lease=lookup.match.lease))
            if lookup.in_flight:
                self._client.discard(lookup.seq)
        lookup.end(None)

    # ------------------------------------------------------------ asking

    def _ask(self, lookup: RequestLookup, message: Lookup, blocks: BlockHashes | None) -> float:
        """Send the lookup if there is a daemon that answers. Returns how long to wait."""
        client, width = self._client, message.width
        if (connection := client.connection) is None:
            client.counters["unasked"] += message.first * width < len(message.digests)
            lookup.why = "no_daemon"
            return 0.0
        message.digests = message.digests[: connection.welcome.limits.keys_per_message * width]
        chunks = len(message.digests) // max(1, width)
        if blocks is not None:
            message.blocks = blocks(chunks)
            if message.first < chunks:
                message.first_blocks = blocks(message.first)
        if not message.again:
            lookup.why = ""
        if (message.first >= chunks or message.again) and not message.blocks:
            return 0.0
        if client.silent_s:
            client.poll()  # what was late may have come since the last step
        if not self._patient(lookup, connection, message, chunks):
            client.counters["timeouts"] += (
                1  # the daemon is silent: waiting would only delay this request
            )
            lookup.why = lookup.why or "no_answer"
            return 0.0
        message.readers, message.spare, message.writing = self.readers, self._spare, True
        left_s, way_s = lookup.give_up_s - time.monotonic(), client.way_s
        # the way there and back lasts as long whatever is asked for
        asked_s = max(left_s - way_s, min(way_s, left_s)) - ANSWER_S
        message = msgspec.structs.replace(
            message,
            budget_ms=bounded(1000 * max(asked_s, 0.001)),
            reported=message.reported and counts_results(connection),
        )
        seq = client.submit(message)
        lookup.first, lookup.connection, lookup.chunks = message.first, connection, chunks
        lookup.blocks = len(message.blocks) // max(1, width)
        lookup.start = len(message.first_blocks) // max(1, width)
        client.counters["lookups"] += not message.again
        if seq:
            lookup.move(LookupState.ASKED_AGAIN if message.again else LookupState.ASKED)
            lookup.seq = seq
        else:
            lookup.why = lookup.why or "not_sent"
        return 0.0 if client.silent_s else self._step.left_s

    def _patient(
        self, lookup: RequestLookup, connection: DaemonConnection, message: Lookup, chunks: int
    ) -> bool:
        """Set how long the answer may take. False: the daemon has been silent for longer."""
        welcome, patience_s, now_s = connection.welcome, self.budget_s, time.monotonic()
        least_s = welcome.timing.lookup_budget_ms / 1000
        if self._client.silent_s > (least_s if patience_s is None else patience_s):
            return False
        if not lookup.give_up_s:
            if patience_s is None:
                tokens = (chunks - message.first) * self._chunk_tokens
                patience_s = welcome.timing.patience_s(tokens, message.prefill_tokens_s)
            lookup.give_up_s = now_s + patience_s
        unbounded = self.budget_s is None or welcome.tiers
        lookup.acknowledged_by_s = now_s + least_s if unbounded else lookup.give_up_s
        return True

    # ------------------------------------------------------------ answers

    def _answer(self, lookup: RequestLookup, wait_s: float) -> int | Pending | None:
        """Wait for the lookup in flight, for at most ``wait_s``, and hold its match in ``lookup``.

        Returns the chunk at which the match ends; None: there will be no answer."""
        client = self._client
        try:
            reply = self._step.wait(client, lookup.seq, wait_s)
        except Unavailable:
            lookup.why = "no_daemon"
            lookup.end(None)
            return None
        if reply is None:
            assert lookup.connection is not None
            requests, now_s = lookup.connection.requests, time.monotonic()
            if lookup.seq in requests.under_way:
                return PENDING
            acknowledged = lookup.seq in requests.promoting
            if now_s < lookup.give_up_s and (acknowledged or now_s < lookup.acknowledged_by_s):
                return PENDING
            client.counters["timeouts"] += 1
            if not lookup.connection.channel.waits:  # else who waited has noted it
                client.silent_since(now_s)
            client.discard(lookup.seq)
            lookup.why = lookup.why or "no_answer"
            lookup.end(lookup.match)  # the match of the first lookup
            return None
        better, worse = self._checked(lookup, reply), lookup.match
        if lookup.state is LookupState.ASKED_AGAIN and (better is None or not better.blocks):
            better, worse = worse, better
        lookup.end(better)
        if better is not None and worse is not None:
            better.tiers = better.tiers or worse.tiers
        if worse is not None:
            client.post(Release(boot=worse.boot, lease=worse.lease))
        return reply.chunks if isinstance(reply, Matched) else lookup.chunks

    def _checked(self, lookup: RequestLookup, reply: FromDaemon) -> Match | None:
        """The match in ``reply``. None: it is a miss, an error, or does not fit the lookup."""
        if isinstance(reply, Error):
            self._client.refused(reply)
            lookup.why = lookup.why or "refused"
            return None
        assert isinstance(reply, Matched)
        if lookup.state is LookupState.ASKED:
            lookup.why = reply.why
        lookup.kept = max(lookup.kept, reply.kept)
        lookup.whole = max(lookup.whole, reply.whole)
        assert lookup.connection is not None
        if not (
            reply.boot == lookup.connection.boot
            and reply.first == lookup.first <= reply.chunks <= lookup.chunks
            and 0 <= reply.blocks <= lookup.blocks_after(reply.chunks)
            and (reply.lease > 0) == (reply.chunks > reply.first or reply.blocks > 0)
            and (not reply.lease or reply.spare == self._spare)
        ):
            self._client.fault(lookup.connection, "a match of what was not asked for")
            return None
        return reply if reply.lease else None
