"""The process of one tier: ``python -m kvass.daemon.tier_host FD ARENA_FD PARENT NAME``.

Law of this file: it lives exactly as long as its daemon wants it. The end of the daemon, however it
comes, ends it at once (``PR_SET_PDEATHSIG``), so that no orphan holds a folder or writes anywhere;
signals that mean the daemon (a terminal's, a service manager's) are the daemon's to heed. What a
tier forks has neither the arena nor a say, or its death would prove nothing (law 3).

Why a process: Python runs one thread at a time. The threads of a busy tier kept the thread that
answers engines waiting: measured on two cores with rows of 1 MiB at full speed, the 99th percentile
of a lookup was 4 ms. And what a library does to its process it does to this one.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvass.arena import memory
from kvass.core.effects import Records, TierProbe
from kvass.daemon.executor import Executor
from kvass.daemon.tier_frames import (
    Down,
    Here,
    Knock,
    NotOpened,
    Opened,
    Start,
    Up,
    encode,
    from_daemon,
)
from kvass.errors import ConfigError
from kvass.tiers.base import Tier
from kvass.tiers.codec import NAMESPACE_BYTES
from kvass.tiers.url import open_tier

DEAF_TO: Final = frozenset({signal.SIGTERM, signal.SIGINT})
CLOSE_S: Final = 2.0
"""How long calls that still run at the end are waited for."""
_READ_BYTES: Final = 256 << 10
_NOBODYS: Final = -1
"""An operation that no core begins."""
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


class Voice:
    """What this process says, from whichever thread, one frame after another."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def say(self, said: Up) -> None:
        """Send it. If the daemon does not listen any more, nobody needs it."""
        frame = encode(said)
        try:
            with self._lock:
                self._sock.sendall(frame)
        except OSError:
            pass


def main(arguments: list[str]) -> int:
    """Serve until the daemon hangs up; the exit status."""
    fd, arena_fd, parent = map(int, arguments[:3])
    _die_with(parent)
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, DEAF_TO)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=lambda: _forked(sock))
    voice, words = Voice(sock), _words(sock)
    start = next(words)
    assert isinstance(start, Start), start
    arena = memory.attach(arena_fd, start.arena_bytes)
    arena.keep_from_forks()
    try:
        tier = _open(start)
    except ConfigError as error:
        voice.say(NotOpened(str(error).encode("ascii", "replace").decode()))
        return 0
    voice.say(Opened())
    executor = Executor(start.number, tier, start.name, arena.buffer, voice.say)
    executor.submit(_greeting(start.number))
    for said in words:
        if isinstance(said, Knock):
            voice.say(Here())
        else:
            assert not isinstance(said, Start), "started twice"
            executor.submit(said)
    if not executor.close(CLOSE_S):  # Python would wait for threads that hang
        logging.shutdown()
        os._exit(0)
    return 0


def _words(sock: socket.socket) -> Iterator[Down]:
    decoder = from_daemon()
    while data := _received(sock):
        yield from decoder.feed(data)


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_READ_BYTES)
    except ConnectionResetError:  # it hung up with words of ours unread
        return b""


def _greeting(number: int) -> TierProbe:
    """A question that nobody waits for, so that a server which is not there, or does not know us,
    is told of at the start and not when an engine comes. The daemon drops the answer, as it does
    all that it did not ask for."""
    absent = Records(bytes(NAMESPACE_BYTES), 0, 0, np.zeros((1, 4), np.uint64))
    return TierProbe(number, _NOBODYS, (absent,))


def _open(start: Start) -> Tier:
    try:
        return open_tier(start.url)
    except OSError as error:
        raise ConfigError(f"tier {start.name}: {error.strerror or error}") from error


def _forked(sock: socket.socket) -> None:
    """In what a tier has forked: the end of our socket is the end of *this* process."""
    sock.close()
    _die_with(os.getppid())


def _die_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
