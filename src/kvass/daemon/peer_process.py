"""The client process of a connection, to detect when that process ends.

Law of this file: the end of the process is never reported too early. A pidfd refers to one process
forever; a pid may be reused for another one. If the kernel gives no pidfd there is no
``PeerProcess``, and the core uses a time bound instead.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
from typing import Final

from kvass import processes
from kvass.core.saved.index_file import SavedIndex

_SO_PEERPIDFD: Final = 77  # Linux 6.5; not in Python's socket module
_log: Final = logging.getLogger("kvass")
_NO_PROCESS: Final = (errno.ESRCH, errno.EINVAL, errno.ENOENT)
"""What pidfd_open says of a pid that no process has. A thread of another process may have it by
now: then it is ``EINVAL``, and ``ENOENT`` of a newer kernel."""


class PeerProcess:
    """The process that connected. Its ``fileno`` becomes readable when the process has ended, that
    is, when its last thread has released its files (``kernel/exit.c: do_exit``)."""

    def __init__(self, pidfd: int, pid: int) -> None:
        self._pidfd = pidfd
        self._pid = pid

    def fileno(self) -> int:
        return self._pidfd

    @property
    def exiting(self) -> bool:
        """Whether the process has ended or is exiting. False also if ``/proc`` does not show it.

        If a connection ended because its process exits, this is already true at its EOF: the kernel
        closes the files of a process only when its last thread is exiting.
        """
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if poll.poll(0):
            return True
        return processes.exiting(self._pid)

    def close(self) -> None:
        os.close(self._pidfd)


def process_behind(sock: socket.socket, pid: int) -> PeerProcess | None:
    """Return the process that connected ``sock``, or None if its end cannot be detected.

    ``pid`` is the one of SO_PEERCRED; 0 for a process of another PID namespace. On an older kernel
    the pid may have been reused. Then another process is watched and the end is reported too late,
    but never too early, because the process that connected has already ended.
    """
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return PeerProcess(int.from_bytes(raw, "little"), pid)
    except OSError:
        pass  # an older kernel, without SO_PEERPIDFD
    try:
        return PeerProcess(os.pidfd_open(pid), pid) if pid > 0 else None
    except OSError:
        return None


def former_processes(index: SavedIndex) -> dict[int, PeerProcess | None]:
    """The processes of a former daemon's engines that may still write to the arena, by number; None
    for one that has ended. The pids of those that cannot be watched are forgotten, so that the core
    uses a time bound: a kernel without pidfds (gVisor, seccomp), no descriptor left, a damaged
    pid."""
    found = dict[int, PeerProcess | None]()
    for former in index.processes.former():
        try:
            if former.pid:
                found[former.number] = former_process(former.pid, former.start)
        except (OSError, OverflowError) as error:
            _log.warning("process %d of an engine cannot be watched: %s", former.pid, error)
            index.processes.forget_pid(former.number)
    return found


def former_process(pid: int, start: int) -> PeerProcess | None:
    """The process ``pid`` that started at ``start`` (``processes.start_time``; 0: unknown), or None
    if it has ended. If its start time cannot be read now, whoever has the pid is watched. Raises
    ``OSError`` or ``OverflowError`` if the process cannot be watched."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_PROCESS:
            return None
        raise
    now = processes.start_time(pid)
    if start and now and now != start:
        os.close(pidfd)
        return None
    return PeerProcess(pidfd, pid)
