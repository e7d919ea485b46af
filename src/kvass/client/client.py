"""Requests to the daemon and their replies, over a connection that comes and goes by itself.

Laws of this file:

- No call outlasts its bound.
- The caller reads its own replies: one reader at a time, others are served from what it read.
- A reply that nobody waits for any more is settled: a late match is released, a late grant aborted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from kvass.client.reconnect import Reconnector
from kvass.client.session import DaemonSession, refusal
from kvass.errors import Incompatible, TimedOut, Unavailable, UsageError
from kvass.messages import (
    Clear,
    Cleared,
    Error,
    FromDaemon,
    OneWay,
    Prefetch,
    Prefetched,
    Register,
    Request,
    Status,
    StatusReply,
    Welcome,
)
from kvass.types import MOST_SECONDS


def bounded(value: float) -> float:
    """``value`` as a message may carry it (``Seconds``): a negative one and NaN are 0."""
    return min(max(0.0, value), MOST_SECONDS)  # in this order: ``max`` keeps its first for a NaN


class Endpoint:
    """What a client of any kind can do with its ``connection``."""

    def __init__(self, connection: Reconnector) -> None:
        self.connection = connection

    @property
    def connected(self) -> bool:
        """Whether a daemon has welcomed and registered us and has not hung up."""
        return self.connection.session is not None

    @property
    def counters(self) -> Counter[str]:
        """``lookups``, ``hits``, ``misses``, ``timeouts``, ``late_replies``, ``dropped``, ``lost``,
        ``unproven``, ``connects``, ``too_old``, ``too_large``, ``refused_<code>``,
        ``failed_<error>``."""
        return self.connection.counters

    def start(self) -> None:
        """Begin connecting in the background, in this process (after any fork). Never blocks."""
        self.connection.start()

    def complete(self, identity: Mapping[str, str]) -> None:
        """``start`` with the fields that the registration's identity lacked. From any thread."""
        self.connection.complete(identity)

    def close(self) -> None:
        """End the session; the daemon cancels what was not handed over. Only after copies drained:
        a buffer in use defers it. Idempotent."""
        self.connection.close()


class Client(Endpoint):
    """Asks the daemon at ``socket``. Thread-safe. Arguments as ``Reconnector``.

    ``Client(path).status()`` is a complete use of it.
    """

    def __init__(
        self,
        socket: str,
        registration: Register | None = None,
        *,
        wants_arena: bool = False,
        incomplete: bool = False,
    ) -> None:
        super().__init__(
            Reconnector(socket, registration, wants_arena=wants_arena, incomplete=incomplete)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def session(self) -> DaemonSession | None:
        """The connection as it is now; its identity tells one from the next."""
        return self.connection.session

    @property
    def silent_s(self) -> float:
        """For how long the daemon has owed an answer that a caller gave up waiting for; 0: not."""
        session = self.session
        since_s = 0.0 if session is None else session.requests.silent_since_s
        return time.monotonic() - since_s if since_s else 0.0

    def connect(self, timeout_s: float) -> Welcome:
        """Wait for a connection. Raises as ``Reconnector.connect``."""
        return self.connection.connect(timeout_s).welcome

    # ------------------------------------------------------------ whole requests

    def call(self, message: Request, timeout_s: float = 5.0) -> FromDaemon:
        """Send and wait for the reply, connecting first if need be.

        Raises ``Unavailable`` (``TimedOut``), ``Incompatible`` or ``Refused``.
        """
        deadline_s = time.monotonic() + timeout_s
        self.connect(timeout_s)
        with self.connection.lock:
            if not self.connection.send(message):
                raise Unavailable("the connection was lost")
        reply = self.wait(message.seq, deadline_s - time.monotonic())
        if reply is None:
            self.discard(message.seq)
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

    # ------------------------------------------------------------ step by step

    def submit(self, message: Request, *, late: bool = False) -> int:
        """Send a request without waiting: its ``seq``, or 0: there is no connection, too many
        requests are open, or it is larger than a frame may be (counted as ``too_large``).

        ``late``: its answer may take its time, and many of them keep no other request back. So may
        what the daemon says that a tier is at work on (``Promoting``).
        """
        self.start()
        with self.connection.lock:
            session = self.session
            try:
                if session is None or not session.requests.room(late):
                    return 0
                return message.seq if self.connection.send(message, late=late) else 0
            except UsageError:
                self.counters["too_large"] += 1
                return 0

    def wait(self, seq: int, timeout_s: float) -> FromDaemon | None:
        """The reply to ``seq``; None if it is not here in time (0 polls). Then wait again or
        ``discard`` it. Raises ``Unavailable`` if its connection is gone.
        """
        with self.connection.lock:
            if (session := self.connection.session) is None:
                raise Unavailable("the connection was lost before the answer")
            requests = session.requests
            if self.connection.read_until(lambda: requests.answered(seq), timeout_s):
                return requests.fetch(seq)
            if timeout_s > 0 and seq not in requests.late and not requests.silent_since_s:
                requests.silent_since_s = time.monotonic()
            return None

    def promoting(self, seq: int) -> bool:
        """Whether the answer to ``seq`` may take its time: a tier is at work on it."""
        session = self.session
        return session is not None and seq in session.requests.late

    def discard(self, seq: int) -> None:
        """Nobody will wait for ``seq`` any more: its reply is settled when it comes."""
        with self.connection.lock:
            if (session := self.session) is None:
                return
            if (reply := session.requests.abandon(seq)) is None:
                self.connection.wake()  # the thread looks for it from now on
            else:
                self.connection.settle(reply)

    def post(self, message: OneWay) -> bool:
        """Send a one-way message; False if its boot is not the one we are connected to."""
        return self.connection.post(message)

    def poll(self) -> None:
        """Take in what has arrived, without waiting."""
        self.start()
        with self.connection.lock:
            self.connection.read_until(lambda: True, 0.0)
