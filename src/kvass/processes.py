"""What ``/proc`` shows of a process, and the priority of a thread.

Law of this file: what cannot be read is unknown, never a guess; what is refused is left out.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

_PF_EXITING: Final = 0x4  # include/linux/sched.h


def exiting(pid: int) -> bool:
    """Whether the process is exiting, or has ended and is not reaped. False if it is unknown."""
    fields = _stat(pid)
    return len(fields) > 6 and bool(int(fields[6]) & _PF_EXITING)


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since the machine's boot. No two processes of one
    PID namespace have the same pid and the same start time. 0 if it is unknown."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def lower_priority(by: int) -> None:
    """Make the calling thread nicer (on Linux it alone). It goes on as it is if a sandbox refuses
    that."""
    with suppress(OSError):
        os.nice(by)


def _stat(pid: int) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` after the name: ``proc_pid_stat(5)``, from the third on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:  # there is none, or it is of another PID namespace
        return []
