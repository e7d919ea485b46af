"""The daemon under test as a process, and memory as this machine has it."""

from __future__ import annotations

import mmap
import os
import select
import socket as sockets
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from kvass.arena import memory
from kvass.client.client import Client
from kvass.errors import ConfigError, Unavailable
from kvass.transfer.base import U8Array

READY_TIMEOUT_S: Final = 30.0
POPULATE_TIMEOUT_S: Final = 120.0
TOUCH_BYTES: Final = 256 << 20
SETTLE_S: Final = 0.5
IDLE_S: Final = 4.0


def say(what: str) -> None:
    """Progress, for whoever waits."""
    print(f"measuring {what} ...", file=sys.stderr, flush=True)


class DaemonUnderTest:
    """A daemon that serves at ``socket``; ``ready_s`` from its start to its ready line, if ours."""

    def __init__(self, socket: str, ready_s: float | None) -> None:
        self.socket = socket
        self.ready_s = ready_s
        self.pid = _pid_behind(socket)
        self._proc = Path("/proc") / str(self.pid)

    def wait_populated(self) -> int:
        """Wait until the arena is faulted in; its bytes. Raises ``Unavailable`` if it never is."""
        deadline = time.monotonic() + POPULATE_TIMEOUT_S
        with Client(self.socket) as client:
            while time.monotonic() < deadline:
                status = client.status()
                if status["l1_populated_bytes"] >= status["l1_capacity_bytes"]:
                    return int(status["l1_capacity_bytes"])
                time.sleep(0.1)
        raise Unavailable(f"the arena is not populated after {POPULATE_TIMEOUT_S:.0f} s")

    def rss_mib(self) -> float:
        """Its memory without the arena."""
        kib = status_kib(self._proc)
        return (kib["VmRSS"] - kib["RssShmem"]) / 1024

    def idle_cpu_percent(self) -> float:
        """Of one core, over ``IDLE_S`` in which nobody asks it anything."""
        time.sleep(SETTLE_S)
        began_ns, began_s = self._cpu_ns(), time.monotonic()
        time.sleep(IDLE_S)
        return (self._cpu_ns() - began_ns) / 1e7 / (time.monotonic() - began_s)

    def _cpu_ns(self) -> int:
        """What all its threads ran, in ns: first field of ``schedstat`` (proc(5))."""
        tasks = (self._proc / "task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


@contextmanager
def start_daemon(socket: str | None, l1_bytes: int, *flags: str) -> Iterator[DaemonUnderTest]:
    """The daemon at ``socket``; or a new process with a socket of its own, ended afterwards.

    ``flags``: what a new one is told besides.
    """
    if socket is not None:
        yield DaemonUnderTest(socket, None)
        return
    with tempfile.TemporaryDirectory(prefix="kvass-bench-") as folder:
        path, log = os.path.join(folder, "kvass.sock"), Path(folder, "log")
        command = [sys.executable, "-m", "kvass", "serve", "--socket", path]
        began_s = time.monotonic()
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*command, "--l1-size", str(l1_bytes), *flags],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={k: v for k, v in os.environ.items() if not k.startswith("KVASS_")},
            )
        try:
            _await_ready(process, log)
            yield DaemonUnderTest(path, time.monotonic() - began_s)
        finally:
            process.terminate()
            process.communicate()


def _await_ready(process: subprocess.Popen[str], log: Path) -> None:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], READY_TIMEOUT_S)[0]:
        raise Unavailable(f"the daemon was not ready after {READY_TIMEOUT_S:.0f} s")
    if not process.stdout.readline().startswith("ready"):
        process.wait()
        said = log.read_text().strip().removeprefix("kvass: ")
        raise ConfigError(f"the daemon did not start: {said}")


def _pid_behind(path: str) -> int:
    """The process that listens at ``path`` (SO_PEERCRED)."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as sock:
        try:
            sock.connect(path)
        except OSError as error:
            raise Unavailable(f"no daemon at {path}: {error.strerror}") from error
        cred = sock.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", cred)[0])


def status_kib(proc: Path) -> dict[str, int]:
    """The sizes in ``/proc/<pid>/status``, in KiB."""
    lines = (line.split() for line in (proc / "status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}


def wait_mapped(size: int) -> None:
    """Wait until this process has faulted in ``size`` bytes of shared memory, if it ever does."""
    deadline = time.monotonic() + POPULATE_TIMEOUT_S
    while status_kib(Path("/proc/self"))["RssShmem"] << 10 < size and time.monotonic() < deadline:
        time.sleep(0.05)


def private_memory(size: int) -> U8Array:
    """Anonymous memory at a page boundary, faulted in.

    At a page boundary because a large memcpy between addresses that differ by a little modulo 4 KiB
    runs at a third of its speed on some CPUs, and no ratio should gain by that.
    """
    memory = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[:] = 1
    return memory


def shared_memory(size: int) -> memory.Arena:
    """Memory of the arena's kind, faulted in."""
    arena = memory.create(size)
    arena.advise_huge()
    arena.populate(0, size)
    return arena


def first_touch_gbps() -> float:
    """How fast the kernel hands out shared memory."""
    began_s = time.perf_counter()
    shared_memory(TOUCH_BYTES).close()
    return TOUCH_BYTES / (time.perf_counter() - began_s) / 1e9
