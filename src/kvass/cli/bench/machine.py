"""The daemon under test as a process, memory as this machine has it, and clocks."""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
PATIENCE_S: Final = 30.0


def say(what: str) -> None:
    """Progress, for whoever waits."""
    print(f"measuring {what} ...", file=sys.stderr, flush=True)


def seconds(step: Callable[[], object]) -> float:
    """How long ``step`` took."""
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s


def wait_for(true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Ask until it is so. Raises ``Unavailable`` after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > deadline:
            raise Unavailable(f"waited {patience_s:.0f} s in vain for {what}")
        time.sleep(0.01)


class MeasuredDaemon:
    """A daemon that serves at ``socket``; ``ready_s`` from its start to its ready line, if ours."""

    def __init__(self, socket: str, ready_s: float | None) -> None:
        self.socket = socket
        self.ready_s = ready_s

    def wait_populated(self) -> int:
        """Wait until the arena is faulted in; its bytes. Raises ``Unavailable`` if it never is."""

        def populated() -> bool:
            status.update(client.status())
            return bool(status["l1_populated_bytes"] >= status["l1_capacity_bytes"])

        status: dict[str, int] = {}
        with Client(self.socket) as client:
            wait_for(populated, "the arena to be populated", POPULATE_TIMEOUT_S)
        return status["l1_capacity_bytes"]


@contextmanager
def start_daemon(socket: str | None, l1_bytes: int, *flags: str) -> Iterator[MeasuredDaemon]:
    """The daemon at ``socket``; or a new process with a socket of its own, ended afterwards.

    ``flags``: what a new one is told besides. Raises ``ConfigError`` if it does not start.
    """
    if socket is not None:
        yield MeasuredDaemon(socket, None)
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
            yield MeasuredDaemon(path, time.monotonic() - began_s)
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
    private = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    private[:] = 1
    return private


def shared_memory(size: int) -> memory.Arena:
    """Memory of the arena's kind, faulted in."""
    arena = memory.create(size)
    arena.advise_huge()
    arena.populate(0, size)
    return arena
