"""Asking the daemon: requests, replies, and what becomes of replies that came too late.

Laws of this file:

- No call outlasts its bound.
- The caller reads its own replies: one reader at a time, others are served from what it read.
- A reply nobody waits for any more is settled here: a late match is released, a late grant aborted.
"""

from __future__ import annotations

import itertools
import time
from typing import Any, Final

from kvass.client.link import Link
from kvass.client.session import Session, refusal
from kvass.errors import Incompatible, RemoteError, TimedOut, Unavailable
from kvass.messages import (
    Abort,
    Clear,
    Cleared,
    Error,
    FromDaemon,
    Granted,
    Hello,
    Lookup,
    Matched,
    OneWay,
    Ping,
    Pong,
    Prefetch,
    Prefetched,
    Register,
    Registered,
    Release,
    Renew,
    Renewed,
    Request,
    Reserve,
    Status,
    StatusReply,
    Welcome,
)
from kvass.types import MOST_SECONDS
from kvass.wire.framing import one_line

MAX_UNANSWERED: Final = 256
"""Requests sent without waiting; a daemon that answers none gets no more of them."""
MAX_LATE: Final = 4096
"""The same, of requests whose answer may take its time."""

_ANSWERS: Final[dict[type[Request], type[FromDaemon]]] = {
    Hello: Welcome,
    Register: Registered,
    Lookup: Matched,
    Prefetch: Prefetched,
    Renew: Renewed,
    Reserve: Granted,
    Ping: Pong,
    Clear: Cleared,
    Status: StatusReply,
}


def bounded(value: float) -> float:
    """``value`` as a message may carry it (``Seconds``): a negative one and NaN are 0."""
    return min(max(0.0, value), MOST_SECONDS)  # in this order: ``max`` keeps its first for a NaN


