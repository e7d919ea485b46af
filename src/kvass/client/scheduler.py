"""An engine's scheduler: lookups, reserves, and who owes what until the step's metadata is built.

Laws of this file:

- Waits: ``step_wait_s`` per scheduler step for all lookups together, ``reserve_wait_s`` for a
  reserve if its caller may wait; after a timeout none until the daemon answered something. A grant
  that comes more than ``LATE_S`` after the reserve is aborted.
- A lease is held by exactly one request, here, until ``take`` or ``settle``.
- When the connection is lost, everything held or asked through it is void, even if the daemon lived
  on: it has given those slots to others. Ranks learn only of what was handed over on the connection
  it came through.
- While a reset is pending (``reset.py``) nothing matches and nothing is reserved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvass.client.client import bounded
from kvass.client.endpoint import Endpoint
from kvass.client.reset import NamespaceReset
from kvass.client.session import DaemonSession
from kvass.errors import Unavailable
from kvass.messages import (
    Abort,
    Error,
    FromDaemon,
    Granted,
    HandedOver,
    Lookup,
    Matched,
    Prefetch,
    Register,
    Release,
    Reserve,
    ReserveItem,
)
from kvass.types import MAX_PATIENCE_S

LATE_S: Final = 2.0
"""How long an answer to a reserve may take, and how long a silent daemon is still sent reserves. On
a machine with four busy processes to a core a daemon waited 0.35 s for its turn."""
ANSWER_S: Final = 0.02
"""How much sooner the daemon is to answer than we give up."""

Match = Matched
"""A ``Matched`` of at least a chunk, or of blocks of one; of the rows of group ``g`` that the hit
needs, ``slots[g]`` says where they lie: those of the last ``len(slots[g])`` chunks."""
BlockHashes = Callable[[int], bytes]
"""Of a chunk the hashes of its first blocks, back to back: of those that a hit may use, if it ends
inside of this chunk."""


class Pending:
    """The daemon has not answered yet: ask again in a later step. Test with ``is PENDING``."""


PENDING: Final = Pending()


@dataclass(slots=True, eq=False)
class RequestLookup:
    """What one request holds or has asked for: nothing, a lookup in flight, or a match.

    ``session``: the connection that it was asked through. ``seq``: of the lookup in flight, or 0:
    for ``chunks`` chunks and ``blocks`` blocks of the next, or ``start`` blocks of chunk ``first``.
    ``again``: it is the second lookup, for the blocks of the chunk at which the answer to the
    first, perhaps ``match``, ended.
    """

    session: DaemonSession | None = None
    first: int = 0
    seq: int = 0
    chunks: int = 0
    blocks: int = 0
    start: int = 0
    again: bool = False
    match: Match | None = None
    give_up_s: float = 0.0
    """CLOCK_MONOTONIC until which the request may be told ``PENDING``; 0: never told yet."""
    acknowledged_by_s: float = 0.0
    """CLOCK_MONOTONIC until which the daemon must have said that what is asked for may come."""

    def blocks_after(self, end: int) -> int:
        """How many blocks a match of ``end`` chunks may have of the next."""
        if end == self.chunks:
            return self.blocks
        return self.start if end == self.first else 0

    def may_go_on(self, end: int) -> bool:
        """Whether blocks may match after ``end`` chunks that the daemon was not asked for."""
        return not self.again and end < self.chunks and not (self.start and end == self.first)


@dataclass(slots=True)
class Reserving:
    """A reserve of ``items`` items, sent as ``seq`` at ``asked_s`` (CLOCK_MONOTONIC). ``wait_s``:
    how long the first look for its answer may take."""

    seq: int
    items: int
    asked_s: float
    wait_s: float


class SchedulerClient(Endpoint):
    """Used from the engine's scheduler thread only. No call raises for an absent daemon.

    ``registration``: rank -1, no layout. ``readers``: the ranks that each release a match, by
    default all of the registration's. ``spare``: of every ``Lookup``. ``lookup_budget_s``: how long
    in all one request may be told ``PENDING``; None: as long as computing what is asked for takes,
    but no less than the daemon's ``lookup_budget_ms``. ``incomplete``, ``daemon_uid``: as in
    ``Endpoint``.
    """

    def __init__(
        self,
        socket: str,
        registration: Register,
        *,
        readers: Sequence[int] | None = None,
        spare: int = 0,
        lookup_budget_s: float | None = None,
        reserve_wait_s: float = 0.0005,
        step_wait_s: float = 0.002,
        incomplete: bool = False,
        daemon_uid: int | None = None,
    ) -> None:
        super().__init__(socket, registration, incomplete=incomplete, daemon_uid=daemon_uid)
        self._reset = NamespaceReset(self, registration)
        ranks = tuple(range(registration.ranks) if readers is None else readers)
        self._readers = None if ranks == (0,) else ranks
        """None is how ``Lookup`` says "exactly rank 0"."""
        self._spare = spare
        self._chunk_tokens = registration.chunk_tokens
        self._lookup_budget_s = lookup_budget_s
        self._reserve_wait_s = reserve_wait_s
        self._step_wait_s = step_wait_s
        self._left_s = step_wait_s
        self._lookups: dict[str, RequestLookup] = {}
        """By request."""
        self._giver: DaemonSession | None = None
        """The connection through which came the first of what was taken since ``handed_over``."""

    @property
    def answering(self) -> bool:
        """Whether a daemon is there that answers within ``LATE_S`` and knows of every reset."""
        return self.connected and not self._reset.pending and self.silent_s <= LATE_S

    def new_step(self) -> None:
        """A scheduler step begins: a new wait budget, late replies are settled, resets go on."""
        self._left_s = self._step_wait_s
        self._giver = None
        self.poll()
        self._reset.go_on()

    def wait_in_step(self, seq: int, most_s: float = MAX_PATIENCE_S) -> FromDaemon | None:
        """As ``wait``, for ``most_s`` and for what is left of this step's budget at most."""
        began_s = time.monotonic()
        try:
            return self.wait(seq, min(most_s, self._left_s))
        finally:
            self._left_s = max(self._left_s - (time.monotonic() - began_s), 0.0)

    # ------------------------------------------------------------ reading

    def match(
        self,
        request: str,
        digests: bytes,
        width: int,
        first: int,
        prefill_tokens_s: float = 0.0,
        tenant: str = "",
        blocks: BlockHashes | None = None,
    ) -> Match | Pending | None:
        """Rows of ``request`` from chunk ``first`` on; None is a miss, ``PENDING`` means ask again.

        ``digests``: all chunk hashes from chunk 0, ``width`` bytes each. A held match is returned
        again until ``take`` or ``settle``; for another ``first``, or with less than half its time
        left, it is released and looked up again. ``prefill_tokens_s``: what the engine computes
        per second, or 0; loading has to be faster. With ``blocks`` a match may end inside of a
        chunk. If it ends between chunk ``first`` and the last one, that takes a second lookup.
        """
        if self._reset.pending:
            return None
        lookup = self._lookups.setdefault(request, RequestLookup())
        if lookup.first != first or self._lapsing(lookup):
            self._give_back(lookup)
        message = Lookup(request=request, digests=digests, width=width, first=first, tenant=tenant)
        message.prefill_tokens_s = bounded(prefill_tokens_s)
        wait_s = 0.0
        if lookup.match is None and not lookup.seq:
            wait_s = self._look_up(lookup, message, blocks)
        while lookup.seq:
            end = self._answer(lookup, wait_s)
            if isinstance(end, Pending):
                return end
            if end is not None and blocks is not None and lookup.may_go_on(end):
                if lookup.session is not self.session:  # what it holds went with its connection
                    lookup.match = None
                    return None
                message.digests, message.again = digests[: end * width], True
                message.first_blocks = b""
                wait_s = self._look_up(lookup, message, blocks)
            if end is not None and not lookup.seq:
                self.counters["misses" if lookup.match is None else "hits"] += 1
        return lookup.match

    def take(self, request: str) -> Match | None:
        """The held match; the caller now owns its lease and must hand it over or release it. None
        if none is held, or its connection is gone."""
        lookup, taken = self._lookups.get(request), None
        if lookup is not None and lookup.session is self.session:
            taken, lookup.match = lookup.match, None
            self._giver = self._giver or lookup.session
        self.settle(request)
        return taken

    def settle(self, request: str) -> None:
        """Give back whatever is held or asked for ``request`` and forget it: the request ended, was
        preempted, or got no external tokens. Idempotent."""
        if (lookup := self._lookups.pop(request, None)) is not None:
            self._give_back(lookup)

    def promoting(self, request: str) -> bool:
        """Whether the lookup of ``request`` waits for tiers."""
        lookup = self._lookups.get(request)
        if lookup is None or lookup.session is None:
            return False
        return lookup.seq in lookup.session.requests.promoting

    def release(self, boot: bytes, lease: int) -> None:
        """Give back a taken lease that was not handed over."""
        self.post(Release(boot=boot, lease=lease))

    def _lapsing(self, lookup: RequestLookup) -> bool:
        """Whether what ``lookup`` has is void, or its lease too old to begin a load on."""
        if lookup.session is not self.session:
            return True
        if lookup.match is None or lookup.session is None:
            return False
        half_s = lookup.session.welcome.timing.lease_s / 2
        return lookup.match.deadline_s - time.monotonic() < half_s

    def prefetch(self, digests: bytes, width: int, budget_s: float = 60.0) -> bool:
        """Have the tiers' rows of a prompt promoted, ahead of use; whether the daemon was asked.
        Holds nothing. Arguments as ``match``."""
        session = self.session
        if session is None or self._reset.pending:
            return False
        message = Prefetch(
            request="prefetch",
            digests=digests[: session.welcome.limits.keys_per_message * width],
            width=width,
            budget_ms=bounded(budget_s * 1000),
        )
        if seq := self.submit(message):
            self.discard(seq)
        return bool(seq)

    def _look_up(self, lookup: RequestLookup, message: Lookup, blocks: BlockHashes | None) -> float:
        """Send the lookup, if there is a daemon that answers; how long to wait for it."""
        session, width = self.session, message.width
        if session is None:
            self.counters["unasked"] += message.first * width < len(message.digests)
            return 0.0
        digests = message.digests[: session.welcome.limits.keys_per_message * width]
        chunks = len(digests) // max(1, width)
        if blocks is not None:
            message.blocks = blocks(chunks)
            if message.first < chunks:
                message.first_blocks = blocks(message.first)
        if (message.first >= chunks or message.again) and not message.blocks:
            return 0.0
        if self.silent_s:
            self.poll()  # what was late may have come since the last step
        silent_s, now_s = self.silent_s, time.monotonic()
        welcome, patience_s = session.welcome, self._lookup_budget_s
        least_s = welcome.timing.lookup_budget_ms / 1000
        if silent_s > (least_s if patience_s is None else patience_s):
            self.counters["timeouts"] += 1  # it would only cost this request its patience
            return 0.0
        if not lookup.give_up_s:
            if patience_s is None:
                tokens = (chunks - message.first) * self._chunk_tokens
                patience_s = welcome.timing.patience_s(tokens, message.prefill_tokens_s)
            lookup.give_up_s = now_s + patience_s
        unbounded = self._lookup_budget_s is None or welcome.tiers
        lookup.acknowledged_by_s = now_s + least_s if unbounded else lookup.give_up_s
        message.digests, message.readers, message.spare = digests, self._readers, self._spare
        message.writing = True
        message.budget_ms = bounded(1000 * max(lookup.give_up_s - now_s - ANSWER_S, 0.001))
        lookup.seq, lookup.first, lookup.session = self.submit(message), message.first, session
        lookup.chunks, lookup.again = chunks, message.again
        lookup.blocks = len(message.blocks) // max(1, width)
        lookup.start = len(message.first_blocks) // max(1, width)
        self.counters["lookups"] += not message.again
        return 0.0 if silent_s else self._left_s

    def _answer(self, lookup: RequestLookup, wait_s: float) -> int | Pending | None:
        """The chunk at which the answer to the lookup in flight ends, after ``wait_s`` at most;
        None: there is none. What it brings is held in ``lookup``."""
        try:
            reply = self.wait_in_step(lookup.seq, wait_s)
        except Unavailable:
            lookup.seq, lookup.match = 0, None
            return None
        now_s = time.monotonic()
        if reply is None:
            assert lookup.session is not None
            acknowledged = lookup.seq in lookup.session.requests.promoting
            if now_s < lookup.give_up_s and (acknowledged or now_s < lookup.acknowledged_by_s):
                return PENDING
            self.counters["timeouts"] += 1
            self.discard(lookup.seq)
            lookup.seq = 0
            return None
        lookup.seq, worse = 0, lookup.match
        found = self._matched(lookup, reply)
        if not lookup.again or (found is not None and found.blocks):
            lookup.match = found
        else:
            worse = found
        if worse is not None:
            self.release(worse.boot, worse.lease)
        return reply.chunks if isinstance(reply, Matched) else lookup.chunks

    def _matched(self, lookup: RequestLookup, reply: FromDaemon) -> Match | None:
        if isinstance(reply, Error):
            self.refused(reply)
            return None
        assert isinstance(reply, Matched)
        assert lookup.session is not None
        if not (
            reply.boot == lookup.session.boot
            and reply.first == lookup.first <= reply.chunks <= lookup.chunks
            and 0 <= reply.blocks <= lookup.blocks_after(reply.chunks)
            and (reply.lease > 0) == (reply.chunks > reply.first or reply.blocks > 0)
            and (not reply.lease or reply.spare == self._spare)
        ):
            self.fault(lookup.session, "a match of what was not asked for")
            return None
        return reply if reply.lease else None

    def _give_back(self, lookup: RequestLookup) -> None:
        if lookup.session is self.session:  # else it went with its connection
            if lookup.match is not None:
                self.release(lookup.match.boot, lookup.match.lease)
            if lookup.seq:
                self.discard(lookup.seq)
        lookup.seq, lookup.match = 0, None

    # ------------------------------------------------------------ writing

    def begin_reserve(
        self, items: Sequence[ReserveItem], width: int, wait: bool = True
    ) -> Reserving | None:
        """Ask where to write; then call ``granted`` until it says, or ``give_up``. None: it cannot
        be asked now. More keys than the daemon's limit are refused whole. ``wait``: the first call
        of ``granted`` may."""
        if not items or not self.answering:
            return None
        wait_s = self._reserve_wait_s if wait and not self.silent_s else 0.0
        seq = self.submit(Reserve(items=list(items), width=width))
        return Reserving(seq, len(items), time.monotonic(), wait_s) if seq else None

    def granted(self, reserving: Reserving) -> Granted | Pending | None:
        """Where to write; ``PENDING``: ask again in a later step; None: nowhere, it is over.

        Only the first call waits, if ``begin_reserve`` said that it may and the daemon owes no
        other answer. ``grants`` is parallel to the items.
        """
        session, wait_s = self.session, reserving.wait_s
        reserving.wait_s = 0.0
        try:
            reply = self.wait(reserving.seq, wait_s)
        except Unavailable:
            return None
        if reply is None:
            if time.monotonic() - reserving.asked_s < max(LATE_S, wait_s):
                return PENDING
            self.silent_since(reserving.asked_s)
            self.give_up(reserving)
            return None
        if isinstance(reply, Error):
            self.refused(reply)
            return None
        assert isinstance(reply, Granted)
        assert session is not None
        if reply.boot != session.boot or len(reply.grants) != reserving.items:
            self.fault(session, "a grant of what was not asked for")
            return None
        self._giver = self._giver or session
        return reply

    def give_up(self, reserving: Reserving) -> None:
        """Nobody waits for this answer any more: a grant is aborted when it comes."""
        self.counters["timeouts"] += 1
        self.discard(reserving.seq)

    def reserve(self, items: Sequence[ReserveItem], width: int) -> Granted | None:
        """``begin_reserve`` and ``granted`` in one step; None: store nothing (a late grant is
        aborted). Nothing is asked of a daemon of which an answer is overdue."""
        if self.silent_s or (reserving := self.begin_reserve(items, width)) is None:
            return None
        reply = self.granted(reserving)
        if isinstance(reply, Pending):
            self.give_up(reserving)
            return None
        return reply

    def abort(self, boot: bytes, reservation: int) -> None:
        """Give back a granted reservation that was not handed over."""
        self.post(Abort(boot=boot, reservation=reservation))

    # ------------------------------------------------------------ the rest

    def handed_over(self, leases: Sequence[int], reservations: Sequence[int], boot: bytes) -> bool:
        """From here on only the ranks settle these. False: the daemon cannot be told on the
        connection they were given through, so no rank may hear of them; release and abort them."""
        session, self._giver = self._giver, None
        if not leases and not reservations:
            return True
        message = HandedOver(boot=boot, leases=tuple(leases), reservations=tuple(reservations))
        return session is not None and self.deliver(message, session)

    def clear(self, timeout_s: float) -> bool:
        """Forget this namespace's rows and give back every held match. False: not confirmed within
        ``timeout_s``; then every lookup misses and nothing is reserved until it is."""
        self._settle_all()
        return self._reset.clear(timeout_s)

    def new_generation(self) -> None:
        """The engine's weights may be others from now on: no row of before is ours any more, and
        none of ours is anybody else's. Gives back every held match; waits no longer than a step
        may."""
        self._settle_all()
        began_s = time.monotonic()
        self._reset.new_generation(self._left_s)
        self._left_s = max(self._left_s - (time.monotonic() - began_s), 0.0)

    def _settle_all(self) -> None:
        for request in list(self._lookups):
            self.settle(request)
