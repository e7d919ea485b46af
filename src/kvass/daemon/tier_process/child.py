"""One process of a tier, and the daemon's end of the socket to it.

Law of this file: a process counts as dead when it was reaped, and not before (law 3). Losing its
socket only shows that it is of no use any more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Final, Self

from kvass.daemon.tier_process.frames import (
    FromProcess,
    Start,
    ToProcess,
    encode,
    from_process,
)
from kvass.daemon.tier_process.server import IGNORED_SIGNALS
from kvass.errors import FrameError

_REAP_S: Final = 0.01


class Child(asyncio.Protocol):
    """A process that runs ``server``. Make it with ``start``.

    ``hear`` is called with its messages, but for the first one.
    """

    _transport: asyncio.Transport

    def __init__(
        self, process: subprocess.Popen[bytes], hear: Callable[[FromProcess], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.first: asyncio.Future[FromProcess | None] = self._loop.create_future()
        """Its first message: ``TierOpened`` or ``TierNotOpened``. None: it hung up before that."""
        self.hung_up = asyncio.Event()
        self._process = process
        self._hear = hear
        self._decoder = from_process()
        self._out = bytearray()

    @classmethod
    async def start(cls, start: Start, arena_fd: int, hear: Callable[[FromProcess], None]) -> Self:
        """Start a process over the arena behind ``arena_fd``. Raises ``OSError``."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = cls(_spawn(theirs.fileno(), arena_fd, start.name), hear)
            except OSError:
                ours.close()
                raise
        child._transport, _ = await child._loop.create_connection(lambda: child, sock=ours)
        child.send(start)
        return child

    def send(self, message: ToProcess) -> None:
        """Have it sent, at the end of this turn of the loop, with what else is said in it."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += encode(message)

    def hang_up(self) -> None:
        """Close the socket: what is unsent is dropped, and the process ends what it is at."""
        self._transport.abort()

    async def reaped(self, within_s: float) -> str:
        """Return how it ended. If it has not ``within_s``, it is killed."""
        kill_at = self._loop.time() + within_s
        while (status := self._process.poll()) is None:
            if self._loop.time() >= kill_at:
                self._process.kill()
            await asyncio.sleep(_REAP_S)
        if status >= 0:
            return f"its process ended with status {status}"
        try:
            return f"its process was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"its process was ended by signal {-status}"

    def _flush(self) -> None:
        out, self._out = self._out, bytearray()
        if not self._transport.is_closing():
            self._transport.write(out)

    def data_received(self, data: bytes) -> None:
        """Of ``asyncio.Protocol``."""
        try:
            for message in self._decoder.feed(data):
                if self.first.done():
                    self._hear(message)
                else:
                    self.first.set_result(message)
        except FrameError:
            self.hang_up()

    def connection_lost(self, _: Exception | None) -> None:
        """Of ``asyncio.Protocol``."""
        self.hung_up.set()
        if not self.first.done():
            self.first.set_result(None)


def _spawn(fd: int, arena_fd: int, name: str) -> subprocess.Popen[bytes]:
    """``name`` is for those who list processes."""
    program = [sys.executable, "-P", "-m", "kvass.daemon.tier_process.server"]
    where = [os.path.abspath(path) for path in sys.path]
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVASS_")}  # secrets
    # Blocked until the process ignores them: they are meant for the daemon.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        return subprocess.Popen(
            [*program, str(fd), str(arena_fd), str(os.getpid()), name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(fd, arena_fd),
            env={**env, "PYTHONPATH": os.pathsep.join(where)},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