class Client(Link):
    """A connection that comes and goes by itself, and questions over it. Thread-safe.

    ``Client(path).status()`` is a complete use of it.
    """

    _seqs: Final = itertools.count(1)  # never the same in two connections

    def _void(self) -> None:
        self._asked: dict[int, type[FromDaemon]] = {}
        self._replies: dict[int, FromDaemon] = {}
        self._late: set[int] = set()
        self._slow: set[int] = set()
        """Of what was asked, that whose answer may take its time."""
        self._silent_since = 0.0

    @property
    def _owed_late(self) -> bool:
        return bool(self._late)

    @property
    def silent_s(self) -> float:
        """For how long the daemon has owed an answer that a caller gave up waiting for; 0: not."""
        return time.monotonic() - self._silent_since if self._silent_since else 0.0

    def call(self, message: Request, timeout_s: float = 5.0) -> FromDaemon:
        """Send and wait for the reply, connecting first if need be.

        Raises ``Unavailable`` (``TimedOut``), ``Incompatible`` or ``Refused``.
        """
        deadline_s = time.monotonic() + timeout_s
        self.connect(timeout_s)
        if not (seq := self._ask(message)):
            raise Unavailable("the connection was lost")
        reply = self.wait(seq, deadline_s - time.monotonic())
        if reply is None:
            self.discard(seq)
            raise TimedOut(f"no answer within {timeout_s:g} s")
        if isinstance(reply, Error):
            raise refusal(reply)
        return reply

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The fields of ``kvass status``. Raises as ``call``."""
        reply = self.call(Status(), timeout_s)
        assert isinstance(reply, StatusReply)
        return reply.fields

    def clear(
        self,
        namespace: bytes = b"",
        *,
        everything: bool = False,
        tiers: bool = False,
        timeout_s: float = 30.0,
    ) -> int:
        """Forget rows, with ``tiers`` all records too; returns how many rows stopped matching.

        Raises as ``call``; ``Refused`` (``tier_down``) if a tier could not take note of it.
        """
        message = Clear(namespace=namespace, everything=everything, tiers=tiers)
        reply = self.call(message, timeout_s)
        assert isinstance(reply, Cleared)
        return reply.rows

    def prefetch(
        self, namespace: bytes, digests: bytes, width: int = 32, *, budget_s: float = 60.0
    ) -> int:
        """Have the tiers' rows of a prompt promoted, ahead of use; how many chunks of it, from its
        beginning, are in L1 after at most ``budget_s``.

        ``namespace``: its digest (``kvass status`` has it as hex); ``digests``: all chunk hashes,
        ``width`` bytes each. Raises as ``call``; ``Incompatible`` for a daemon that knows no tiers.
        """
        if "tiers" not in self.connect(5.0).features:
            raise Incompatible("this daemon knows no prefetch: install a newer kvass there")
        message = Prefetch(
            request="prefetch",
            digests=digests,
            width=width,
            namespace=namespace,
            budget_ms=bounded(budget_s * 1000),
        )
        reply = self.call(message, message.budget_ms / 1000 + 5.0)
        assert isinstance(reply, Prefetched)
        return reply.chunks

    def submit(self, message: Request, *, late: bool = False) -> int:
        """Send a request without waiting: its ``seq``, or 0: no connection or no room.

        ``late``: its answer may take its time, and many of them keep no other request back. Raises
        ``UsageError`` for a message above the daemon's frame limit.
        """
        self.start()
        open_ = len(self._slow) if late else len(self._asked) - len(self._slow)
        room = open_ < (MAX_LATE if late else MAX_UNANSWERED)
        return self._ask(message, late) if room else 0

    def wait(self, seq: int, timeout_s: float, *, late: bool = False) -> FromDaemon | None:
        """The reply to ``seq``; None if it is not here in time (0 polls). Then wait again or
        ``discard`` it. Raises ``Unavailable`` if its connection is gone.

        ``late``: an answer of which lateness says nothing about the daemon.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._turn:
            while True:
                if not self._reading:
                    self._read()
                if seq in self._replies:
                    return self._replies.pop(seq)
                if seq not in self._asked:
                    raise Unavailable("the connection was lost before the answer")
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    if timeout_s > 0 and not late and not self._silent_since:
                        self._silent_since = time.monotonic()
                    return None
                if self._reading:
                    self._turn.wait(left_s)
                else:
                    self._await_bytes(left_s)

    def discard(self, seq: int) -> None:
        """Nobody will wait for ``seq`` any more: its reply is settled when it comes."""
        with self._turn:
            if seq in self._asked:
                self._late.add(seq)
                self._stir()
            elif (reply := self._replies.pop(seq, None)) is not None:
                self._settle_late(reply)

    def overdue(self) -> None:
        """An answer is missing that should have come: count the daemon as silent from now on."""
        with self._turn:
            self._silent_since = self._silent_since or time.monotonic()

    def poll(self) -> None:
        """Take in what has arrived, without waiting."""
        self.start()
        with self._turn:
            if not self._reading:
                self._read()

    def post(self, message: OneWay) -> bool:
        """Queue a one-way message; False if its boot is not the one we are connected to."""
        self.start()
        with self._turn:
            session = self._session
            if session is None or message.boot != session.boot or not self._send(session, message):
                self.counters["dropped"] += 1
                return False
            return True

    def tell(self, session: Session, message: OneWay) -> bool:
        """Have the kernel take ``message`` whole, on ``session`` and no other: then the daemon
        reads it before this session's EOF. False: it cannot be, and ``session`` is given up."""
        with self._turn:
            if session is not self._session or not self._send(session, message):
                self.counters["dropped"] += 1
                return False
            if session.channel.wants_write:
                self._lose(session, Unavailable("the daemon does not read"))
                return False
            return True

    def refused(self, error: Error) -> None:
        """Count a refusal; log the first of each code."""
        self._note(f"refused_{error.code}", f"the daemon refused: {one_line(error.text)}")

    # ------------------------------------------------------------ inside

    def _ask(self, message: Request, late: bool = False) -> int:
        with self._turn:
            session = self._session
            if session is None:
                return 0
            message.seq = next(self._seqs)
            if not self._send(session, message):
                return 0
            self._asked[message.seq] = _ANSWERS[type(message)]
            if late:
                self._slow.add(message.seq)
            return message.seq

    def _take_in(self, message: FromDaemon) -> None:
        self._silent_since = 0.0
        expected = self._asked.pop(message.seq, None)
        self._slow.discard(message.seq)
        if expected is None and isinstance(message, Error):
            self.refused(message)  # of a one-way message
        elif expected is None or not isinstance(message, (expected, Error)):
            raise RemoteError(f"a {type(message).__name__} nobody asked for")
        elif message.seq in self._late:
            self._late.discard(message.seq)
            self._settle_late(message)
        else:
            self._replies[message.seq] = message

    def _settle_late(self, reply: FromDaemon) -> None:
        self.counters["late_replies"] += 1
        if isinstance(reply, Matched) and reply.lease:
            self.post(Release(boot=reply.boot, lease=reply.lease))
        elif isinstance(reply, Granted):
            for grant in reply.grants:
                if grant.reservation:
                    self.post(Abort(boot=reply.boot, reservation=grant.reservation))
        elif isinstance(reply, Error):
            self.refused(reply)
