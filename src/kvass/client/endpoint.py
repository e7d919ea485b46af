"""Requests to the daemon, over a connection that comes and goes (``daemon_connection.py``).

Laws of this file:

- No call waits for the daemon longer than its caller allows. Most calls never wait.
- A thread connects, registers, notices EOF and writes what the socket did not take at once.
- A caller reads its own reply. The thread reads replies that no caller waits for any more. If the
  session has an arena, the thread reads all messages.
- A reply that nobody waits for any more is undone: a late match is released, a late grant is
  aborted.
- When a connection is lost, its open requests, leases and reservations are void.
- Sockets belong to the process that opened them; a forked child drops its copies and opens its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Final

from kvass.client.daemon_connection import DaemonConnection
from kvass.client.requests import undo
from kvass.client.session import DaemonSession, refusal
from kvass.errors import (
    RemoteError,
    TimedOut,
    Unavailable,
    UsageError,
)
from kvass.messages import Error, FromDaemon, OneWay, Register, Request, Welcome
from kvass.wire.framing import one_line

TURN_S: Final = 0.001
"""How long a thread that waits in ``ask`` keeps the lock at a time."""


class Endpoint:
    """The base class of all clients. Thread-safe: one lock guards everything.

    A thread that waits in ``call`` or ``wait`` holds the lock. Threads that wait at the same time
    use ``ask``, or a client each.

    ``socket``: the daemon's; empty for the default places (``wire.places``).
    ``registration``: sent after every (re)connect. A client without one registers no engine.
    ``wants_arena``: map the arena. ``incomplete``: the registration's identity lacks fields, so
    the client does not connect before ``complete``. ``daemon_uid``: the daemon's user, if the files
    do not show it (``wire.trust``).
    """

    def __init__(
        self,
        socket: str,
        registration: Register | None = None,
        *,
        wants_arena: bool = False,
        incomplete: bool = False,
        daemon_uid: int | None = None,
    ) -> None:
        self._connection = DaemonConnection(
            socket,
            registration,
            self._read,
            self._on_connected,
            wants_arena=wants_arena,
            incomplete=incomplete,
            daemon_uid=daemon_uid,
        )
        self.counters = self._connection.counters
        """``lookups``, ``unasked`` (there was no connection), ``hits``, ``misses``, ``timeouts``,
        ``late_replies``, ``dropped``, ``lost``, ``connects``, ``too_large``, ``refused_<code>``,
        ``failed_<error>``."""

    @property
    def session(self) -> DaemonSession | None:
        """The current connection, welcomed and registered. Each connection has its own object."""
        return self._connection.session

    @property
    def lock(self) -> threading.Condition:
        """Guards everything. Notified when an attempt ends and when a connection is lost."""
        return self._connection.lock

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called: then it connects no more."""
        return self._connection.closed

    @property
    def registration(self) -> Register | None:
        """Sent on the next connection. An attempt that has sent an older one is dropped."""
        return self._connection.registration

    @registration.setter
    def registration(self, registration: Register | None) -> None:
        self._connection.registration = registration

    @property
    def connected(self) -> bool:
        """Whether there is a connection on which the daemon has registered us."""
        return self.session is not None

    @property
    def silent_s(self) -> float:
        """Seconds for which an answer that nobody waits for has been overdue; 0: none is."""
        session = self.session
        since_s = 0.0 if session is None else session.requests.silent_since_s
        return time.monotonic() - since_s if since_s else 0.0

    def silent_since(self, since_s: float) -> None:
        """Record that an answer is overdue since ``since_s`` (CLOCK_MONOTONIC). The thread may have
        read the last answer meanwhile: then no message would end the record."""
        with self.lock:
            requests = None if self.session is None else self.session.requests
            if requests is not None and requests.owed and not requests.silent_since_s:
                requests.silent_since_s = since_s

    # ------------------------------------------------------------ connecting

    def start(self) -> None:
        """Begin connecting in the background, in this process (after any fork). Never blocks nor
        raises: what this process has no room for now is tried by the next call of any kind."""
        self._connection.start()

    def complete(self, identity: Mapping[str, str]) -> None:
        """``start`` with the fields that the registration's identity lacked. From any thread."""
        self._connection.complete(identity)

    def connect(self, timeout_s: float) -> Welcome:
        """Wait for a connection. Raises ``Unavailable``, ``Incompatible``, ``UntrustedDaemon`` or
        ``Refused``, at once when an attempt that ended after this call began failed."""
        return self._connection.connect(timeout_s)

    def close(self) -> None:
        """End the session; the daemon cancels what was not handed over. An arena in use defers the
        EOF until it is left. Idempotent."""
        self._connection.close()

    def leave(self, session: DaemonSession) -> None:
        """The last to leave a lost connection closes it."""
        self._connection.leave(session)

    # ------------------------------------------------------------ requests

    def call(self, message: Request, timeout_s: float = 5.0) -> FromDaemon:
        """Send and wait for the reply, connecting first if need be.

        Raises ``Unavailable`` (``TimedOut``), ``Incompatible`` or ``Refused``; ``UsageError`` for a
        message above the frame limit.
        """
        deadline_s = time.monotonic() + timeout_s
        self.connect(timeout_s)
        with self.lock:
            if not self._send(message):
                raise Unavailable("the connection was lost")
            reply = self.wait(message.seq, deadline_s - time.monotonic())
        if reply is None:
            self.discard(message.seq)
            raise TimedOut(f"no answer within {timeout_s:g} s")
        if isinstance(reply, Error):
            raise refusal(reply)
        return reply

    def submit(self, message: Request) -> int:
        """Send a request without waiting: its ``seq``, or 0 if there is no connection, too many
        requests are open, or it is too large for a frame (counted as ``too_large``)."""
        self.start()
        with self.lock:
            if self.session is None or not self.session.requests.room:
                return 0
            try:
                return message.seq if self._send(message) else 0
            except UsageError:
                self.counters["too_large"] += 1
                return 0

    def wait(self, seq: int, timeout_s: float) -> FromDaemon | None:
        """The reply to ``seq``; None if it is not here in time (0 polls): then wait again or
        ``discard`` it. Raises ``Unavailable`` if its connection is gone."""
        deadline_s, left_s = time.monotonic() + timeout_s, timeout_s
        with self.lock:
            if self.session is None:
                raise Unavailable("the connection was lost before the answer")
            requests = self.session.requests
            while not requests.answered(seq):
                if left_s < 0:
                    overdue = timeout_s > 0 and seq not in requests.promoting
                    if overdue and not requests.silent_since_s:
                        requests.silent_since_s = time.monotonic()
                    return None
                self._read(left_s)
                left_s = deadline_s - time.monotonic()
            return requests.fetch(seq)

    def ask(self, message: Request, timeout_s: float) -> FromDaemon | None:
        """Send and wait for the reply, which may be an ``Error``. Other threads may use the client
        meanwhile. None: there is no connection, it was lost, or the reply is not here in time."""
        deadline_s, seq = time.monotonic() + timeout_s, self.submit(message)
        try:
            while seq:
                left_s = deadline_s - time.monotonic()
                if (reply := self.wait(seq, min(left_s, TURN_S))) is not None:
                    return reply
                if left_s <= 0:
                    self.counters["timeouts"] += 1
                    self.discard(seq)
                    return None
                time.sleep(TURN_S / 4)
        except Unavailable:
            pass
        return None

    def discard(self, seq: int) -> None:
        """Stop waiting for ``seq``. Its reply is undone when it comes."""
        with self.lock:
            if self.session is None:
                return
            reply = self.session.requests.abandon(seq)
            if reply is None:
                self._connection.wake()  # the thread looks for it from now on
            else:
                self._undo(reply)

    def poll(self) -> None:
        """Read what has arrived, without waiting, if a reply is due."""
        if (session := self.session) is None:
            self.start()
        elif session.requests.owed:
            with self.lock:
                self._read()

    def post(self, message: OneWay, only: DaemonSession | None = None) -> bool:
        """Send a one-way message. False: there is no connection, it is to another boot than the
        message's, or it is not ``only``."""
        self.start()
        with self.lock:
            session = self.session
            right = session is not None and session.boot == message.boot
            if not right or only not in (None, session) or not self._send(message):
                self.counters["dropped"] += 1
                return False
            return True

    def deliver(self, message: OneWay, session: DaemonSession) -> bool:
        """Send ``message`` on ``session``, and have the kernel take all of it.

        Then the daemon reads it before this session's EOF. False: it could not be sent whole. A
        session whose socket is full is ended."""
        with self.lock:
            if not self.post(message, session):
                return False
            if session.channel.wants_write:
                self._connection.lose(session, Unavailable("the daemon does not read"))
                return False
            return True

    def fault(self, session: DaemonSession, text: str) -> None:
        """End the connection ``session``, on which the daemon broke the protocol."""
        with self.lock:
            self._connection.lose(session, RemoteError(text))

    def refused(self, error: Error) -> None:
        """Count a refusal; log the first of each code."""
        text = f"the daemon refused: {one_line(error.text)}"
        self._connection.note(f"refused_{error.code}", text)

    # ------------------------------------------------------------ inside, lock held

    def _send(self, message: OneWay | Request) -> bool:
        """False if there is no connection. Raises ``UsageError`` above the frame limit."""
        if (session := self.session) is None:
            return False
        try:
            session.send(message)
        except Unavailable as error:
            self._connection.lose(session, error)
            return False
        if session.channel.wants_write:
            self._connection.wake()
        return True

    def _on_connected(self) -> None:
        """There is a new connection."""

    def _read(self, timeout_s: float = 0.0) -> None:
        if (session := self.session) is None:
            return
        try:
            for reply in session.receive(timeout_s):
                self._undo(reply)
        except (Unavailable, RemoteError) as error:
            self._connection.lose(session, error)

    def _undo(self, reply: FromDaemon) -> None:
        """Undo a reply that nobody waits for: give back its lease or reservations."""
        if isinstance(reply, Error):
            self.refused(reply)
            return
        self.counters["late_replies"] += 1
        for message in undo(reply):
            self.post(message)
