"""The connection of one client to the daemon: it is made, and made again, on a thread of its own.

Laws of this file:

- The thread connects, registers, notices a hang-up and writes what the socket would not take at
  once. It reads replies that no caller waits for, and everything if there is an arena.
- A connection that was lost is another one when it is there again: another ``DaemonConnection``.
- Sockets belong to the process that opened them. A forked child drops its copies and opens its own.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kvass.client.connection import DaemonConnection, open_connection
from kvass.errors import (
    Incompatible,
    KvassError,
    Refused,
    TimedOut,
    Unavailable,
    UsageError,
)
from kvass.messages import Register, Welcome
from kvass.types import SCHEDULER
from kvass.wire.places import socket_places

BACKOFF_MIN_S: Final = 0.01
BACKOFF_MAX_S: Final = 0.5
BACKOFF_LASTING_S: Final = 30.0
"""The longest pause after a failure that lasts: another version, another clock, an arena too small.
The pause ends when another daemon listens at the path."""
STEADY_S: Final = 1.0
"""After a connection that lasted this long, the back-off starts again at ``BACKOFF_MIN_S``."""
QUICK_S: Final = 5.0
QUICK_PAUSE_S: Final = 0.05
"""For ``QUICK_S`` after a connection that lasted ``STEADY_S`` was lost, the longest pause: a daemon
that is replaced by another is back soon."""
LATE_TICK_S: Final = 0.05
"""How often the thread reads late replies, which no caller waits for."""
CLOSE_S: Final = 1.0
"""How long ``close`` waits for the thread."""

_log: Final = logging.getLogger("kvass.client")
_alive: Final[weakref.WeakSet[Reconnecting]] = weakref.WeakSet()


class Reconnecting(ABC):
    """What connects to the daemon at ``socket``, or at the default places if it is empty.

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
        """Whether ``close`` was called: then it connects no more."""
        self._path = socket
        self._wants_arena = wants_arena
        self._daemon_uid = daemon_uid
        self._incomplete = incomplete
        self._logged: dict[str, str] = {}
        """By kind: what was logged last."""
        self._lost_s = 0.0
        """When the connection was lost last; 0: never."""
        self._unasked = 0
        """``counters["unasked"]`` when it was."""
        self._begin()
        _alive.add(self)

    def _begin(self) -> None:
        """Set the state that belongs to one process: a forked child calls this again."""
        self.lock = threading.Condition()
        """Guards everything. Notified when an attempt ends and when a connection is lost."""
        self.connection: DaemonConnection | None = None
        """The current connection, welcomed and registered. Each connection has its own object."""
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._attempts = 0
        self._failure: KvassError | None = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection on which the daemon has registered us."""
        return self.connection is not None

    @property
    def why_absent(self) -> str:
        """Why there is no connection, if there never was one, or if another attempt would not help
        because the daemon refuses the registration; else empty."""
        failure = self._failure
        if failure is None:
            return ""
        refused = isinstance(failure, Refused) and _lasting(failure)
        return str(failure) if refused or not self.counters["connects"] else ""

    @abstractmethod
    def _read(self) -> None:
        """Take in what has arrived, with the lock held."""

    @abstractmethod
    def _on_connected(self) -> None:
        """There is a new connection. Called with the lock held."""

    def forked(self) -> None:
        """Called in a forked child: close its copies of the parent's socket. Sends nothing."""
        connection, wake_fd = self.connection, self._wake_fd
        self._begin()
        if wake_fd >= 0:
            os.close(wake_fd)
        if connection is not None:
            connection.channel.drop()
            if connection.arena is not None:
                connection.arena.close()

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

    def register_as(self, registration: Register) -> None:
        """Register so from now on, on a new connection."""
        with self.lock:
            self.registration = registration
            if self.connection is not None:
                self.lose(self.connection, None)

    def connect(self, timeout_s: float) -> Welcome:
        """Wait for a connection. Raises ``Unavailable``, ``Incompatible``, ``UntrustedDaemon`` or
        ``Refused`` as soon as an attempt fails that ends after this call began."""
        self.start()
        deadline_s = time.monotonic() + timeout_s
        with self.lock:
            seen = self._attempts
            while self.connection is None:
                failure, tried = self._failure, self._attempts > seen or self._thread is None
                if failure is not None and (tried or _lasting(failure)):
                    raise failure.with_traceback(None)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self.closed:
                    at = self._path or "a default socket"
                    raise TimedOut(f"no connection to {at} within {timeout_s:g} s")
                self.lock.wait(left_s)
            return self.connection.welcome

    def close(self) -> None:
        """End the connection. The daemon cancels what was not handed over. Idempotent.

        The socket stays open until each ``ArenaLease`` of the connection is closed."""
        self._close(CLOSE_S)

    def _close(self, most_s: float) -> None:
        """``close``, which waits for the thread for at most ``most_s``."""
        with self.lock:
            self.closed = True
            self.wake()
            self.lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(most_s)

    def leave(self, connection: DaemonConnection) -> None:
        """End one use of ``connection``. The last user closes it."""
        with self.lock:
            connection.users -= 1
            last = not connection.users
        if last:
            connection.end()

    # ------------------------------------------------------------ for who holds the lock

    def lose(self, connection: DaemonConnection, error: KvassError | None) -> None:
        """``connection`` is over; ``error``: why, if nobody wished it."""
        if connection is not self.connection:
            return
        if error is not None:  # first: who sees that there is no connection counts from here on
            self.counters["lost"] += 1
            self._lost_s, self._unasked = time.monotonic(), self.counters["unasked"]
        self.connection = None
        connection.requests.void()
        self.wake()
        self.lock.notify_all()
        if error is not None:
            self._say(logging.WARNING, f"connection lost: {error}; requests run uncached")

    def wake(self) -> None:
        """Have the thread look at the socket."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _say(self, level: int, text: str) -> None:
        """Log an event of the connection. In an engine only the scheduler logs it above DEBUG."""
        known = self.registration is not None and self.registration.rank == SCHEDULER
        _log.log(level if known else logging.DEBUG, "%s", text)

    def note(self, kind: str, text: str, again: bool = False) -> None:
        """Count an event. Log the first of its ``kind``, and with ``again`` each new text."""
        self.counters[kind] += 1
        if self.counters[kind] == 1 or (again and self._logged.get(kind) != text):
            level = logging.DEBUG if self.registration is None else logging.WARNING
            _log.log(level, "%s (counted from now on, not logged)", text)
            self._logged[kind] = text

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        pause_s, quick_until_s, found = BACKOFF_MIN_S, 0.0, None
        while not self.closed:
            began_s, longest_s = time.monotonic(), BACKOFF_MAX_S
            before, found = found, _socket_file(self._path)
            if found != before:  # another daemon, which may know nothing of what the last one said
                pause_s = BACKOFF_MIN_S
            try:
                connection = open_connection(
                    self._path,
                    self.registration,
                    wants_arena=self._wants_arena,
                    daemon_uid=self._daemon_uid,
                )
            except (KvassError, OSError) as error:  # OSError: this process has no descriptor left
                failure = error if isinstance(error, KvassError) else Unavailable(str(error))
                self._failed(failure)
                if _lasting(failure):
                    longest_s = BACKOFF_LASTING_S
                elif time.monotonic() < quick_until_s:
                    longest_s = QUICK_PAUSE_S
            else:
                self._connected(connection)
                while self._watch(connection):
                    pass
                self.leave(connection)
                if time.monotonic() - began_s >= STEADY_S:
                    pause_s, quick_until_s = BACKOFF_MIN_S, time.monotonic() + QUICK_S
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
            self.note(kind, f"runs uncached: {error}", again)
            self.lock.notify_all()

    def _connected(self, connection: DaemonConnection) -> None:
        with self.lock:
            if connection.registration is not self.registration:
                return  # it has changed meanwhile: nobody may ask anything through this one
            self.connection = connection
            self._attempts += 1
            self._failure = None
            self.counters["connects"] += 1
            self._say(logging.INFO, f"connected to the daemon at {connection.path}{self._since()}")
            self._on_connected()
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

    def _watch(self, connection: DaemonConnection) -> bool:
        """Wait for one event of the socket and handle it. False: the connection is over."""
        with self.lock:
            if self.closed:
                self.lose(connection, None)
            if connection is not self.connection:
                return False
            events = select.POLLRDHUP
            events |= select.POLLIN if self._wants_arena else 0
            events |= select.POLLOUT if connection.channel.wants_write else 0
            late = connection.requests.abandoned and not self._wants_arena
            timeout_s = 0.0 if connection.behind else LATE_TICK_S if late else None
        poll = select.poll()
        poll.register(connection.channel, events)
        poll.register(self._wake_fd, select.POLLIN)
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        with self.lock:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)  # takes back every ``wake`` so far
            if connection is self.connection:
                self._read()  # writes what is queued, too
        connection.populate()
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
    """What identifies the socket's file: another daemon's differs. If ``path`` is empty, what
    identifies the files at all default places. None: there is no file."""
    identity: tuple[int, ...] = ()
    for place in (path,) if path else socket_places():
        try:
            found = os.stat(place)
        except (OSError, ValueError):
            continue
        identity += (found.st_dev, found.st_ino, found.st_ctime_ns)
    return identity or None


def _lasting(error: KvassError) -> bool:
    """Whether another attempt would soon fail in the same way."""
    if isinstance(error, Refused):
        return error.code not in ("rank_taken", "shutting_down")
    return isinstance(error, (Incompatible, UsageError))


def _after_fork() -> None:
    for connection in list(_alive):
        connection.forked()


os.register_at_fork(after_in_child=_after_fork)
