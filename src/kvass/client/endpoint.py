"""Requests to the daemon, over a connection that comes and goes (``reconnecting.py``).

Laws of this file:

- No call waits for the daemon longer than its caller allows. Most calls never wait.
- A thread connects, registers, notices EOF and writes what the socket did not take at once.
- A caller reads its own reply. The thread reads replies that no caller waits for any more. If the
  connection has an arena, the thread reads all messages.
- A reply that nobody waits for any more is undone: a late match is released, a late grant is
  aborted.
- When a connection is lost, its open requests, leases and reservations are void.
- Sockets belong to the process that opened them; a forked child drops its copies and opens its own.
"""

from __future__ import annotations

import time
from typing import Final

from kvass.client.connection import DaemonConnection, refusal
from kvass.client.reconnecting import Reconnecting
from kvass.client.requests import undo
from kvass.errors import (
    RemoteError,
    TimedOut,
    Unavailable,
    UsageError,
)
from kvass.messages import Error, FromDaemon, OneWay, Request
from kvass.wire.framing import one_line

TURN_S: Final = 0.001
"""How long a thread that waits in ``ask`` keeps the lock at a time."""


class Endpoint(Reconnecting):
    """The base class of all clients. Thread-safe: one lock guards everything.

    A thread that waits in ``call`` or ``wait`` holds the lock. Threads that wait at the same time
    use ``ask``, or a client each.
    """

    way_s = 0.0
    """How long a question and its answer are under way, beside the time of the daemon."""

    @property
    def silent_s(self) -> float:
        """Seconds for which an answer that nobody waits for has been overdue; 0: none is."""
        connection = self.connection
        since_s = 0.0 if connection is None else connection.requests.silent_since_s
        return time.monotonic() - since_s if since_s else 0.0

    def silent_since(self, since_s: float) -> None:
        """Record that an answer is overdue since ``since_s`` (CLOCK_MONOTONIC). The thread may have
        read the last answer meanwhile: then no message would end the record."""
        with self.lock:
            requests = None if self.connection is None else self.connection.requests
            if requests is not None and requests.owed and not requests.silent_since_s:
                requests.silent_since_s = since_s

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
            if self.connection is None or not self.connection.requests.room:
                return 0
            try:
                return message.seq if self._send(message) else 0
            except UsageError:
                self.counters["too_large"] += 1
                return 0

    def wait(self, seq: int, timeout_s: float) -> FromDaemon | None:
        """The reply to ``seq``; None if it is not here in time (0 polls): then wait again or
        ``discard`` it. Raises ``Unavailable`` if its connection is gone. If the connection cannot
        wait, it polls."""
        with self.lock:
            if self.connection is None:
                raise Unavailable("the connection was lost before the answer")
            timeout_s = timeout_s if self.connection.channel.waits else 0.0
            deadline_s, left_s = time.monotonic() + timeout_s, timeout_s
            requests = self.connection.requests
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
            if self.connection is None:
                return
            reply = self.connection.requests.abandon(seq)
            if reply is None:
                self.wake()  # the thread looks for it from now on
            else:
                self._undo(reply)

    def poll(self) -> None:
        """Read what has arrived, without waiting, if a reply is due."""
        if (connection := self.connection) is None:
            self.start()
        elif connection.requests.owed:
            with self.lock:
                self._read()

    def post(self, message: OneWay, only: DaemonConnection | None = None) -> bool:
        """Send a one-way message. False: there is no connection, it is to another boot than the
        message's, or it is not ``only``."""
        self.start()
        with self.lock:
            connection = self.connection
            right = connection is not None and connection.boot == message.boot
            if not right or only not in (None, connection) or not self._send(message):
                self.counters["dropped"] += 1
                return False
            return True

    def deliver(self, message: OneWay, connection: DaemonConnection) -> bool:
        """Send ``message`` on ``connection``, and have the kernel take all of it.

        Then the daemon reads it before this connection's EOF. False: it could not be sent whole. A
        connection whose socket is full is ended."""
        with self.lock:
            if not self.post(message, connection):
                return False
            if connection.channel.wants_write:
                self.lose(connection, Unavailable("the daemon does not read"))
                return False
            return True

    def fault(self, connection: DaemonConnection, text: str) -> None:
        """End ``connection``, on which the daemon broke the protocol."""
        with self.lock:
            self.lose(connection, RemoteError(text))

    def refused(self, error: Error) -> None:
        """Count a refusal; log the first of each code."""
        text = f"the daemon refused: {one_line(error.text)}"
        self.note(f"refused_{error.code}", text)

    # ------------------------------------------------------------ inside, lock held

    def _send(self, message: OneWay | Request) -> bool:
        """False if there is no connection. Raises ``UsageError`` above the frame limit."""
        if (connection := self.connection) is None:
            return False
        try:
            connection.send(message)
        except Unavailable as error:
            self.lose(connection, error)
            return False
        if connection.channel.wants_write:
            self.wake()
        return True

    def _on_connected(self) -> None:
        """There is a new connection."""

    def _read(self, timeout_s: float = 0.0) -> None:
        if (connection := self.connection) is None:
            return
        try:
            for reply in connection.receive(timeout_s):
                self._undo(reply)
        except (Unavailable, RemoteError) as error:
            self.lose(connection, error)

    def _undo(self, reply: FromDaemon) -> None:
        """Undo a reply that nobody waits for: give back its lease or reservations."""
        if isinstance(reply, Error):
            self.refused(reply)
            return
        self.counters["late_replies"] += 1
        for message in undo(reply):
            self.post(message)
