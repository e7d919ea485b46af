"""A daemon that systemd started says that it is ready, alive and stopping."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def falls_silent(systemd: socket.socket) -> bool:
    """Nothing comes for half a second."""
    while select.select([systemd], [], [], 0.5)[0]:
        systemd.recv(100)
    return True


@pytest.mark.parametrize("watched", [True, False])
def test_ready_alive_stopping(tmp_path: Path, watched: bool) -> None:
    """``sh`` names its own pid as the one to watch, as systemd does, and becomes the daemon."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        serve = f"{sys.executable} -m kvass serve --l1-size 16MiB --socket {tmp_path}/kvass.sock"
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "100000"}
        pid = "$$" if watched else "1"
        daemon = subprocess.Popen(
            ["sh", "-c", f"WATCHDOG_PID={pid} exec {serve}"],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
        )
        try:
            assert systemd.recv(100) == b"READY=1"
            if watched:
                assert [systemd.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
                daemon.send_signal(signal.SIGSTOP)  # a daemon that hangs falls silent
                assert falls_silent(systemd)
                daemon.send_signal(signal.SIGCONT)
            daemon.send_signal(signal.SIGTERM)
            while (said := systemd.recv(100)) == b"WATCHDOG=1":
                assert watched
            assert said == b"STOPPING=1"
            assert daemon.wait(30) == 0
        finally:
            daemon.kill()
            daemon.wait()
