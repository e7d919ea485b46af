"""What a daemon takes while nobody asks it anything, what fresh shared memory costs, cold files."""

from __future__ import annotations

import os
import socket as sockets
import struct
import time
from pathlib import Path
from typing import Final

from kvass.cli.bench.rig import shared_memory
from kvass.errors import Unavailable

TOUCH_BYTES: Final = 256 << 20
SETTLE_S: Final = 0.5
IDLE_S: Final = 4.0


def measure_footprint(socket: str) -> dict[str, float]:
    """``daemon_rss_mib`` and ``daemon_idle_cpu_percent`` of the daemon at ``socket``. Raises
    ``Unavailable``."""
    pid = pid_behind(socket)
    kib = status_kib(Path("/proc") / str(pid))
    time.sleep(SETTLE_S)
    began_ns, began_s = cpu_ns(pid), time.monotonic()
    time.sleep(IDLE_S)
    return {
        "daemon_rss_mib": (kib["VmRSS"] - kib["RssShmem"]) / 1024,
        "daemon_idle_cpu_percent": (cpu_ns(pid) - began_ns) / 1e7 / (time.monotonic() - began_s),
    }


def cpu_ns(pid: int) -> int:
    """What a process ran, in ns, with threads that have ended (clock_getcpuclockid(3))."""
    return time.clock_gettime_ns(~pid << 3 | 2)


def status_kib(proc: Path) -> dict[str, int]:
    """The sizes in ``/proc/<pid>/status``, in KiB."""
    lines = (line.split() for line in (proc / "status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}


def pid_behind(path: str) -> int:
    """The process that listens at ``path`` (SO_PEERCRED). Raises ``Unavailable``."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
        except OSError as error:
            raise Unavailable(f"no daemon at {path}: {error.strerror}") from error
        cred = sock.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", cred)[0])


def first_touch_gbps() -> float:
    """How fast the kernel hands out shared memory."""
    began_s = time.perf_counter()
    shared_memory(TOUCH_BYTES).close()
    return TOUCH_BYTES / (time.perf_counter() - began_s) / 1e9


def sync(folder: Path, pattern: str = "*", *, drop: bool = False) -> None:
    """The folder's files are on disk afterwards, and with ``drop`` not in memory."""
    for path in folder.rglob(pattern):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                if drop:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
