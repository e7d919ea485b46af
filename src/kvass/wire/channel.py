"""The unix socket: ``Channel`` for a client, and functions for the daemon's own sockets.

A ``Channel`` never waits longer than its caller allows: sending is buffered and bounded, receiving
has a timeout. A descriptor travels as SCM_RIGHTS (unix(7)) beside the first byte of its frame.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from typing import Final, Protocol

import msgspec

from kvass.errors import ConfigError, Unavailable, UsageError
from kvass.messages import AnyMessage, FromDaemon
from kvass.wire import framing

MAX_PATH_BYTES: Final = 107
"""``sun_path`` less its closing zero."""
RECEIVE_BYTES: Final = 256 << 10
OUT_BYTES: Final = 16 << 20
"""The most bytes queued for a daemon that does not read. With more the connection is lost."""
FD_SETSIZE: Final = 1024
"""select(2) takes descriptors below this one. It waits less than a millisecond where poll(2) rounds
up to whole ones."""
_SO_PEERGROUPS: Final = 59  # not in Python's socket module
_GROUPS_BYTES: Final = 1024  # the most Python's getsockopt takes: 256 groups


class Transport(Protocol):
    """What carries the messages of one connection. ``Channel`` is a socket; what is in another
    machine's reach travels in an engine's steps (``client/steps.py``)."""

    @property
    def waits(self) -> bool:
        """Whether ``receive`` can wait for what comes next."""

    @property
    def wants_write(self) -> bool:
        """Whether sent messages still wait in this process."""

    def send(self, message: AnyMessage) -> None:
        """Send ``message`` without waiting. Raises as ``Channel.send``."""

    def receive(self, timeout_s: float) -> list[FromDaemon]:
        """As ``Channel.receive``."""

    def fileno(self) -> int:
        """As ``Channel.fileno``."""

    def close(self) -> None:
        """End it. Idempotent."""

    def drop(self) -> None:
        """Close this process's copy alone."""


class Channel:
    """A client's end of one connection. Not thread-safe; does not survive a fork.

    ``decoder.limit``: the largest payload in bytes, either way.
    """

    waits: Final = True

    def __init__(self, sock: socket.socket) -> None:
        self.decoder = framing.from_daemon()
        self._sock = sock
        self._out = bytearray()
        self._fd: int | None = None

    @classmethod
    def connect(cls, path: str, timeout_s: float) -> Channel:
        """Connect to the daemon listening at ``path``.

        Raises ``Unavailable`` if there is none or its backlog stays full for ``timeout_s``;
        ``ConfigError`` for a path that can never work.
        """
        check_path(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # The kernel's own bound on waiting for room in the backlog; 0 would mean for ever.
            wait = divmod(max(int(timeout_s * 1e6), 1), 1_000_000)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *wait))
            sock.connect(path)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            if isinstance(error, PermissionError):
                do = f"start kvass serve with --allow-uid {os.geteuid()} or --socket-group"
                text = f"not allowed to connect to {path}: {do}"
            else:
                text = f"no daemon at {path}: {error.strerror}"
            raise Unavailable(text) from error
        return cls(sock)

    @property
    def daemon_uid(self) -> int:
        """The user of the process that listened when we connected, as the kernel says."""
        return peer_of(self._sock).uid

    def fileno(self) -> int:
        """For ``poll``; -1 once closed."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether sent messages still wait in this process."""
        return bool(self._out)

    def send(self, message: AnyMessage) -> None:
        """Queue ``message`` and write what the socket takes now; never waits.

        Raises ``UsageError`` for a message above the frame limit (nothing is sent) and
        ``Unavailable`` when the daemon is gone or has not read for 16 MiB.
        """
        frame = framing.encode(message)
        size = len(frame) - framing.HEADER.size
        if size > self.decoder.limit:
            raise UsageError(f"message of {size} bytes: send at most {self.decoder.limit}")
        if len(self._out) + len(frame) > OUT_BYTES:
            raise Unavailable(f"the daemon has not read for {len(self._out)} bytes")
        self._out += frame
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now. Raises ``Unavailable`` when the daemon is gone."""
        while self._out:
            try:
                sent = self._sock.send(self._out)
            except BlockingIOError:
                return
            except OSError as error:
                raise Unavailable(f"the daemon is gone: {error.strerror}") from error
            del self._out[:sent]

    def receive(self, timeout_s: float) -> list[FromDaemon]:
        """The messages that arrive first, or none within ``timeout_s`` (0 polls).

        Queued output goes out meanwhile. Raises ``Unavailable`` at end of stream, ``FrameError``
        for what is no message of a daemon.
        """
        deadline_s, left_s = time.monotonic() + timeout_s, timeout_s
        while True:
            try:
                self.flush()
            except Unavailable:
                self._out.clear()
                if messages := self._read():  # what the daemon said before it closed, such as why
                    return messages
                raise
            if messages := self._read():
                return messages
            if left_s <= 0:
                return []
            self._await(left_s)
            left_s = deadline_s - time.monotonic()

    def take_fd(self) -> int | None:
        """The descriptor that came with the messages so far; the caller owns (closes) it."""
        fd, self._fd = self._fd, None
        return fd

    def close(self) -> None:
        """End it: the daemon sees EOF, even if a forked child holds a copy. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the daemon closed it first
        self.drop()

    def drop(self) -> None:
        """Close this process's copy alone: what a forked child does with its parent's."""
        self._sock.close()
        if (fd := self.take_fd()) is not None:
            os.close(fd)

    def _await(self, timeout_s: float) -> None:
        """Wait until there is something to read, or room for what is queued."""
        fd = self._sock.fileno()
        if timeout_s < 0.001 and fd < FD_SETSIZE:
            select.select([fd], [fd] if self._out else [], [], timeout_s)
        else:
            poll = select.poll()
            poll.register(fd, select.POLLIN | (select.POLLOUT if self._out else 0))
            poll.poll(min(timeout_s, 3600) * 1000)  # a C int; the caller comes again

    def _read(self) -> list[FromDaemon]:
        try:
            data, control, _, _ = self._sock.recvmsg(
                RECEIVE_BYTES, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return []
        except OSError as error:
            raise Unavailable(f"the daemon is gone: {error.strerror}") from error
        for level, kind, payload in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                if self._fd is not None:
                    os.close(self._fd)
                (self._fd,) = struct.unpack("i", payload)
        if not data:
            raise Unavailable("the daemon closed the connection")
        return list(self.decoder.feed(data))


# ---------------------------------------------------------------- the daemon's end


class PeerCredentials(msgspec.Struct, frozen=True):
    """Who connected, as the kernel says (SO_PEERCRED, SO_PEERGROUPS)."""

    pid: int
    uid: int
    groups: frozenset[int]


def peer_of(sock: socket.socket) -> PeerCredentials:
    """The process at the other end of a connected unix socket, as it was when it connected."""
    pid, uid, gid = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    try:
        more = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:  # in more groups than we can ask for: only the first counts
        more = b""
    return PeerCredentials(pid, uid, frozenset([gid, *array.array("I", more)]))


def check_path(path: str) -> None:
    """Raise ``ConfigError`` for a socket path that no kernel would take."""
    raw = os.fsencode(path)
    if not 1 <= len(raw) <= MAX_PATH_BYTES or 0 in raw:
        raise ConfigError(
            f"socket path of {len(raw)} bytes: use 1 to {MAX_PATH_BYTES} bytes, no zero ({path!r})"
        )
