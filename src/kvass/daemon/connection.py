"""One accepted socket: its decoder, its output queue, and how it is closed.

Laws of this file:

- Only EOF ends reading. asyncio's transports close a socket when a *write* fails, but a peer that
  only stopped reading may still write to the arena (law 3). Therefore this file does not use
  transports. The event loop reports that the socket is readable or writable; ``Connection`` calls
  recv and send itself.
- A closed connection is in no reference cycle, so it is freed at once. The garbage collector runs
  rarely here, and each connection may hold megabytes of input.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Literal

from kvass.core.effects import ConnectionId
from kvass.daemon.peer_process import PeerProcess
from kvass.types import Limits
from kvass.wire import framing

OUT_BYTES: Final = 8 << 20
"""Limit of the bytes that are queued for a peer that does not read: two of the largest frames."""
HELLO_BYTES: Final = 64 << 10
"""The largest frame that a peer may send before the daemon has sent it ``Welcome``."""
LINGER_S: Final = 1.0
"""Seconds that a closing connection waits for its peer to read the queued bytes."""


class Connection:
    """One accepted socket. ``on_readable`` is called when there is something to read."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        number: ConnectionId,
        on_readable: Callable[[Connection], None],
        process: PeerProcess | None = None,
    ) -> None:
        self.number = number
        self.decoder = framing.from_clients(HELLO_BYTES)
        self.process = process
        """The process that connected. None if the daemon cannot detect that it ends."""
        self.ignoring = False
        """The core has ended it, but the peer is still connected: input is dropped until EOF."""
        self._loop = loop
        self._on_readable = on_readable
        self._sock = sock
        self._out = bytearray()
        self._fd: int | None = None
        """A descriptor to send with the first byte of ``_out``."""
        self._mute = False
        self._awaiting_room = False
        self._after_flush: Literal["go on", "shut down", "close"] = "go on"
        """What to do when the output queue is empty."""
        self._linger: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self.resume()

    def read_into(self, scratch: memoryview) -> int | None:
        """Read once into ``scratch``. Returns the number of bytes, 0 at EOF, or None if there was
        nothing to read."""
        try:
            return self._sock.recv_into(scratch)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # the peer closed the socket before it had read all replies
            return 0

    def pause(self) -> None:
        """Read nothing until ``resume``."""
        self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        self._loop.add_reader(self._sock, self._on_readable, self)

    def queue(self, frame: bytes, fd: int | None = None) -> None:
        """Queue ``frame`` for the next ``flush``. ``fd`` is sent with it; it may only be passed
        while nothing else is queued."""
        if self._mute or self._after_flush != "go on":
            return
        if fd is not None:
            assert not self._out, "a descriptor would go with another frame"
            self._fd = fd
        self._out += frame

    def flush(self) -> bool:
        """Send what the socket takes now. Returns False if more than ``OUT_BYTES`` stay queued."""
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
        except OSError:  # the peer stopped reading; only EOF shows that it also stopped writing
            self.mute()
            return True
        self._await_room(False)
        self._flushed()
        return True

    @property
    def unsent(self) -> int:
        return len(self._out)

    def mute(self) -> None:
        """Drop the queued bytes, and all that is queued later."""
        self._mute = True
        self._out.clear()
        self._await_room(False)
        self._flushed()

    def allow_large_frames(self) -> None:
        """Accept frames of up to ``Limits.frame_bytes``. Called when ``Welcome`` is sent."""
        self.decoder.limit = Limits().frame_bytes

    def half_close(self) -> None:
        """Shut down writing once the queue is sent. Input is dropped until EOF."""
        self.ignoring = True
        self._forget_input()
        self._after_flush = "shut down"
        self.flush()

    def close(self) -> None:
        """Close the socket once the queue is sent, or after ``LINGER_S``."""
        self._loop.remove_reader(self._sock)
        self._forget_input()
        self._after_flush = "close"
        self._linger = self._loop.call_later(LINGER_S, self.close_now)
        self.flush()

    def take_process(self) -> PeerProcess | None:
        """Return ``process`` and forget it. The caller must close it."""
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
        """Free the decoder's input: part of a frame, up to 4 MiB, that is not decoded any more."""
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
        except OSError:  # the peer has closed its end: EOF follows
            pass
