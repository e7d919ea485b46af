"""An engine's scheduler: lookups, reserves, and who owes what until the step's metadata is built.

Laws of this file:

- Waits: ``step_wait_s`` per scheduler step for all lookups together, ``reserve_wait_s`` for the
  reserve; after a timeout none until the daemon answered something. The answer to a reserve may
  come in a later step, but at most ``LATE_S`` after it was sent: a later grant is aborted.
- A lease is held by exactly one request, here, until ``take`` or ``settle``.
- When the connection is lost, everything held or asked through it is void, even if the daemon lived
  on: it has given those slots to others. Ranks learn only of what was handed over on the connection
  it came through.
- After ``clear`` nothing matches and nothing is reserved until a daemon has confirmed a Clear, on
  whatever connection; then what was stored or granted before can match no more.
- After ``new_generation`` nothing matches and nothing is reserved until a daemon has registered us
  under it, now or when we connect again. A daemon that keeps no generations apart is not used.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from kvass.client.client import Client, bounded
from kvass.client.match import PENDING as PENDING
from kvass.client.match import Ask
from kvass.client.match import Match as Match
from kvass.client.match import Pending as Pending
from kvass.client.match import Reserving as Reserving
from kvass.client.session import Session
from kvass.errors import KvassError, Unavailable, UsageError
from kvass.messages import (
    Abort,
    Clear,
    Cleared,
    Error,
    FromDaemon,
    Granted,
    HandedOver,
    Lookup,
    Matched,
    Ping,
    Prefetch,
    Register,
    Registered,
    Release,
    Request,
    Reserve,
    ReserveItem,
)

GUESS_TOKENS_S: Final = 5_000.0
"""What an engine that has measured nothing yet is taken to compute per second."""
LONGEST_S: Final = 30.0
"""No request waits longer for tiers, however long its prompt."""
CLEAR_AGAIN_S: Final = 1.0
"""A Clear that a tier could not note costs others of the namespace what L1 has, each time."""
MOVE_AGAIN_S: Final = 1.0
"""When a new generation that the daemon refused is said again."""
LATE_S: Final = 0.25
"""How long an answer to a reserve may be on its way: the caller keeps what it offered until then.
It is also how long a silent daemon is still sent reserves."""
ANSWER_S: Final = 0.02
"""How much sooner the daemon is to answer than we give up."""
GENERATION_BYTES: Final = 16
_log: Final = logging.getLogger("kvass.client")


class SchedulerClient:
    """Used from the engine's scheduler thread only. No call raises for an absent daemon.

    ``registration``: rank -1, no layout. ``readers``: the ranks that each release a match, by
    default all of the registration's. ``spare``: of every ``Lookup``; a match by a daemon that does
    not know it is given back. ``lookup_budget_s``: how long in all one request may be told
    ``PENDING``; None takes the daemon's ``lookup_budget_ms``, or, if it has tiers, the time it
    would take to compute what is asked for. ``incomplete``: the registration's identity lacks
    fields, so ``complete`` it to connect.
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
    ) -> None:
        self._client = Client(socket, registration, incomplete=incomplete)
        self._registration = registration
        """How we want to be registered; the client has this too, once no Clear is owed."""
        ranks = tuple(range(registration.ranks) if readers is None else readers)
        self._readers = None if ranks == (0,) else ranks
        """None is how ``Lookup`` says "exactly rank 0"."""
        self._spare = spare
        self._chunk_tokens = registration.chunk_tokens
        self._lookup_budget_s = lookup_budget_s
        self._reserve_wait_s = reserve_wait_s
        self._step_wait_s = step_wait_s
        self._left_s = step_wait_s
        self._asks: dict[str, Ask] = {}
        self._giver: Session | None = None
        """The connection through which came the first of what was taken since ``handed_over``."""
        self._must_clear = False
        self._clear_after_s = 0.0
        self._clearing = 0
        """The ``seq`` of the owed Clear while it is in flight."""
        self._moving = 0
        """The ``seq`` of the ``Register`` that says a new generation, while it is in flight."""
        self._move_after_s = 0.0

    @property
    def connected(self) -> bool:
        """Whether a daemon is there."""
        return self._client.connected

    @property
    def answering(self) -> bool:
        """Whether a daemon is there that answers within ``LATE_S``, and no reset is unknown to it:
        worth preparing a reserve."""
        there = self._client.session is not None and not self._resetting
        return there and self._client.silent_s <= LATE_S

    @property
    def _resetting(self) -> bool:
        """Whether a Clear is owed, or the daemon that is there takes us for what we were before."""
        session = self._client.session
        return self._must_clear or (session is not None and not self._known(session))

    def _known(self, session: Session) -> bool:
        """Whether the daemon of ``session`` has us registered under our generation."""
        apart = not self._registration.generation or "generations" in session.welcome.features
        return apart and session.registration is self._registration

    @property
    def counters(self) -> Counter[str]:
        """``lookups``, ``hits``, ``misses``, ``timeouts``, ``late_replies``, ``dropped``, ``lost``,
        ``unproven``, ``connects``, ``too_old``, ``refused_<code>``, ``failed_<error>``."""
        return self._client.counters

    def start(self) -> None:
        """Begin connecting in the background, in this process (after any fork). Never blocks."""
        self._client.start()

    def complete(self, identity: Mapping[str, str]) -> None:
        """``start`` with the fields that the registration's identity lacked. From any thread."""
        self._client.complete(identity)

    def new_step(self) -> None:
        """A scheduler step begins: a new wait budget; late replies are settled, an owed Clear and a
        new generation are said."""
        self._left_s = self._step_wait_s
        self._giver = None
        self._client.poll()
        if self._confirm_clear(0.0):
            self._confirm_generation(0.0)

    # ------------------------------------------------------------ reading

    def match(
        self,
        request: str,
        digests: bytes,
        width: int,
        first: int,
        prefill_tokens_s: float = 0.0,
    ) -> Match | Pending | None:
        """Rows of ``request`` from chunk ``first`` on; None is a miss, ``PENDING`` means ask again.

        ``digests``: all chunk hashes from chunk 0, ``width`` bytes each. A held match is returned
        again, with the same lease, until ``take`` or ``settle``; for another ``first`` or with less
        than half its time left, it is released and looked up again. ``prefill_tokens_s``: what the
        engine computes per second, 0 if it does not know; loading has to be faster.
        """
        if self._resetting:
            return None
        ask = self._asks.setdefault(request, Ask())
        if ask.first != first or self._lapsing(ask):
            self._give_back(ask)
        if ask.match is None:
            wait_s = 0.0
            if not ask.seq:
                wait_s = self._look_up(ask, request, digests, width, first, prefill_tokens_s)
            if ask.seq:
                return self._answer(ask, wait_s, len(digests) // width)
        return ask.match

    def take(self, request: str) -> Match | None:
        """The held match; the caller now owns its lease and must hand it over or release it.

        None if none is held, or its connection is gone.
        """
        ask = self._asks.get(request)
        taken = None
        if ask is not None and ask.session is self._client.session:
            taken, ask.match = ask.match, None
            self._giver = self._giver or ask.session
        self.settle(request)
        return taken

    def settle(self, request: str) -> None:
        """Give back whatever is held or asked for ``request`` and forget it. Idempotent.

        For every request that ends, is preempted, or is given no external tokens.
        """
        if (ask := self._asks.pop(request, None)) is not None:
            self._give_back(ask)

    def release(self, boot: bytes, lease: int) -> None:
        """Give back a taken lease that was not handed over."""
        self._client.post(Release(boot=boot, lease=lease))

    def _lapsing(self, ask: Ask) -> bool:
        """Whether what ``ask`` has is void, or its lease too old to begin a load on."""
        if ask.session is not self._client.session:
            return True
        if ask.match is None or ask.session is None:
            return False
        half_s = ask.session.welcome.timing.lease_s / 2
        return ask.match.deadline_s - time.monotonic() < half_s

    def prefetch(self, digests: bytes, width: int, budget_s: float = 60.0) -> bool:
        """Have the tiers' rows of a prompt promoted, ahead of use; whether the daemon was asked.

        Arguments as ``match``. Never blocks, and holds nothing.
        """
        session = self._client.session
        if session is None or self._resetting or "tiers" not in session.welcome.features:
            return False
        most = session.welcome.limits.keys_per_message * width
        seq = self._submit(
            Prefetch(
                request="prefetch",
                digests=digests[:most],
                width=width,
                budget_ms=bounded(budget_s * 1000),
            ),
            late=True,
        )
        if seq:
            self._client.discard(seq)
        return bool(seq)

    def _look_up(
        self,
        ask: Ask,
        request: str,
        digests: bytes,
        width: int,
        first: int,
        prefill_tokens_s: float,
    ) -> float:
        """Send the lookup, if there is a daemon that answers; how long to wait for it."""
        session, prefill_tokens_s = self._client.session, bounded(prefill_tokens_s)
        if session is None or first * width >= len(digests):
            return 0.0
        timing = session.welcome.timing
        if self._client.silent_s:
            self._client.poll()  # what was late may have come since the last step
        silent_s, now_s = self._client.silent_s, time.monotonic()
        if silent_s > self._budget_s(timing.lookup_budget_ms / 1000):
            self.counters["timeouts"] += 1  # it would only cost this request its patience
            return 0.0
        most = session.welcome.limits.keys_per_message * width
        chunks = min(len(digests), most) // width - first
        if not ask.patience_s:
            ask.patience_s = now_s + self._patience_s(session, chunks, prefill_tokens_s)
        tiers = session.welcome.tiers
        lookup = Lookup(
            request=request,
            digests=digests[:most],
            width=width,
            first=first,
            readers=self._readers,
            spare=self._spare,
        )
        if tiers:
            lookup.budget_ms = bounded(1000 * max(ask.patience_s - now_s - ANSWER_S, 0.001))
            lookup.prefill_tokens_s = prefill_tokens_s
        ask.seq, ask.first, ask.session = self._submit(lookup, late=tiers > 0), first, session
        self.counters["lookups"] += 1
        return 0.0 if silent_s else self._left_s

    def _budget_s(self, default_s: float) -> float:
        return default_s if self._lookup_budget_s is None else self._lookup_budget_s

    def _patience_s(self, session: Session, chunks: int, prefill_tokens_s: float) -> float:
        """How long a request may wait for ``chunks`` more: no longer than computing them takes."""
        budget_s = session.welcome.timing.lookup_budget_ms / 1000
        if session.welcome.tiers:
            tokens = chunks * self._chunk_tokens
            budget_s = max(budget_s, min(tokens / (prefill_tokens_s or GUESS_TOKENS_S), LONGEST_S))
        return self._budget_s(budget_s)

    def _taken_up(self, ask: Ask) -> bool:
        """Whether the daemon is at work on a lookup, as far as we can tell by now: a tier may take
        its time, but the daemon itself answers at once."""
        assert ask.session is not None
        welcome, now_s = ask.session.welcome, time.monotonic()
        if not welcome.tiers or ask.taken_up:
            return True
        if not ask.ping:
            ask.ping, ask.pinged_s = self._submit(Ping()), now_s
            return True
        if self._client.wait(ask.ping, 0.0) is not None:
            ask.ping, ask.taken_up = 0, True
            return True
        if now_s - ask.pinged_s < welcome.timing.lookup_budget_ms / 1000:
            return True
        self._client.overdue()
        return False

    def _answer(self, ask: Ask, wait_s: float, asked: int) -> Match | Pending | None:
        """What the lookup in flight has come to, after ``wait_s`` at most."""
        began_s = time.monotonic()
        try:
            late = ask.session is not None and ask.session.welcome.tiers > 0
            reply = self._client.wait(ask.seq, wait_s, late=late)
            patient = reply is not None or self._taken_up(ask)
        except Unavailable:
            ask.seq = ask.ping = 0
            return None
        now_s = time.monotonic()
        self._left_s = max(self._left_s - (now_s - began_s), 0.0)
        if reply is None:
            if patient and now_s < ask.patience_s:
                return PENDING
            self.counters["timeouts"] += 1
            self._give_back(ask)
            return None
        ask.seq, ask.taken_up = 0, False
        if ask.ping:
            self._client.discard(ask.ping)
            ask.ping = 0
        ask.match = self._matched(ask, reply, asked)
        self.counters["misses" if ask.match is None else "hits"] += 1
        return ask.match

    def _matched(self, ask: Ask, reply: FromDaemon, asked: int) -> Match | None:
        if not isinstance(reply, Matched):
            self._refused(reply)
            return None
        assert ask.session is not None
        if not (
            reply.boot == ask.session.boot
            and reply.first == ask.first <= reply.chunks <= asked
            and (reply.lease > 0) == (reply.chunks > reply.first)
        ):
            self._client.fault(ask.session, "a match of what was not asked for")
            return None
        if not reply.lease:
            return None
        if reply.spare != self._spare:
            self.counters["unproven"] += 1
            self.release(reply.boot, reply.lease)
            return None
        return Match(
            lease=reply.lease,
            boot=reply.boot,
            first=reply.first,
            chunks=reply.chunks,
            given_s=reply.given_s,
            deadline_s=reply.deadline_s,
            slots=reply.slots,
        )

    def _give_back(self, ask: Ask) -> None:
        if ask.session is self._client.session:  # else it went with its connection
            if ask.match is not None:
                self.release(ask.match.boot, ask.match.lease)
            elif ask.seq:
                self._client.discard(ask.seq)
            if ask.ping:
                self._client.discard(ask.ping)
        ask.seq, ask.ping, ask.match, ask.taken_up = 0, 0, None, False

    # ------------------------------------------------------------ writing

    def begin_reserve(self, items: Sequence[ReserveItem], width: int) -> Reserving | None:
        """Ask where to write; then call ``granted`` until it says, or ``give_up``.

        None: it cannot be asked now. More keys than the daemon's limit are refused whole.
        """
        if not items or not self.answering:
            return None
        wait_s = 0.0 if self._client.silent_s else self._reserve_wait_s
        seq = self._submit(Reserve(items=list(items), width=width))
        return Reserving(seq, len(items), time.monotonic(), wait_s) if seq else None

    def granted(self, reserving: Reserving) -> Granted | Pending | None:
        """Where to write; ``PENDING``: ask again in a later step; None: nowhere, it is over.

        The first call waits for ``reserve_wait_s`` at most, unless the daemon owes other answers;
        the others do not wait. ``grants`` is parallel to the items.
        """
        session, wait_s = self._client.session, reserving.wait_s
        reserving.wait_s = 0.0
        try:
            reply = self._client.wait(reserving.seq, wait_s)
        except Unavailable:
            return None
        if reply is None:
            if time.monotonic() - reserving.asked_s < max(LATE_S, wait_s):
                return PENDING
            self.give_up(reserving)
            return None
        if not isinstance(reply, Granted):
            self._refused(reply)
            return None
        assert session is not None
        if reply.boot != session.boot or len(reply.grants) != reserving.items:
            self._client.fault(session, "a grant of what was not asked for")
            return None
        self._giver = self._giver or session
        return reply

    def give_up(self, reserving: Reserving) -> None:
        """Nobody waits for this answer any more: a grant is aborted when it comes."""
        self.counters["timeouts"] += 1
        self._client.discard(reserving.seq)

    def reserve(self, items: Sequence[ReserveItem], width: int) -> Granted | None:
        """Ask where to write; None: store nothing this step (a late grant is aborted).

        ``grants`` is parallel to ``items``. More keys than the daemon's limit are refused whole.
        Nothing is asked of a daemon of which an answer is overdue.
        """
        if self._client.silent_s or (reserving := self.begin_reserve(items, width)) is None:
            return None
        reply = self.granted(reserving)
        if isinstance(reply, Pending):
            self.give_up(reserving)
            return None
        return reply

    def abort(self, boot: bytes, reservation: int) -> None:
        """Give back a granted reservation that was not handed over."""
        self._client.post(Abort(boot=boot, reservation=reservation))

    # ------------------------------------------------------------ the rest

    def handed_over(self, leases: Sequence[int], reservations: Sequence[int], boot: bytes) -> bool:
        """From here on only the ranks settle these. Last act of building a step's metadata.

        False: the daemon cannot be told on the connection they were given through, so no rank may
        hear of them; release and abort what was taken.
        """
        session, self._giver = self._giver, None
        if not leases and not reservations:
            return True
        return session is not None and self._client.tell(
            session, HandedOver(boot=boot, leases=tuple(leases), reservations=tuple(reservations))
        )

    def clear(self, timeout_s: float) -> bool:
        """Forget this namespace's rows and give back every held match.

        False: not confirmed within ``timeout_s``. Then every lookup misses and nothing is reserved
        until a later step, after any number of reconnects, has had it confirmed.
        """
        for request in list(self._asks):
            self.settle(request)
        self._drop_clear()  # one in flight is of an earlier call, and may be too early for this one
        self._must_clear, self._clear_after_s = True, 0.0
        deadline_s = time.monotonic() + timeout_s
        try:
            self._client.connect(timeout_s)
        except KvassError:
            return False
        return self._confirm_clear(max(deadline_s - time.monotonic(), 0.0))

    def _confirm_clear(self, wait_s: float) -> bool:
        """Have the owed Clear confirmed, waiting at most ``wait_s``; whether none is owed now.

        A daemon refuses it while ranks are missing, since it does not know their namespace then.
        """
        if self._must_clear and not self._clearing and time.monotonic() >= self._clear_after_s:
            self._clearing = self._submit(Clear())
        if self._clearing:
            try:
                reply = self._client.wait(self._clearing, wait_s)
            except Unavailable:  # lost with its connection: again in the next step
                self._clearing = 0
                return False
            if reply is not None:
                self._clearing = 0
                self._must_clear = not isinstance(reply, Cleared)
                if isinstance(reply, Error) and reply.code == "tier_down":
                    self._clear_after_s = time.monotonic() + CLEAR_AGAIN_S
        return not self._must_clear

    def new_generation(self) -> None:
        """The engine's weights may be others from now on: no row of before is ours any more, and
        none of ours is anybody else's. Gives back every held match; owed Clears come first.

        Waits for the daemon's answer no longer than a step may.
        """
        generation = os.urandom(GENERATION_BYTES)
        self._registration = msgspec.structs.replace(self._registration, generation=generation)
        for request in list(self._asks):
            self.settle(request)
        if self._moving:
            self._client.discard(self._moving)
        self._moving, self._move_after_s = 0, 0.0
        if self._confirm_clear(0.0):
            began_s = time.monotonic()
            self._confirm_generation(self._left_s)
            self._left_s = max(self._left_s - (time.monotonic() - began_s), 0.0)

    def _confirm_generation(self, wait_s: float) -> None:
        """Have our generation registered, waiting at most ``wait_s``. No Clear is owed: that would
        be one of the namespace we leave."""
        self._client.register_as(self._registration)
        session = self._client.session
        if session is None or self._known(session):
            return
        if "generations" not in session.welcome.features:
            if not self.counters["too_old"]:
                _log.warning(
                    "the daemon cannot tell new weights from old ones; uncached until it "
                    "is upgraded, or the engine starts anew"
                )
            self.counters["too_old"] += 1
            return
        if not self._moving and time.monotonic() >= self._move_after_s:
            self._moving = self._submit(msgspec.structs.replace(self._registration))
        try:
            reply = self._client.wait(self._moving, wait_s) if self._moving else None
        except Unavailable:  # whoever connects next says it
            self._moving = 0
            return
        if reply is not None:
            self._moving = 0
            if isinstance(reply, Registered):
                session.registration = self._registration
            else:
                self._refused(reply)
                self._move_after_s = time.monotonic() + MOVE_AGAIN_S

    def _drop_clear(self) -> None:
        """Wait no more for the Clear in flight."""
        if self._clearing:
            self._client.discard(self._clearing)
        self._clearing = 0

    def close(self) -> None:
        """End the session; the daemon cancels what was not handed over."""
        self._client.close()

    def _submit(self, message: Request, *, late: bool = False) -> int:
        try:
            return self._client.submit(message, late=late)
        except UsageError:  # above the frame limit this daemon was started with
            self.counters["too_large"] += 1
            return 0

    def _refused(self, reply: FromDaemon) -> None:
        assert isinstance(reply, Error), "the client lets no other answer through"
        self._client.refused(reply)
