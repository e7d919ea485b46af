"""The process of one tier: ``python -m kvass.daemon.tier_process.server FD ARENA_FD PARENT NAME``.

Law of this file: the process ends when its daemon ends or closes the socket, and not before. The
kernel kills it when the daemon ends (``PR_SET_PDEATHSIG``), so no orphan keeps a folder locked. It
ignores signals that are meant for the daemon (of a terminal, of a service manager). A process that
the tier forks has neither the arena nor the socket. Otherwise the arena could still be written to
after the end of this process (law 3).

Why a process: the threads of a busy tier would make the daemon's thread wait for the GIL. And a
library that crashes, or changes signals or the environment, affects only this process
(docs/decisions/001-tier-processes.md).
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
from kvass.processes import lower_priority
from kvass.tiers.base import Tier
from kvass.tiers.codec import NAMESPACE_BYTES
from kvass.tiers.url import open_tier, without_seen
from kvass.types import PAGE

IGNORED_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_READ_BYTES: Final = 256 << 10
_POPULATE_NICE: Final = 10
_POPULATE_S: Final = 0.2
"""Seconds between two checks whether the daemon has populated the next pages."""
_UNUSED_OP: Final = -1
"""The number of an operation that the core never uses."""
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    """Serve until the daemon closes the socket. Returns the exit status."""
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
        """Send from any thread. Does nothing if the daemon has closed the socket."""
        frame = frames.encode(message)
        with suppress(OSError), sending:
            sock.sendall(frame)

    messages = _received(sock)
    start = next(messages, None)
    if start is None:  # the daemon ended meanwhile
        return 0
    assert isinstance(start, frames.Start), start
    logs.start_logging("info", start.log_format)
    arena = memory.attach(arena_fd, start.arena_bytes)
    arena.keep_from_forks()
    try:
        tier = _open(start)
    except ConfigError as error:
        send(frames.TierOpened(without_seen(str(error)).encode("ascii", "replace").decode()))
        return 0
    send(frames.TierOpened())
    threading.Thread(target=_populate, args=(arena,), name="kvass-populate", daemon=True).start()
    executor = Executor(start.number, tier, start.name, arena.buffer, send)
    if not executor.check():
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
    """Map the pages that the daemon has populated, so that the tier does not wait for page faults.
    With a disk of 1.7 GB/s these took a tenth of the time."""
    lower_priority(_POPULATE_NICE)
    for lo in range(0, arena.size, memory.SLICE_BYTES):
        hi = min(lo + memory.SLICE_BYTES, arena.size)
        while not arena.has_page(hi - PAGE):
            time.sleep(_POPULATE_S)
        try:
            arena.populate(lo, hi)
        except OSError:  # no memory for page tables: the rest is mapped as it is used
            return


def _received(sock: socket.socket) -> Iterator[frames.ToProcess]:
    """The daemon's messages, until it closes the socket. All reads use one buffer: with a new one
    for each read, malloc's heap grows for hours."""
    decoder, data = frames.from_daemon(), memoryview(bytearray(_READ_BYTES))
    with suppress(ConnectionResetError):  # the daemon closed it before it had read all messages
        while size := sock.recv_into(data):
            yield from decoder.feed(data[:size])


def _first_probe(number: int) -> TierProbe:
    """A probe at the start of a tier that is no ``ProvingTier``, so that a store that is silent is
    reported at once. The daemon drops the answer, because it did not request it."""
    absent = Records(bytes(NAMESPACE_BYTES), 0, 0, np.zeros((1, 4), np.uint64))
    return TierProbe(number, _UNUSED_OP, (absent,))


def _open(start: frames.Start) -> Tier:
    try:
        return open_tier(start.url)
    except OSError as error:
        raise ConfigError(f"tier {start.name}: {error.strerror or error}") from error


def _forked(sock: socket.socket) -> None:
    """Runs in each process that the tier forks. It closes the socket, so that the daemon sees EOF
    when the tier's process ends, and ends the forked process together with its parent."""
    sock.close()
    _end_with(os.getppid())


def _end_with(parent: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
