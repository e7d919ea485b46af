"""The process of one tier: ``python -m kvass.daemon.tier_process.server FD ARENA_FD PARENT NAME``.

Law of this file: the daemon alone decides when this process ends. When the daemon dies, the kernel
kills it (``PR_SET_PDEATHSIG``), so no orphan locks a folder. Signals of a terminal or a service
manager, which are meant for the daemon, do not end it. A process that the tier forks has neither
the arena nor the socket. Otherwise the end of this process would not prove that nobody writes to
the arena (law 3).

A tier has its own process for two reasons: its threads would make the daemon's thread wait for the
GIL, and a library that crashes would crash the daemon (docs/decisions/001-tier-processes.md).
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import numpy as np

from kvass.arena import memory
from kvass.core.effects import Records, TierProbe
from kvass.daemon import logs
from kvass.daemon.tier_process import frames
from kvass.daemon.tier_process.executor import Executor
from kvass.errors import ConfigError
from kvass.tiers.base import Tier
from kvass.tiers.codec import NAMESPACE_BYTES
from kvass.tiers.url import open_tier
from kvass.types import PAGE

IGNORED_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_READ_BYTES: Final = 256 << 10
_POPULATE_NICE: Final = 10
_POPULATE_S: Final = 0.2
"""How often it is asked whether the daemon has populated the next pages."""
_NOBODYS: Final = -1
"""An operation that no core begins."""
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Serve until the daemon hangs up; the exit status."""
    fd, arena_fd, parent = map(int, arguments[:3])
    _end_with(parent)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=lambda: _forked(sock))
    sending = threading.Lock()

    def send(message: frames.FromProcess) -> None:
        """From any thread. If the daemon has hung up, nobody needs it."""
        frame = frames.encode(message)
        with suppress(OSError), sending:
            sock.sendall(frame)

    messages = _received(sock)
    start = next(messages, None)
    if start is None:  # the daemon ended meanwhile
        return 0
    assert isinstance(start, frames.Start), start
    logs.begin("info", start.log_format)
    arena = memory.attach(arena_fd, start.arena_bytes)
    arena.keep_from_forks()
    try:
        tier = _open(start)
    except ConfigError as error:
        send(frames.TierOpened(str(error).encode("ascii", "replace").decode()))
        return 0
    send(frames.TierOpened())
    threading.Thread(target=_populate, args=(arena,), name="kvass-populate", daemon=True).start()
    executor = Executor(start.number, tier, start.name, arena.buffer, send)
    executor.submit(_first_probe(start.number))
    for message in messages:
        if isinstance(message, frames.Heartbeat):
            logs.set_level(message.log_level)
            send(message)
        else:
            assert not isinstance(message, frames.Start), "started twice"
            executor.submit(message)
    if not executor.close(start.close_s):  # Python would wait for threads that hang
        logging.shutdown()
        os._exit(0)
    return 0


def _populate(arena: memory.Arena) -> None:
    """Map what the daemon has populated. A tier would wait for each page that it uses first: on a
    disk of 1.7 GB/s a tenth of the time."""
    os.nice(_POPULATE_NICE)  # Linux: of this thread alone
    for lo in range(0, arena.size, memory.SLICE_BYTES):
        hi = min(lo + memory.SLICE_BYTES, arena.size)
        while not arena.has_page(hi - PAGE):
            time.sleep(_POPULATE_S)
        try:
            arena.populate(lo, hi)
        except OSError:  # no memory for page tables: the rest is mapped as it is used
            return


def _received(sock: socket.socket) -> Iterator[frames.ToProcess]:
    """Through one buffer: with a new one for each read, malloc's heap grows for hours."""
    decoder, data = frames.from_daemon(), memoryview(bytearray(_READ_BYTES))
    with suppress(ConnectionResetError):  # it hung up with messages of ours unread
        while size := sock.recv_into(data):
            yield from decoder.feed(data[:size])


def _first_probe(number: int) -> TierProbe:
    """A question that nobody waits for, so that a server which is not there is reported at the
    start. The daemon drops the answer, as it does all that it did not ask for."""
    absent = Records(bytes(NAMESPACE_BYTES), 0, 0, np.zeros((1, 4), np.uint64))
    return TierProbe(number, _NOBODYS, (absent,))


def _open(start: frames.Start) -> Tier:
    try:
        return open_tier(start.url)
    except OSError as error:
        raise ConfigError(f"tier {start.name}: {error.strerror or error}") from error


def _forked(sock: socket.socket) -> None:
    """In a process that a tier has forked: our socket closes when *this* process ends."""
    sock.close()
    _end_with(os.getppid())


def _end_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
