"""What all servers of a test's own have in common.

Law of this file: a process that is ended by its pid, whatever becomes of its start.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WAIT_S = 60.0


class Server:
    """``start`` it (again, empty), ``pause`` it, ``kill`` it, ``close`` what it had."""

    def __init__(self) -> None:
        """Start it. What its methods need has to be there before."""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()  # or nobody would end it
            raise

    def start(self) -> None:
        """Start it (again), empty, and wait until it answers."""
        silent = subprocess.DEVNULL
        self._process = subprocess.Popen(self.command(), stdout=silent, stderr=self.complaints())
        end = time.monotonic() + WAIT_S
        while not self.answers():
            assert self._process.poll() is None, "the server ended"
            assert time.monotonic() < end, "the server never came up"
            time.sleep(0.02)

    def command(self) -> Sequence[str | Path]:
        """What to run."""
        raise NotImplementedError

    def complaints(self) -> int | None:
        """Where its standard error goes; ``None``: where ours does."""
        return None

    def answers(self) -> bool:
        """Whether it serves."""
        raise NotImplementedError

    def pause(self, stop: bool) -> None:
        """Make it answer nothing, or go on."""
        assert self._process is not None
        pause(self._process, stop)

    def kill(self) -> None:
        """End it, and all it had."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)
            self._process = None

    def close(self) -> None:
        """End it, and leave nothing."""
        self.kill()


def pause(process: subprocess.Popen[Any], stop: bool) -> None:
    """Make a child stand still, all its threads, or go on."""
    process.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)
    if stop:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def free_port(lowest: int, highest: int, beside: int | None = None) -> int:
    """A port of this machine's own address, and another ``beside`` it, that nobody listens on. Not
    one of those that the system hands out by itself, if ``highest`` is below 32,768."""
    while True:
        port = random.randrange(lowest, highest)
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                if beside is not None:
                    other.bind(("127.0.0.1", port + beside))
            except OSError:
                continue
        return port
