"""What ``/proc`` shows of a process.

Law of this file: what cannot be read is unknown, never a guess.
"""

from __future__ import annotations

from typing import Final

_PF_EXITING: Final = 0x4  # include/linux/sched.h


def exiting(pid: int) -> bool:
    """Whether the process is exiting, or has ended and is not reaped. False if it is unknown."""
    fields = _stat(pid)
    return len(fields) > 6 and bool(int(fields[6]) & _PF_EXITING)


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since the machine's boot. No two processes have the
    same pid and the same start time. 0 if it is unknown."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def _stat(pid: int) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` after the name: ``proc_pid_stat(5)``, from the third on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:  # there is none, or it is of another PID namespace
        return []
