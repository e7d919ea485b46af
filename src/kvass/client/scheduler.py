"""The client of an engine's scheduler: lookups, reserves, and leases until they are handed over.

Laws of this file:

- Waits: ``step_wait_s`` per scheduler step for all lookups together, ``reserve_wait_s`` for a
  reserve if its caller may wait. After a timeout nothing waits until the daemon sends something. A
  grant that comes more than ``LATE_S`` after the reserve is aborted.
- Each lease belongs to exactly one request until ``take`` or ``give_back``.
- When the connection is lost, its requests, leases and reservations are void, even if the daemon
  still runs: it may have given their slots to others. A rank gets only leases and reservations that
  were handed over on the connection on which they came.
- While a reset is pending (``reset.py``) nothing matches and nothing is reserved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kvass.client.client import bounded
from kvass.client.connection import DaemonConnection
from kvass.client.endpoint import Endpoint
from kvass.client.lookups import (
    PENDING,
    BlockHashes,
    Found,
    Lookups,
    Match,
    Pending,
)
from kvass.client.parallel import without_node
from kvass.client.reset import NamespaceReset
from kvass.client.results import Results
from kvass.client.step_budget import StepBudget
from kvass.errors import Unavailable
from kvass.messages import (
    AHEAD,
    END_SESSION,
    NO_CONTEXT,
    Abort,
    EndSession,
    Error,
    FromDaemon,
    Granted,
    HandedOver,
    Lookup,
    LookupNote,
    LookupNotes,
    LookupResult,
    Prefetch,
    Prefetched,
    Register,
    Release,
    RequestContext,
    Reserve,
    ReserveItem,
    ShadowReport,
)
from kvass.types import MAX_PATIENCE_S, short_name

LATE_S: Final = 2.0
"""How long an answer to a reserve may take, and how long a silent daemon still gets reserves.
With four busy processes per core a daemon waited 0.35 s for a core."""


@dataclass(slots=True)
class Reserving:
    """A reserve of ``items`` items, sent as ``seq`` at ``asked_s`` (CLOCK_MONOTONIC). ``wait_s``:
    how long the first call of ``granted`` may wait."""

    seq: int
    items: int
    asked_s: float
    wait_s: float


@dataclass(slots=True, frozen=True)
class Prefetching:
    request: str
    seq: int
    connection: DaemonConnection


class SendApart:
    """The daemon refused a whole reserve for something in it. Test with ``isinstance``."""


SEND_APART: Final = SendApart()


class SchedulerClient(Endpoint):
    """Used from the engine's scheduler thread only. No call raises for an absent daemon.

    ``registration``: rank -1, no layout. ``readers``: the ranks that each release a match, by
    default all of the registration's. ``spare``: of every ``Lookup``. ``lookup_budget_s``: how long
    one request may get ``PENDING`` in all; None: as long as computing its tokens takes, but at
    least the daemon's ``lookup_budget_ms``. ``incomplete``, ``daemon_uid``: as in
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
        ranks = range(registration.ranks) if readers is None else readers
        self.step = StepBudget(step_wait_s)
        self.lookups = Lookups(
            self,
            self.step,
            readers=_readers(ranks),
            spare=spare,
            chunk_tokens=registration.chunk_tokens,
            budget_s=lookup_budget_s,
        )
        self._results = Results(self)
        self._reserve_wait_s = reserve_wait_s
        self._giver: DaemonConnection | None = None
        """The connection of the first match or grant that was taken since ``handed_over``."""

    def move(self, registration: Register, readers: Sequence[int]) -> None:
        """Register as ``registration`` says, on a new connection. Generation and state stay."""
        before = self._reset.registration
        moved = msgspec.structs.replace(
            registration,
            identity=without_node(before.identity) | registration.identity,
            generation=before.generation,
            uncached=before.uncached,
        )
        with self.lock:
            self.lookups.give_back_all()
            self.lookups.readers = _readers(readers)
            self._reset.registration = moved
            self.register_as(moved)

    @property
    def answering(self) -> bool:
        """Whether the daemon is silent for ``LATE_S`` at most and has confirmed all resets."""
        return self.connected and not self._reset.pending and self.silent_s <= LATE_S

    @property
    def resetting(self) -> bool:
        """Whether a clear or a new generation is not confirmed yet. Nothing matches until it is."""
        return self._reset.pending

    @property
    def owes(self) -> bool:
        """Whether something waits for a step of the engine (``steps.py``)."""
        return False

    def new_step(self) -> None:
        """Begin a scheduler step: renew the wait budget, read replies, continue resets."""
        self.step.renew()
        self._giver = None
        self.poll()
        self._reset.go_on()
        self._results.send_overdue()

    def close(self) -> None:
        """Send the results that are not sent yet, and end the connection."""
        self._results.send()
        super().close()

    def wait_in_step(self, seq: int) -> FromDaemon | None:
        """``wait`` for the rest of this step's budget."""
        return self.step.wait(self, seq, MAX_PATIENCE_S)

    # ------------------------------------------------------------ reading

    def look_up(
        self,
        request: str,
        digests: bytes,
        width: int,
        first: int,
        context: RequestContext = NO_CONTEXT,
        blocks: BlockHashes | None = None,
    ) -> Found:
        """Look up ``request`` from chunk ``first`` on.

        ``digests``: all chunk hashes from chunk 0, ``width`` bytes each. A held match is returned
        again until ``take`` or ``give_back``. For another ``first``, or with less than half its
        time left, it is released and looked up again. ``context``: of the request. If it is
        ``reported``, call ``report`` with what comes of the lookup. With ``blocks`` a match may end
        inside of a chunk. If it ends between chunk ``first`` and the last one, that takes a second
        lookup.
        """
        if self._reset.pending:
            return Found(None, "clearing")
        fields = msgspec.structs.asdict(context)
        fields["prefill_tokens_s"] = bounded(context.prefill_tokens_s)
        message = Lookup(short_name(request), digests, width, first, **fields)
        return self.lookups.look_up(request, message, blocks)

    def match(
        self,
        request: str,
        digests: bytes,
        width: int,
        first: int,
        context: RequestContext = NO_CONTEXT,
        blocks: BlockHashes | None = None,
    ) -> Match | Pending | None:
        """What ``look_up`` finds. None: a miss. ``PENDING``: call again."""
        return self.look_up(request, digests, width, first, context, blocks).match

    def note_lookups(self, notes: Sequence[LookupNote]) -> bool:
        """Send notes of lookups. False: there is no daemon now, so keep them. A daemon that does
        not know such notes does not get them."""
        if (connection := self.connection) is None:
            return False
        if "explain" not in connection.welcome.features:
            return True
        return self.post(LookupNotes(boot=connection.boot, notes=tuple(notes)), connection)

    def take(self, request: str) -> Match | None:
        """The held match; the caller now owns its lease and must hand it over or release it. None
        if none is held, or its connection is gone."""
        connection, taken = self.connection, self.lookups.take(request)
        if taken is not None:
            self._giver = self._giver or connection
        return taken

    def give_back(self, request: str) -> None:
        """Give back the match of ``request`` and discard its lookup: the request ended, was
        preempted, or got no external tokens. Idempotent."""
        self.lookups.give_back(request)

    def release(self, boot: bytes, lease: int) -> None:
        """Give back a taken lease that was not handed over."""
        self.post(Release(boot=boot, lease=lease))

    @property
    def promotes_ahead(self) -> bool:
        """Whether ``prefetch`` is of use: the daemon answers, has tiers, and prefers lookups."""
        connection = self.connection
        if connection is None or not connection.welcome.tiers or self._reset.pending:
            return False
        return AHEAD in connection.welcome.features and not self.silent_s

    def prefetch(
        self,
        request: str,
        digests: bytes,
        width: int,
        first: int = 0,
        context: RequestContext = NO_CONTEXT,
        budget_s: float = 60.0,
    ) -> Prefetching | None:
        """Promote a prompt's rows from chunk ``first`` on ahead of use. Holds no lease. Arguments:
        as for ``look_up``.

        None: it was not sent. Else call ``prefetched`` until it is True, or ``leave_prefetch``, or
        ``end_prefetch``."""
        connection = self.connection
        if connection is None or self._reset.pending:
            return None
        message = Prefetch(
            request=short_name(request),
            digests=digests[: connection.welcome.limits.keys_per_message * width],
            width=width,
            budget_ms=bounded(budget_s * 1000),
            first=first,
            tenant=context.tenant,
            session=context.session,
        )
        seq = self.submit(message)
        return Prefetching(request, seq, connection) if seq else None

    def prefetched(self, one: Prefetching) -> bool:
        """Whether a prefetch was answered, or its connection is lost. It waits for nothing."""
        with self.lock:
            if one.connection is self.connection:
                try:
                    if not one.connection.requests.answered(one.seq):
                        return False
                    reply = one.connection.requests.fetch(one.seq)
                    if isinstance(reply, Error):
                        self.refused(reply)
                    elif isinstance(reply, Prefetched):
                        self._promoted(one, reply.chunks)
                except Unavailable:
                    pass
        return True

    def _promoted(self, one: Prefetching, chunks: int) -> None:
        """The daemon has the first ``chunks`` chunks of a prefetch now. Lock held."""

    def leave_prefetch(self, one: Prefetching) -> None:
        """Nobody waits for the answer to a prefetch. It goes on."""
        if one.connection is self.connection:
            self.discard(one.seq)

    def end_prefetch(self, one: Prefetching) -> None:
        """Nobody needs what a prefetch promotes."""
        self.leave_prefetch(one)
        if one.connection is self.connection:
            message = Prefetch(request=short_name(one.request), digests=b"")
            if seq := self.submit(message):
                self.discard(seq)

    def end_session(self, context: RequestContext) -> bool:
        """Send that the session of a client's request ended: the rows that it alone used are the
        next to be evicted. False: there is no daemon, or it is older than this message."""
        connection = self.connection
        if connection is None or END_SESSION not in connection.welcome.features:
            return False
        if seq := self.submit(EndSession(session=context.session, tenant=context.tenant)):
            self.discard(seq)
        return bool(seq)

    # ------------------------------------------------------------ results

    def report(self, result: LookupResult, boot: bytes) -> None:
        """Report the result of a lookup, with its ``Found.boot``. It is sent with the next
        ``HandedOver``, or a little later."""
        self._results.add(result, boot)

    def report_all(self) -> None:
        """Send all results now: perhaps the engine makes no step for a while."""
        self._results.send()

    def speed(self, tokens_s: float) -> None:
        """The engine computes ``tokens_s`` tokens per second; 0: it is not known yet."""
        self._results.speed(bounded(tokens_s))

    # ------------------------------------------------------------ writing

    def begin_reserve(
        self, items: Sequence[ReserveItem], width: int, wait: bool = True
    ) -> Reserving | None:
        """Send a reserve. Then call ``granted`` until it returns no ``PENDING``, or ``give_up``.

        None: it cannot be sent now. The daemon refuses all of it if it has too many keys. ``wait``:
        whether the first call of ``granted`` may wait."""
        if not items or not self.answering:
            return None
        wait_s = self._reserve_wait_s if wait and not self.silent_s else 0.0
        seq = self.submit(Reserve(items=list(items), width=width))
        return Reserving(seq, len(items), time.monotonic(), wait_s) if seq else None

    def granted(self, reserving: Reserving) -> Granted | SendApart | Pending | None:
        """The grants of a reserve. ``PENDING``: call again in a later step. None: store nothing.
        ``SEND_APART``: something in it is refused whenever it is sent, so send its items apart.

        Only the first call waits, if ``begin_reserve`` said that it may and the daemon owes no
        other answer. ``grants`` is parallel to the items.
        """
        connection, wait_s = self.connection, reserving.wait_s
        reserving.wait_s = 0.0
        try:
            reply = self.wait(reserving.seq, wait_s)
        except Unavailable:
            return None
        if reply is None:
            under_way = connection is not None and reserving.seq in connection.requests.under_way
            if under_way or time.monotonic() - reserving.asked_s < max(LATE_S, wait_s):
                return PENDING
            self.silent_since(reserving.asked_s)
            self.give_up(reserving)
            return None
        if isinstance(reply, Error):
            self.refused(reply)
            return SEND_APART if reply.code in ("bad_value", "limit") else None
        assert isinstance(reply, Granted)
        assert connection is not None
        if reply.boot != connection.boot or len(reply.grants) != reserving.items:
            self.fault(connection, "a grant of what was not asked for")
            return None
        for grant in reply.grants:
            if grant.error:
                self.refused(Error(code="bad_value", text=grant.error))
        self._giver = self._giver or connection
        return reply

    def give_up(self, reserving: Reserving) -> None:
        """Stop waiting for the answer. A grant is aborted when it comes."""
        self.counters["timeouts"] += 1
        self.discard(reserving.seq)

    def reserve(self, items: Sequence[ReserveItem], width: int) -> Granted | None:
        """``begin_reserve`` and ``granted`` in one step; None: store nothing (a late grant is
        aborted). Sends nothing while an answer of the daemon is overdue."""
        if self.silent_s or (reserving := self.begin_reserve(items, width)) is None:
            return None
        reply = self.granted(reserving)
        if isinstance(reply, Pending):
            self.give_up(reserving)
        return reply if isinstance(reply, Granted) else None

    def abort(self, boot: bytes, reservation: int) -> None:
        """Give back a granted reservation that was not handed over."""
        self.post(Abort(boot=boot, reservation=reservation))

    # ------------------------------------------------------------ the rest

    def handed_over(self, leases: Sequence[int], reservations: Sequence[int], boot: bytes) -> bool:
        """Send ``HandedOver``: from now on only the ranks settle these leases and reservations.

        False: it could not be sent on their own connection. Then pass them to no rank; release and
        abort them."""
        connection, self._giver = self._giver, None
        if not leases and not reservations:
            return True
        if connection is None:
            return False
        message = HandedOver(boot=boot, leases=tuple(leases), reservations=tuple(reservations))
        self._results.add_to(message)
        return self.deliver(message, connection)

    def report_shadow(self, report: ShadowReport) -> bool:
        """Send the figures of shadow mode. False: there is no connection, or the daemon is older
        than this message."""
        connection = self.connection
        if connection is None or "shadow" not in connection.welcome.features:
            return False
        report.boot = connection.boot
        return self.post(report, connection)

    def tell_uncached(self, why: str) -> None:
        """Have the daemon show why this engine uses no cache any more, on this connection and on
        later ones."""
        self._reset.tell_uncached(why)

    def clear(self, timeout_s: float) -> bool:
        """Forget this namespace's rows and give back every held match. False: not confirmed within
        ``timeout_s``; then every lookup misses and nothing is reserved until it is."""
        self.lookups.give_back_all()
        return self._reset.clear(timeout_s)

    def new_generation(self, token: bytes = b"") -> None:
        """Move to a new namespace, because the engine's weights may have changed. ``token``: its
        name, which no other weights may have had; empty: a random one.

        Gives back every held match. Waits no longer than the rest of the step's budget."""
        self.lookups.give_back_all()
        began_s = time.monotonic()
        self._reset.new_generation(self.step.left_s, token)
        self.step.spend(began_s)


def _readers(ranks: Sequence[int]) -> tuple[int, ...] | None:
    """The ranks that release a match, as ``Lookups`` takes them."""
    return None if tuple(ranks) == (0,) else tuple(ranks)
