"""The unix socket: ``Channel`` for a client, and functions for the daemon's own sockets.

Law of this file: bytes, descriptors and credentials; nothing here knows what a message means.
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
from typing import Final

import msgspec

from kvass.errors import ConfigError, Unavailable, UsageError
from kvass.messages import FromDaemon, Message
from kvass.wire import framing

MAX_PATH_BYTES: Final = 107
"""``sun_path`` less its closing zero."""
RECEIVE_BYTES: Final = 256 << 10
OUT_BYTES: Final = 16 << 20
"""What a client holds for a daemon that does not read; more than that is a broken connection."""
_SO_PEERGROUPS: Final = 59  # not in Python's socket module
_GROUPS_BYTES: Final = 1024  # the most Python's getsockopt takes: 256 groups


class Channel:
    """A client's end of one session. Not thread-safe; does not survive a fork."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = framing.from_daemon()
        self._out = bytearray()
        self._fd: int | None = None
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

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
            raise Unavailable(f"no daemon at {path}: {error.strerror}") from error
        return cls(sock)

    def fileno(self) -> int:
        """For ``poll``; -1 once closed."""
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether sent messages still wait in this process."""
        return bool(self._out)

    def limit_frames(self, frame_bytes: int) -> None:
        """Adopt the frame limit the daemon told in its ``Welcome``."""
        self._decoder.limit = frame_bytes

    def send(self, message: Message) -> None:
        """Queue ``message`` and write what the socket takes now; never waits.

        Raises ``UsageError`` for a message above the frame limit (nothing is sent) and
        ``Unavailable`` when the daemon is gone or has not read for 16 MiB.
        """
        frame = framing.encode(message)
        size = len(frame) - framing.HEADER.size
        if size > self._decoder.limit:
            raise UsageError(f"message of {size} bytes: send at most {self._decoder.limit}")
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
        if timeout_s <= 0:  # the socket does not block: reading is asking
            self.flush()
            return self._read()
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            if self._await(left_s) and (messages := self._read()):
                return messages
            if time.monotonic() >= deadline:
                return []

    def take_fd(self) -> int | None:
        """The descriptor that came with the messages so far; the caller owns (closes) it."""
        fd, self._fd = self._fd, None
        return fd

    def close(self) -> None:
        """End the session: the daemon sees EOF, even if a forked child holds a copy. Idempotent."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the daemon closed it first
        self.drop()

    def drop(self) -> None:
        """Close this process's copy alone: what a forked child does with its parent's session."""
        self._sock.close()
        if (fd := self.take_fd()) is not None:
            os.close(fd)

    def _await(self, timeout_s: float) -> bool:
        """Wait until there is something to read, writing meanwhile."""
        if self._out:
            self.flush()
        self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
        ready = self._poll.poll(-(-timeout_s * 1000 // 1))  # rounded up: 0 means poll
        if not ready:
            return False
        if ready[0][1] & select.POLLOUT:
            self.flush()
        return bool(ready[0][1] & ~select.POLLOUT)

    def _read(self) -> list[FromDaemon]:
        try:
            data, control, _, _ = self._sock.recvmsg(
                RECEIVE_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return []
        except OSError as error:
            raise Unavailable(f"the daemon is gone: {error.strerror}") from error
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._keep_fd(payload)
        if not data:
            raise Unavailable("the daemon closed the connection")
        return list(self._decoder.feed(data))

    def _keep_fd(self, payload: bytes) -> None:
        fds = array.array("i", payload[: len(payload) - len(payload) % 4])
        for fd in fds:
            if self._fd is not None:
                os.close(self._fd)
            self._fd = fd


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


def send_with_fd(sock: socket.socket, data: bytes | bytearray, fd: int) -> int:
    """Send ``data`` with ``fd`` beside its first byte; how many bytes went out, as ``send``."""
    return socket.send_fds(sock, [data], [fd])


def check_path(path: str) -> None:
    """Raise ``ConfigError`` for a socket path that no kernel would take."""
    raw = os.fsencode(path)
    if not 1 <= len(raw) <= MAX_PATH_BYTES or 0 in raw:
        raise ConfigError(
            f"socket path of {len(raw)} bytes: use 1 to {MAX_PATH_BYTES} bytes, no zero ({path!r})"
        )
