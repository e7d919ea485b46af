"""A connection to the daemon that reconnects by itself, and the requests sent over it.

Laws of this file:

- No call waits for the daemon longer than its caller allows. Most calls never wait. - A
thread connects, registers, notices EOF and writes what the socket did not take at once. - A caller
reads its own reply. The thread reads replies that no caller waits for any more. If the session has
an arena, the thread reads all messages. - A reply that nobody waits for any more is undone: a late
match is released, a late grant is aborted. - When a connection is lost, its open requests, leases
and reservations are void. - Sockets belong to the process that opened them; a forked child drops
its copies and opens its own.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kvass.client.requests import undo
from kvass.client.session import DaemonSession, open_session, refusal
from kvass.errors import (
    Incompatible,
    KvassError,
    Refused,
    RemoteError,
    TimedOut,
    Unavailable,
    UsageError,
)
from kvass.messages import Error, FromDaemon, OneWay, Register, Request, Welcome
from kvass.types import SCHEDULER
from kvass.wire.framing import one_line

BACKOFF_MIN_S: Final = 0.01
BACKOFF_MAX_S: Final = 0.5
BACKOFF_LASTING_S: Final = 30.0
"""The longest pause after a failure that lasts: another version, another clock, an arena too small.
The pause ends when another daemon listens at the path."""
STEADY_S: Final = 1.0
"""After a connection that lasted this long, the back-off starts again at ``BACKOFF_MIN_S``."""
LATE_TICK_S: Final = 0.05
"""How often the thread reads late replies, which no caller waits for."""
CLOSE_S: Final = 1.0
"""How long ``close`` waits for the thread."""

_log: Final = logging.getLogger("kvass.client")
_alive: Final[weakref.WeakSet[Endpoint]] = weakref.WeakSet()


class Endpoint:
    """The base class of all clients. Thread-safe: one lock guards everything.

    A thread that waits for a reply holds the lock. Threads that wait at the same time need a client
    each.

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
        self.registration = registration
        """Sent on the next connection. An attempt that has sent an older one is dropped."""
        self.counters: Counter[str] = Counter()
        """``lookups``, ``unasked`` (there was no connection), ``hits``, ``misses``, ``timeouts``,
        ``late_replies``, ``dropped``, ``lost``, ``connects``, ``too_large``, ``refused_<code>``,
        ``failed_<error>``."""
        self.closed = False
        self._path = socket
        self._wants_arena = wants_arena
        self.daemon_uid = daemon_uid
        self._incomplete = incomplete
        self._logged: dict[str, str] = {}
        """The last text that was logged, by kind."""
        self._lost_s = 0.0
        """When a connection was last lost (CLOCK_MONOTONIC); 0: never."""
        self._unasked = 0
        """``counters["unasked"]`` at ``_lost_s``."""
        self._begin()
        _alive.add(self)

    def _begin(self) -> None:
        """Set the state that belongs to one process: a forked child calls this again."""
        self.lock = threading.Condition()
        """Guards everything. Notified when an attempt ends and when a connection is lost."""
        self.session: DaemonSession | None = None
        """The current connection, welcomed and registered. Each connection has its own object."""
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._attempts = 0
        self._failure: KvassError | None = None

    def forked(self) -> None:
        """Called in a forked child: close its copies of the parent's socket. Sends nothing."""
        session, wake_fd = self.session, self._wake_fd
        self._begin()
        if wake_fd >= 0:
            os.close(wake_fd)
        if session is not None:
            session.channel.drop()
            if session.arena is not None:
                session.arena.close()

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
        """Record that an answer is overdue since ``since_s`` (CLOCK_MONOTONIC)."""
        with self.lock:
            if self.session is not None and not self.session.requests.silent_since_s:
                self.session.requests.silent_since_s = since_s

    # ------------------------------------------------------------ connecting

    def start(self) -> None:
        """Begin connecting in the background, in this process (after any fork).

        Never blocks or raises. If this process has no thread or descriptor left, the next call of
        any kind tries again."""
        if self._thread is not None or self._incomplete:
            return
        with self.lock:
            if self._thread is None and not self.closed:
                thread = threading.Thread(target=self._run, name="kvass", daemon=True)
                try:
                    if self._wake_fd < 0:
                        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                    thread.start()
                    self._thread = thread
                except (OSError, RuntimeError) as error:  # no descriptor, no thread left: absent
                    self._failed(Unavailable(f"cannot begin to connect: {error}"))

    def complete(self, identity: Mapping[str, str]) -> None:
        """Add the fields that the registration's identity lacks, and ``start``. From any thread."""
        with self.lock:
            assert self.registration is not None
            self.registration.identity.update(identity)
            self._incomplete = False
        self.start()

    def connect(self, timeout_s: float) -> Welcome:
        """Wait for a connection. Raises ``Unavailable``, ``Incompatible``, ``UntrustedDaemon`` or
        ``Refused`` as soon as an attempt fails that ends after this call began."""
        self.start()
        deadline_s = time.monotonic() + timeout_s
        with self.lock:
            seen = self._attempts
            while self.session is None:
                failure, tried = self._failure, self._attempts > seen or self._thread is None
                if failure is not None and (tried or _lasting(failure)):
                    raise failure.with_traceback(None)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.closed:
                    raise TimedOut(f"no connection to {self._path} within {timeout_s:g} s")
                self.lock.wait(left_s)
            return self.session.welcome

    def close(self) -> None:
        """End the session. The daemon cancels what was not handed over. Idempotent.

        The socket stays open until each ``ArenaLease`` of the session is closed."""
        with self.lock:
            self.closed = True
            self._wake()
            self.lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_S)

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

    def discard(self, seq: int) -> None:
        """Stop waiting for ``seq``. Its reply is undone when it comes."""
        with self.lock:
            if self.session is None:
                return
            reply = self.session.requests.abandon(seq)
            if reply is None:
                self._wake()  # the thread looks for it from now on
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
                self._lose(session, Unavailable("the daemon does not read"))
                return False
            return True

    def leave(self, session: DaemonSession) -> None:
        """End one use of ``session``. The last user closes it."""
        with self.lock:
            session.users -= 1
            last = not session.users
        if last:
            session.end()

    def fault(self, session: DaemonSession, text: str) -> None:
        """End the connection ``session``, on which the daemon broke the protocol."""
        with self.lock:
            self._lose(session, RemoteError(text))

    def refused(self, error: Error) -> None:
        """Count a refusal; log the first of each code."""
        self._note(f"refused_{error.code}", f"the daemon refused: {one_line(error.text)}")

    # ------------------------------------------------------------ inside, lock held

    def _send(self, message: OneWay | Request) -> bool:
        """False if there is no connection. Raises ``UsageError`` above the frame limit."""
        if (session := self.session) is None:
            return False
        try:
            session.send(message)
        except Unavailable as error:
            self._lose(session, error)
            return False
        if session.channel.wants_write:
            self._wake()
        return True

    def _read(self, timeout_s: float = 0.0) -> None:
        if (session := self.session) is None:
            return
        try:
            for reply in session.receive(timeout_s):
                self._undo(reply)
        except (Unavailable, RemoteError) as error:
            self._lose(session, error)

    def _undo(self, reply: FromDaemon) -> None:
        """Undo a reply that nobody waits for: give back its lease or reservations."""
        if isinstance(reply, Error):
            self.refused(reply)
            return
        self.counters["late_replies"] += 1
        for message in undo(reply):
            self.post(message)

    def _lose(self, session: DaemonSession, error: KvassError | None) -> None:
        if session is not self.session:
            return
        self.session = None
        session.requests.void()
        self._wake()
        self.lock.notify_all()
        if error is not None:
            self.counters["lost"] += 1
            self._lost_s, self._unasked = time.monotonic(), self.counters["unasked"]
            self._say(logging.WARNING, f"connection lost: {error}; requests run uncached")

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _say(self, level: int, text: str) -> None:
        """Log an event of the connection. In an engine only the scheduler logs it above DEBUG."""
        known = self.registration is not None and self.registration.rank == SCHEDULER
        _log.log(level if known else logging.DEBUG, "%s", text)

    def _note(self, kind: str, text: str, again: bool = False) -> None:
        """Count an event. Log the first of its ``kind``, and with ``again`` each new text."""
        self.counters[kind] += 1
        if self.counters[kind] == 1 or (again and self._logged.get(kind) != text):
            level = logging.DEBUG if self.registration is None else logging.WARNING
            _log.log(level, "%s (counted from now on, not logged)", text)
            self._logged[kind] = text

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        pause_s, found = BACKOFF_MIN_S, None
        while not self.closed:
            began_s, longest_s = time.monotonic(), BACKOFF_MAX_S
            before, found = found, _socket_file(self._path)
            if found != before:  # another daemon, which may know nothing of what the last one said
                pause_s = BACKOFF_MIN_S
            try:
                session = open_session(
                    self._path,
                    self.registration,
                    wants_arena=self._wants_arena,
                    daemon_uid=self.daemon_uid,
                )
            except (KvassError, OSError) as error:  # OSError: this process has no descriptor left
                failure = error if isinstance(error, KvassError) else Unavailable(str(error))
                self._failed(failure)
                longest_s = BACKOFF_LASTING_S if _lasting(failure) else BACKOFF_MAX_S
            else:
                self._connected(session)
                while self._watch(session):
                    pass
                self.leave(session)
                if time.monotonic() - began_s >= STEADY_S:
                    pause_s = BACKOFF_MIN_S
            self._pause(min(pause_s, longest_s), found)
            pause_s = min(pause_s * 2, longest_s)
        with self.lock:
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)

    def _failed(self, error: KvassError) -> None:
        with self.lock:
            self._attempts += 1
            self._failure = error.with_traceback(None)  # which names what the attempt opened
            kind, again = f"failed_{type(error).__name__.lower()}", isinstance(error, Refused)
            self._note(kind, f"runs uncached: {error}", again)
            self.lock.notify_all()

    def _connected(self, session: DaemonSession) -> None:
        with self.lock:
            if session.registration is not self.registration:
                return  # it has changed meanwhile: nobody may ask anything through this one
            self.session = session
            self._attempts += 1
            self._failure = None
            self.counters["connects"] += 1
            self._say(logging.INFO, f"connected to the daemon at {self._path}{self._since()}")
            self.lock.notify_all()

    def _since(self) -> str:
        """The end of the log line: the chunk size, or how long there was no connection."""
        if self._lost_s:
            unasked = self.counters["unasked"] - self._unasked
            return (
                f" again after {time.monotonic() - self._lost_s:.1f} s; {unasked} lookups were "
                "not asked meanwhile"
            )
        known = self.registration
        return "" if known is None else f"; it shares chunks of {known.chunk_tokens} tokens"

    def _watch(self, session: DaemonSession) -> bool:
        """Wait for one event of the socket and handle it. False: the session is over."""
        with self.lock:
            if self.closed:
                self._lose(session, None)
            if session is not self.session:
                return False
            events = select.POLLRDHUP
            events |= select.POLLIN if self._wants_arena else 0
            events |= select.POLLOUT if session.channel.wants_write else 0
            late = session.requests.abandoned and not self._wants_arena
            timeout_s = 0.0 if session.behind else LATE_TICK_S if late else None
        poll = select.poll()
        poll.register(session.channel, events)
        poll.register(self._wake_fd, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        with self.lock:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)  # takes back every ``_wake`` so far
            if session is self.session:
                self._read()  # writes what is queued, too
        session.populate()
        return True

    def _pause(self, seconds: float, tried: tuple[int, ...] | None) -> None:
        """Sleep for ``seconds``; less if closed or if a new socket file replaces ``tried``."""
        deadline_s = time.monotonic() + seconds
        with self.lock:
            while not self.closed and (left_s := deadline_s - time.monotonic()) > 0:
                self.lock.wait(min(left_s, BACKOFF_MAX_S))
                if _socket_file(self._path) not in (tried, None):
                    return


def _socket_file(path: str) -> tuple[int, ...] | None:
    """What identifies the socket's file: another daemon's differs. None: there is no file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _lasting(error: KvassError) -> bool:
    """Whether another attempt would soon fail in the same way."""
    if isinstance(error, Refused):
        return error.code not in ("rank_taken", "shutting_down")
    return isinstance(error, (Incompatible, UsageError))


def _after_fork() -> None:
    for endpoint in list(_alive):
        endpoint.forked()


os.register_at_fork(after_in_child=_after_fork)
