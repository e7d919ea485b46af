"""One accepted connection: its socket, its decoder and its queue of unsent frames.

Laws of this file:

- Only EOF ends reading. asyncio's transports close a socket when a *write* fails. But a peer that
  only stopped reading may still write to the arena (law 3). So this file does not use a transport:
  the loop reports when the socket is readable or writable, and this file reads and writes.
- A closed connection is freed at once, because no object that it refers to refers back to it. The
  garbage collector runs rarely here, and a connection may hold megabytes of received bytes.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Literal

from kvass.core.effects import SessionId
from kvass.daemon.peer_process import PeerProcess
from kvass.types import Limits
from kvass.wire import framing

OUT_BYTES: Final = 8 << 20
"""Unread replies a session may pile up: two of the largest frames."""
HELLO_BYTES: Final = 64 << 10
"""The largest frame of a session that was not welcomed yet."""
LINGER_S: Final = 1.0
"""How long what is unsent may wait for its reader when a session is closed."""


class Connection:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        session: SessionId,
        on_readable: Callable[[Connection], None],
        process: PeerProcess | None = None,
    ) -> None:
        self.session = session
        self.decoder = framing.from_clients(HELLO_BYTES)
        self.process = process
        """Who connected, if its end can be seen."""
        self.ignoring = False
        """Ended but still connected: what arrives is dropped until EOF."""
        self._loop = loop
        self._sock = sock
        self._out = bytearray()
        self._fd: int | None = None
        """To be sent beside the first byte of ``_out``."""
        self._mute = False
        self._awaiting_room = False
        self._after_flush: Literal["go on", "shut down", "close"] = "go on"
        """What follows when nothing is unsent any more."""
        self._linger: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        loop.add_reader(sock, on_readable, self)

    def read_into(self, scratch: memoryview) -> int | None:
        """Bytes read; 0 at EOF; None if there was nothing after all."""
        try:
            return self._sock.recv_into(scratch)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # closed, with words of ours unread
            return 0

    def queue(self, frame: bytes, fd: int | None = None) -> None:
        """Have ``frame`` go out at the next flush, ``fd`` with it: only with a first frame."""
        if self._mute or self._after_flush != "go on":
            return
        if fd is not None:
            assert not self._out, "a descriptor would go with another frame"
            self._fd = fd
        self._out += frame

    def flush(self) -> bool:
        """Send what the socket takes now; False if the peer has left too much unread."""
        try:
            while self._out:
                if self._fd is not None:
                    sent, self._fd = socket.send_fds(self._sock, [self._out], [self._fd]), None
                else:
                    sent = self._sock.send(self._out)
                del self._out[:sent]
        except BlockingIOError:
            self._await_room(True)
            return self.unsent <= OUT_BYTES
        except OSError:  # it stopped reading; whether it also stopped writing, EOF will tell
            self.mute()
            return True
        self._await_room(False)
        self._flushed()
        return True

    @property
    def unsent(self) -> int:
        return len(self._out)

    def mute(self) -> None:
        """Drop what is unsent and all that would follow."""
        self._mute = True
        self._out.clear()
        self._await_room(False)
        self._flushed()

    def welcomed(self) -> None:
        """From now on frames may be as large as the daemon's limits say."""
        self.decoder.limit = Limits().frame_bytes

    def half_close(self) -> None:
        """Say no more after what is queued, and listen for nothing but EOF."""
        self.ignoring = True
        self._forget_input()
        self._after_flush = "shut down"
        self.flush()

    def close(self) -> None:
        """Close once what is queued went out, or after ``LINGER_S``."""
        self._loop.remove_reader(self._sock)
        self._forget_input()
        self._after_flush = "close"
        self._linger = self._loop.call_later(LINGER_S, self.close_now)
        self.flush()

    def take_process(self) -> PeerProcess | None:
        """``process``, which the caller closes from now on."""
        process, self.process = self.process, None
        return process

    def close_now(self) -> None:
        if (process := self.take_process()) is not None:
            process.close()
        if self._linger is not None:
            self._linger.cancel()
        if self._sock.fileno() >= 0:
            self._await_room(False)
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _await_room(self, wanted: bool) -> None:
        if wanted and not self._awaiting_room:
            self._loop.add_writer(self._sock, self.flush)
        elif self._awaiting_room and not wanted:
            self._loop.remove_writer(self._sock)
        self._awaiting_room = wanted

    def _forget_input(self) -> None:
        """Part of a frame, up to 4 MiB, that nobody will decode."""
        self.decoder = framing.from_clients()

    def _flushed(self) -> None:
        if self._after_flush == "close":
            self.close_now()
        elif self._after_flush == "shut down":
            self._shut_down()

    def _shut_down(self) -> None:
        self._after_flush = "go on"
        self._mute = True
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:  # it hung up first: EOF is on its way
            pass
