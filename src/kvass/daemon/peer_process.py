"""The process at the other end of a session, as far as its end can be seen.

Law of this file: its answers are about the process that connected, and no other. A pidfd always
refers to the same process; a pid may have been used again. If the kernel has no pidfd for the peer,
there is no ``PeerProcess``, and the core uses a time limit instead.
"""

from __future__ import annotations

import os
import select
import socket
from typing import Final

_SO_PEERPIDFD: Final = 77  # Linux 6.5; not in Python's socket module
_PF_EXITING: Final = 0x4  # include/linux/sched.h


class PeerProcess:
    """The process that opened a connection.

    ``fileno`` becomes readable when the process has ended, that is, when its last thread has
    released its files (``kernel/exit.c: do_exit``).
    """

    def __init__(self, pidfd: int, pid: int) -> None:
        self._pidfd = pidfd
        self._pid = pid

    def fileno(self) -> int:
        return self._pidfd

    @property
    def exiting(self) -> bool:
        """Whether it has ended or is about to. False also where ``/proc`` does not show it.

        If its exit is why a session ended, this is true by then: its files are closed when the last
        of its threads is exiting.
        """
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if poll.poll(0):
            return True
        try:
            with open(f"/proc/{self._pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            return bool(int(fields[6]) & _PF_EXITING)  # proc_pid_stat(5): the 9th, of which 2 went
        except (OSError, IndexError, ValueError):
            return False

    def close(self) -> None:
        os.close(self._pidfd)


def process_behind(sock: socket.socket, pid: int) -> PeerProcess | None:
    """The process that connected ``sock``; None if its end cannot be observed.

    ``pid`` is the one of SO_PEERCRED; 0 for a process of another PID namespace. If another process
    has that pid now, the one that connected has ended. Its end is then reported late, but never
    early.
    """
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return PeerProcess(int.from_bytes(raw, "little"), pid)
    except OSError:
        pass  # an older kernel
    try:
        return PeerProcess(os.pidfd_open(pid), pid) if pid > 0 else None
    except OSError:
        return None
