"""Keeping a connection to the daemon: a thread connects, registers, and does so again when lost.

Laws of this file:

- Constructing, sending and closing never wait for the daemon, whether it is absent, suspended,
  restarting or hostile. The thread connects, registers, watches for hang-up and writes what the
  socket would not take at once. Of a caller's connection it reads only what no caller waits for.
- Sockets belong to the process that opened them; a forked child drops its copies and opens its own.
- What was asked or held through a lost connection is void.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from kvass.client.requests import undo
from kvass.client.session import DaemonSession, open_session
from kvass.errors import (
    ErrorCode,
    Incompatible,
    KvassError,
    Refused,
    RemoteError,
    TimedOut,
    Unavailable,
    UsageError,
)
from kvass.messages import Error, FromDaemon, OneWay, Register, Request
from kvass.wire.framing import one_line

BACKOFF_MIN_S: Final = 0.01
BACKOFF_MAX_S: Final = 0.5
BACKOFF_LASTING_S: Final = 30.0
"""Between attempts at a daemon that will not change its mind: another version, another clock, an
arena too small. A daemon started in its place ends the pause: it binds a socket of its own."""
STEADY_S: Final = 1.0
"""A connection that lived this long starts the next back-off from the beginning."""
LATE_TICK_S: Final = 0.05
"""How often the thread looks for late replies that no caller may ever come by to read."""
CLOSE_FLUSH_S: Final = 0.2
"""How long ``close`` tries to write what is still queued."""
FD_SETSIZE: Final = 1024
"""select(2) takes descriptors below this one. It is used to wait for less than a millisecond:
poll(2) rounds up to whole ones."""

_PASSING: Final[frozenset[ErrorCode]] = frozenset(("rank_taken", "limit", "shutting_down"))
_log: Final = logging.getLogger("kvass.client")
_alive: Final[weakref.WeakSet[Reconnector]] = weakref.WeakSet()


class Reconnector:
    """``session`` is the connection as it is now, or None; its identity tells it from the next.

    Thread-safe: one lock over everything. Methods that say "lock held" want it held exactly once.

    ``registration``: sent after every (re)connect; a client without one can only look.
    ``wants_arena``: map the arena, and have the thread read everything as it arrives; without, who
    asks reads its own replies. ``incomplete``: the registration lacks fields of the identity, so
    nobody connects before ``complete``.
    """

    def __init__(
        self,
        path: str,
        registration: Register | None = None,
        *,
        wants_arena: bool = False,
        incomplete: bool = False,
    ) -> None:
        self._path = path
        self.registration = registration
        """Said from the next connection on; one that is just being made with another is given up,
        and the one that is there stays."""
        self._wants_arena = wants_arena
        self._incomplete = incomplete
        self.closed = False
        self.counters: Counter[str] = Counter()
        """What happened, by name; each kind of failure is also logged once, and each refusal."""
        self._logged: dict[str, str] = {}
        """By kind: what was logged last."""
        self._begin()
        _alive.add(self)

    def _begin(self) -> None:
        """What belongs to one process."""
        self.lock = threading.Condition()
        """Notified whenever something changed that somebody may wait for."""
        self.session: DaemonSession | None = None
        self._reading = False
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._attempts = 0
        self._failure: KvassError | None = None

    def forked(self) -> None:
        """This is a child: let go of the parent's socket, without a word to the daemon."""
        session, wake_fd = self.session, self._wake_fd
        self._begin()
        if wake_fd >= 0:
            os.close(wake_fd)
        if session is not None:
            session.channel.drop()
            if session.arena is not None:
                session.arena.close()

    # ------------------------------------------------------------ connecting

    def start(self) -> None:
        """Begin connecting in the background, in this process. Every call does it.

        Never blocks nor raises: what this process has no room for now is tried by the next call.
        """
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
        """The fields that the registration's identity lacked: begin connecting. From any thread."""
        with self.lock:
            assert self.registration is not None
            self.registration.identity.update(identity)
            self._incomplete = False
        self.start()

    def connect(self, timeout_s: float) -> DaemonSession:
        """Wait for a connection. Raises ``Unavailable``, ``Incompatible`` or ``Refused``, at once
        when an attempt that ended after this call began failed."""
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
            return self.session

    def close(self) -> None:
        """End the connection, so that the daemon sees EOF. Only after copies drained. Idempotent.

        Waits a moment for what is still queued; an arena in use defers the EOF until it is left.
        """
        with self.lock:
            self.closed = True
            self.wake()
            self.lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_FLUSH_S * 5)

    # ------------------------------------------------------------ using it

    def enter(
        self, boot: bytes, given_s: float, slices: Iterable[int] = ()
    ) -> DaemonSession | None:
        """Become a user of the connection to ``boot``, which keeps its arena; then ``leave``.

        ``slices`` are what will be touched of it (``DaemonSession.want``). None unless that
        connection was registered at ``given_s`` and has been since.
        """
        self.start()
        with self.lock:
            session = self.session
            if session is None or session.arena is None or session.boot != boot:
                return None
            if session.registered_s > given_s:
                return None
            session.users += 1
            if session.want(slices):
                self.wake()
            return session

    def leave(self, session: DaemonSession) -> None:
        """The last to leave a lost connection closes it."""
        with self.lock:
            session.users -= 1
            last = not session.users
        if last:
            session.end()

    def send(self, message: OneWay | Request, *, late: bool = False) -> bool:
        """Send now, or have the thread write what the socket does not take; lock held. False if
        there is no connection. Raises ``UsageError`` for a message above the frame limit."""
        if (session := self.session) is None:
            return False
        try:
            session.send(message, late=late)
        except Unavailable as error:
            self._lose(session, error)
            return False
        if session.channel.wants_write:
            self.wake()
        return True

    def post(self, message: OneWay, only: DaemonSession | None = None) -> bool:
        """Send a one-way message; False if its boot is not the one we are connected to, or that
        connection is not ``only``."""
        self.start()
        with self.lock:
            session = self.session
            right = session is not None and session.boot == message.boot
            if not right or only not in (None, session) or not self.send(message):
                self.counters["dropped"] += 1
                return False
            return True

    def deliver(self, message: OneWay, session: DaemonSession) -> bool:
        """Have the kernel take ``message`` whole, on ``session`` and no other: then the daemon
        reads it before this session's EOF. False: it cannot be, and ``session`` is given up."""
        with self.lock:
            if not self.post(message, session):
                return False
            if session.channel.wants_write:
                self._lose(session, Unavailable("the daemon does not read"))
                return False
            return True

    def read_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Take in what arrives until ``done()``, for at most ``timeout_s`` (0 polls); whether it
        came. Lock held, and let go of while this waits. One thread reads at a time, and the others
        are woken when it has read."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._read()
            if done():
                return True
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self.session is None:
                return False
            if self._reading:
                self.lock.wait(left_s)
            else:
                self._await_bytes(self.session, left_s)

    def settle(self, reply: FromDaemon) -> None:
        """A reply that nobody waits for: give back what it holds."""
        if isinstance(reply, Error):
            self.refused(reply)
            return
        self.counters["late_replies"] += 1
        for message in undo(reply):
            self.post(message)

    def refused(self, error: Error) -> None:
        """Count a refusal; log the first of each code."""
        self._note(f"refused_{error.code}", f"the daemon refused: {one_line(error.text)}")

    def fault(self, session: DaemonSession, text: str) -> None:
        """The daemon broke the protocol on ``session``: that connection ends."""
        with self.lock:
            self._lose(session, RemoteError(text))

    def wake(self) -> None:
        """Make the thread look again."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ inside, lock held

    def _read(self) -> None:
        """Take in what has arrived, unless another thread is reading."""
        session = self.session
        if session is None or self._reading:
            return
        try:
            for reply in session.receive():
                self.settle(reply)
        except (Unavailable, RemoteError) as error:
            self._lose(session, error)

    def _await_bytes(self, session: DaemonSession, timeout_s: float) -> None:
        """Be the reader: wait for the socket with the lock released."""
        fd = session.channel.fileno()
        self._reading = True
        session.users += 1  # so that the descriptor stays ours while we sleep on it
        self.lock.release()
        try:
            if timeout_s < 0.001 and fd < FD_SETSIZE:
                select.select([fd], [], [], timeout_s)
            else:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                poll.poll(min(timeout_s, 3600) * 1000)  # a C int; who waits longer comes again
        finally:
            self.lock.acquire()
            self._reading = False
            self.lock.notify_all()
            self.leave(session)

    def _lose(self, session: DaemonSession, error: KvassError | None) -> None:
        """``session`` is over; what was asked through it will never be answered."""
        if session is not self.session:
            return
        self.session = None
        session.requests.void()
        self.wake()
        self.lock.notify_all()
        if error is not None:
            self._note("lost", f"connection lost: {error}")

    def _note(self, kind: str, text: str, again: bool = False) -> None:
        """Count, and log the first of its kind; with ``again`` also one that says something else
        than the last one that was logged."""
        self.counters[kind] += 1
        if self.counters[kind] == 1 or (again and self._logged.get(kind) != text):
            level = logging.DEBUG if self.registration is None else logging.WARNING
            _log.log(level, "%s (counted from now on, not logged)", text)
            self._logged[kind] = text

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        """Connect, watch, and again, with back-off."""
        backoff_s, found = BACKOFF_MIN_S, None
        while not self.closed:
            began_s = time.monotonic()
            before, found = found, _socket_file(self._path)
            if found != before:  # another daemon, which may know nothing of what the last one said
                backoff_s = BACKOFF_MIN_S
            pause_s, longest_s = backoff_s, BACKOFF_MAX_S
            try:
                session = open_session(self._path, self.registration, wants_arena=self._wants_arena)
            except (KvassError, OSError) as error:  # OSError: this process has no descriptor left
                failure = error if isinstance(error, KvassError) else Unavailable(str(error))
                self._failed(failure)
                if _lasting(failure):
                    pause_s = BACKOFF_LASTING_S
                elif isinstance(failure, Refused) and failure.code == "limit":
                    longest_s = BACKOFF_LASTING_S  # of places, or of what will never be smaller
            else:
                self._connected(session)
                while self._watch(session):
                    pass
                self.leave(session)
                if time.monotonic() - began_s >= STEADY_S:
                    backoff_s = pause_s = BACKOFF_MIN_S
            self._pause(pause_s, found)
            backoff_s = min(backoff_s * 2, longest_s)
        with self.lock:
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)

    def _failed(self, error: KvassError) -> None:
        with self.lock:
            self._attempts += 1
            self._failure = error
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
            self.lock.notify_all()

    def _watch(self, session: DaemonSession) -> bool:
        """One look at the socket; False once the session is over."""
        with self.lock:
            if self.closed:
                self._flush_and_lose(session)
            if session is not self.session:
                return False
            if self._reading:  # the reader sees a hang-up too, and must not lose its bytes to us
                self.lock.wait(LATE_TICK_S)
                return True
            late = bool(session.requests.abandoned) and not self._wants_arena
            timeout_s = 0.0 if session.behind else LATE_TICK_S if late else None
            poll = self._poll(session)
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        with self.lock:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)  # takes back every ``wake`` so far
            if session is self.session:
                self._read()  # writes what is queued, too
            slice_ = session.next_slice()
        if slice_ is not None:
            session.populate(slice_)
        return True

    def _poll(self, session: DaemonSession) -> select.poll:
        """For hang-up, wakes, and room to write; with an arena also for bytes to read."""
        poll = select.poll()
        events = select.POLLRDHUP
        events |= select.POLLIN if self._wants_arena else 0
        events |= select.POLLOUT if session.channel.wants_write else 0
        poll.register(session.channel, events)
        poll.register(self._wake_fd, select.POLLIN)
        return poll

    def _flush_and_lose(self, session: DaemonSession) -> None:
        deadline_s = time.monotonic() + CLOSE_FLUSH_S
        with suppress(Unavailable):  # it went first
            while session.channel.wants_write and (left_s := deadline_s - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(session.channel, select.POLLOUT)
                poll.poll(left_s * 1000)
                session.channel.flush()
        self._lose(session, None)

    def _pause(self, seconds: float, tried: tuple[int, ...] | None) -> None:
        """Sleep, unless closed, or until another socket stands where ``tried`` stood."""
        deadline_s = time.monotonic() + seconds
        with self.lock:
            while not self.closed and (left_s := deadline_s - time.monotonic()) > 0:
                self.lock.wait(min(left_s, BACKOFF_MAX_S))
                if _socket_file(self._path) not in (tried, None):
                    return


def _socket_file(path: str) -> tuple[int, ...] | None:
    """What tells the socket of one daemon from that of the next; None where there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _lasting(error: KvassError) -> bool:
    """Whether trying again soon can only give the same answer."""
    if isinstance(error, Refused):
        return error.code not in _PASSING
    return isinstance(error, (Incompatible, UsageError))


def _after_fork() -> None:
    for reconnector in list(_alive):
        reconnector.forked()


os.register_at_fork(after_in_child=_after_fork)
