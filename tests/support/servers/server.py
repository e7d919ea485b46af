"""Servers that tests start as processes of their own: start, pause, kill."""

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
    """A server process, started by the constructor. It is ended also if its start fails."""

    def __init__(self) -> None:
        """Start it. A subclass first sets what ``command`` and ``answers`` need."""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()  # nobody else would end it
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
        """The command line."""
        raise NotImplementedError

    def complaints(self) -> int | None:
        """Where its standard error goes, as for ``subprocess``; ``None``: to ours."""
        return None

    def answers(self) -> bool:
        """Whether it serves requests."""
        raise NotImplementedError

    def pause(self, stop: bool) -> None:
        """Stop it (SIGSTOP), or let it continue."""
        assert self._process is not None
        pause(self._process, stop)

    def kill(self) -> None:
        """End it; its data is lost. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=30)
            self._process = None

    def close(self) -> None:
        """End it and remove its files. Idempotent."""
        self.kill()


def pause(process: subprocess.Popen[Any], stop: bool) -> None:
    """Stop all threads of a child (SIGSTOP) and wait for that, or let it continue."""
    process.send_signal(signal.SIGSTOP if stop else signal.SIGCONT)
    if stop:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def free_port(lowest: int, highest: int, beside: int | None = None) -> int:
    """A free TCP port on 127.0.0.1; with ``beside``, the port that much higher is free as well.
    Below 32,768 the system itself gives out none."""
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
