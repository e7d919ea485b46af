"""The connection to the daemon that comes and goes by itself, and the thread that keeps it.

Laws of this file:

- Constructing, sending and closing never wait for the daemon, whether it is absent, suspended,
  restarting or hostile. The keeper thread connects, registers, watches for hang-up and writes what
  the socket would not take at once; it reads only where no caller waits for a reply.
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
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Final, Self

from kvass.client.session import Session, open_session
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
from kvass.messages import FromDaemon, OneWay, Populated, Register, Request, Welcome

BACKOFF_MIN_S: Final = 0.01
BACKOFF_MAX_S: Final = 0.5
BACKOFF_LASTING_S: Final = 30.0
"""Between attempts at a daemon that will not change its mind: another version, another clock, an
arena too small. A daemon started in its place ends the pause: it binds a socket of its own."""
STEADY_S: Final = 1.0
"""A connection that lived this long starts the next back-off from the beginning."""
LATE_TICK_S: Final = 0.05
"""How often the keeper looks for late replies that no caller may ever come by to read."""
FAREWELL_S: Final = 0.2
"""How long ``close`` tries to write what is still queued."""
FD_SETSIZE: Final = 1024
"""select(2) takes descriptors below this one. It is used to wait for less than a millisecond:
poll(2) rounds up to whole ones."""

_PASSING: Final[frozenset[ErrorCode]] = frozenset(("rank_taken", "limit", "shutting_down"))
_log: Final = logging.getLogger("kvass.client")
_alive: Final[weakref.WeakSet[Link]] = weakref.WeakSet()


class Link:
    """What ``Client`` stands on. Thread-safe: one lock, ``_turn``, over everything.

    ``registration``: sent after every (re)connect; a client without one can only look.
    ``incomplete``: it lacks fields of the identity, so nobody connects before ``complete``.
    """

    def __init__(
        self,
        socket: str,
        registration: Register | None = None,
        *,
        wants_arena: bool = False,
        incomplete: bool = False,
    ) -> None:
        self._path = socket
        self._registration = registration
        self._incomplete = incomplete
        self._wants_arena = wants_arena
        self._closed = False
        self.counters: Counter[str] = Counter()
        """What happened, by name; each kind of failure is also logged once, and each refusal."""
        self._told: dict[str, str] = {}
        """By kind: what was logged last."""
        self._begin()
        _alive.add(self)

    def _begin(self) -> None:
        """What belongs to one process."""
        self._pid = os.getpid()
        self._turn = threading.Condition()
        self._session: Session | None = None
        self._reading = False
        self._keeper: threading.Thread | None = None
        self._wake = -1
        self._attempts = 0
        self._failure: KvassError | None = None
        self._void()

    def forked(self) -> None:
        """We are a child: let go of the parent's socket, without a word to the daemon."""
        session, wake = self._session, self._wake
        self._begin()
        if wake >= 0:
            os.close(wake)
        if session is not None:
            session.channel.drop()
            if session.arena is not None:
                session.arena.close()

    def _void(self) -> None:
        """Forget what was asked: its connection is gone, or was never there."""
        raise NotImplementedError

    def _take_in(self, message: FromDaemon) -> None:
        """A message arrived; lock held. Raises ``RemoteError`` for what nobody asked for."""
        raise NotImplementedError

    @property
    def _owed_late(self) -> bool:
        """Whether replies may come that no caller waits for."""
        raise NotImplementedError

    # ------------------------------------------------------------ from outside

    def start(self) -> None:
        """Begin connecting in the background, in this process. Every call does it.

        Never blocks nor raises: what this process has no room for now is tried by the next call.
        """
        if self._pid != os.getpid():
            self.forked()
        if self._keeper is not None or self._incomplete:
            return
        with self._turn:
            if self._keeper is None and not self._closed:
                try:
                    self._start_keeper()
                except (OSError, RuntimeError) as error:  # no descriptor, no thread left: absent
                    self._fail(Unavailable(f"cannot begin to connect: {error}"))

    def complete(self, identity: Mapping[str, str]) -> None:
        """The fields that the registration's identity lacked: begin connecting. From any thread."""
        with self._turn:
            assert self._registration is not None
            self._registration.identity.update(identity)
            self._incomplete = False
        self.start()

    def _start_keeper(self) -> None:
        if self._wake < 0:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        keeper = threading.Thread(target=self._keep, name="kvass", daemon=True)
        keeper.start()
        self._keeper = keeper

    @property
    def connected(self) -> bool:
        """Whether a daemon has welcomed and registered us and has not hung up."""
        return self.session is not None

    @property
    def session(self) -> Session | None:
        """The connection as it is now; its identity tells one from the next."""
        return self._session if self._pid == os.getpid() else None

    def connect(self, timeout_s: float) -> Welcome:
        """Wait for a connection. Raises ``Unavailable``, ``Incompatible`` or ``Refused``, at once
        when an attempt that ended after this call began failed."""
        self.start()
        deadline_s = time.monotonic() + timeout_s
        with self._turn:
            seen = self._attempts
            while self._session is None:
                failed, now = self._failure, self._attempts > seen or self._keeper is None
                if failed is not None and (now or _lasting(failed)):
                    raise failed.with_traceback(None)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._closed:
                    raise TimedOut(f"no connection to {self._path} within {timeout_s:g} s")
                self._turn.wait(left_s)
            return self._session.welcome

    def register_as(self, registration: Register) -> None:
        """Whoever connects from now on says this; a connection that is just being made with what
        was said before is given up. The one that is there stays."""
        with self._turn:
            self._registration = registration

    def close(self) -> None:
        """End the connection, so that the daemon sees EOF. Only after copies drained. Idempotent.

        Waits a moment for what is still queued; an arena in use defers the EOF until it is left.
        """
        with self._turn:
            self._closed = True
            keeper = self._keeper if self._pid == os.getpid() else None
            self._stir()
            self._turn.notify_all()
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(FAREWELL_S * 5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def enter(self, boot: bytes, given_s: float, slices: Iterable[int] = ()) -> Session | None:
        """Become a user of the connection to ``boot``, which keeps its arena; then ``leave``.

        ``slices`` are what will be touched of it (``Session.want``). None unless that connection
        was registered at ``given_s`` and has been since.
        """
        self.start()
        with self._turn:
            session = self._session
            if session is None or session.arena is None or session.boot != boot:
                return None
            if session.registered_s > given_s:
                return None
            session.users += 1
            if session.want(slices):
                self._stir()
            return session

    def leave(self, session: Session) -> None:
        """The last to leave a lost connection closes it."""
        with self._turn:
            session.users -= 1
            last = not session.users
        if last:
            session.end()

    def fault(self, session: Session, text: str) -> None:
        """The daemon broke the protocol on ``session``: that connection ends."""
        with self._turn:
            self._lose(session, RemoteError(text))

    # ------------------------------------------------------------ under the lock

    def _send(self, session: Session, message: Request | OneWay) -> bool:
        try:
            session.channel.send(message)
        except Unavailable as error:
            self._lose(session, error)
            return False
        if session.channel.wants_write:
            self._stir()  # the keeper writes the rest
        return True

    def _read(self) -> None:
        """Take in what has arrived. Only while nobody else is reading."""
        session = self._session
        if session is None:
            return
        try:
            for message in session.channel.receive(0):
                if isinstance(message, Populated):
                    session.watermark = min(message.bytes, session.welcome.arena_bytes)
                else:
                    self._take_in(message)
        except (Unavailable, RemoteError) as error:
            self._lose(session, error)

    def _await_bytes(self, timeout_s: float) -> None:
        """Be the reader: wait for the socket with the lock released."""
        session = self._session
        assert session is not None
        fd = session.channel.fileno()
        self._reading = True
        session.users += 1  # so that the descriptor stays ours while we sleep on it
        self._turn.release()
        try:
            if timeout_s < 0.001 and fd < FD_SETSIZE:
                select.select([fd], [], [], timeout_s)
            else:
                poll = select.poll()
                poll.register(fd, select.POLLIN)
                poll.poll(min(timeout_s, 3600) * 1000)  # a C int; who waits longer comes again
        finally:
            self._turn.acquire()
            self._reading = False
            self._turn.notify_all()
            self.leave(session)

    def _lose(self, session: Session, error: KvassError | None) -> None:
        """``session`` is over; what was asked through it will never be answered."""
        if session is not self._session:
            return
        self._session = None
        self._void()
        self._stir()
        self._turn.notify_all()
        if error is not None:
            self._note("lost", f"connection lost: {error}")

    def _stir(self) -> None:
        """Make the keeper look again."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def _note(self, kind: str, text: str, again: bool = False) -> None:
        """Count, and log the first of its kind; with ``again`` also one that says something else
        than the last one that was logged."""
        self.counters[kind] += 1
        if self.counters[kind] == 1 or (again and self._told.get(kind) != text):
            level = logging.DEBUG if self._registration is None else logging.WARNING
            _log.log(level, "%s (counted from now on, not logged)", text)
            self._told[kind] = text

    # ------------------------------------------------------------ the keeper

    def _keep(self) -> None:
        """The keeper thread: connect, watch, and again, with back-off."""
        backoff_s, found = BACKOFF_MIN_S, None
        while not self._closed:
            began_s = time.monotonic()
            before, found = found, _socket_file(self._path)
            if found != before:  # another daemon, which may know nothing of what the last one said
                backoff_s = BACKOFF_MIN_S
            pause_s, longest_s = backoff_s, BACKOFF_MAX_S
            try:
                session = open_session(
                    self._path, self._registration, wants_arena=self._wants_arena
                )
            except (KvassError, OSError) as error:  # OSError: this process has no descriptor left
                failure = error if isinstance(error, KvassError) else Unavailable(str(error))
                self._fail(failure)
                if _lasting(failure):
                    pause_s = BACKOFF_LASTING_S
                elif isinstance(failure, Refused) and failure.code == "limit":
                    longest_s = BACKOFF_LASTING_S  # of places, or of what will never be smaller
            else:
                self._publish(session)
                while self._watch(session):
                    pass
                self.leave(session)
                if time.monotonic() - began_s >= STEADY_S:
                    backoff_s = pause_s = BACKOFF_MIN_S
            self._pause(pause_s, found)
            backoff_s = min(backoff_s * 2, longest_s)
        with self._turn:
            wake, self._wake = self._wake, -1
            os.close(wake)

    def _fail(self, error: KvassError) -> None:
        with self._turn:
            self._attempts += 1
            self._failure = error
            kind, again = f"failed_{type(error).__name__.lower()}", isinstance(error, Refused)
            self._note(kind, f"runs uncached: {error}", again)
            self._turn.notify_all()

    def _publish(self, session: Session) -> None:
        with self._turn:
            if session.registration is not self._registration:
                return  # it has changed meanwhile: nobody may ask anything through this one
            self._void()
            self._session = session
            self._attempts += 1
            self._failure = None
            self.counters["connects"] += 1
            self._turn.notify_all()

    def _watch(self, session: Session) -> bool:
        """One look at the socket; False once the session is over."""
        with self._turn:
            if self._closed:
                self._farewell(session)
            if session is not self._session:
                return False
            if self._reading:  # the reader sees a hang-up too, and must not lose its bytes to us
                self._turn.wait(LATE_TICK_S)
                return True
            ticking = self._owed_late and not self._wants_arena
            poll = self._interests(session)
        timeout_s = 0.0 if session.behind else LATE_TICK_S if ticking else None
        poll.poll(None if timeout_s is None else timeout_s * 1000)
        with self._turn:
            self._calm()
            if session is self._session and not self._reading:
                self._read()  # writes what is queued, too
            one = session.next_slice()
        if one is not None:
            session.populate(one)
        return True

    def _interests(self, session: Session) -> select.poll:
        """A caller reads its own replies, so only a worker, which never waits, asks for POLLIN."""
        poll = select.poll()
        events = select.POLLRDHUP
        events |= select.POLLIN if self._wants_arena else 0
        events |= select.POLLOUT if session.channel.wants_write else 0
        poll.register(session.channel, events)
        poll.register(self._wake, select.POLLIN)
        return poll

    def _farewell(self, session: Session) -> None:
        deadline_s = time.monotonic() + FAREWELL_S
        try:
            while session.channel.wants_write and (left_s := deadline_s - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(session.channel, select.POLLOUT)
                poll.poll(left_s * 1000)
                session.channel.flush()
        except Unavailable:
            pass  # it went first
        self._lose(session, None)

    def _pause(self, seconds: float, tried: tuple[int, ...] | None) -> None:
        """Sleep, unless closed, or until another socket stands where ``tried`` stood."""
        deadline_s = time.monotonic() + seconds
        with self._turn:
            while not self._closed and (left_s := deadline_s - time.monotonic()) > 0:
                self._turn.wait(min(left_s, BACKOFF_MAX_S))
                if _socket_file(self._path) not in (tried, None):
                    return

    def _calm(self) -> None:
        """Take back every ``_stir`` so far."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass  # nobody stirred


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
    for link in list(_alive):
        link.forked()


os.register_at_fork(after_in_child=_after_fork)
