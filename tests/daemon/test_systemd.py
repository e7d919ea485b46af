"""``deploy/kvass.service`` under a real systemd keeps L1 over restarts."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from bench.rows import Rows
from kvass.client.client import Client
from kvass.errors import Unavailable
from tests.daemon.test_lasting import KEYS, ROW, found
from tests.support.systemd_process import user_manager, version
from tests.support.waiting import eventually

DEPLOYED = Path(__file__).parents[2] / "deploy/kvass.service"
ABOUT_RESTARTS = ("Type=", "WatchdogSec=", "Restart", "FileDescriptorStore", "TimeoutStopSec=")


def unit(command: str) -> str:
    """What the unit says of starts and ends; its sandbox needs the system's systemd."""
    lines = [line for line in DEPLOYED.read_text().splitlines() if line.startswith(ABOUT_RESTARTS)]
    assert "FileDescriptorStoreMax=2" in lines
    return "\n".join(["[Service]", *lines, f"ExecStart={command}"])


def adopted(socket: str) -> int | None:
    """How many rows the daemon has adopted; None if there is no daemon."""
    try:
        with Client(socket) as client:
            rows: int = client.status(5.0)["arena"]["adopted_rows"]
            return rows
    except Unavailable:
        return None


def hits(socket: str) -> int:
    with ExitStack() as ending:
        return found(Rows(socket, "mine", ROW, ending))


def test_a_service_keeps_its_rows(tmp_path: Path) -> None:
    socket = str(tmp_path / "kvass.sock")
    serve = f"{sys.executable} -m kvass serve --socket {socket} --l1-size 64MiB --arena systemd"
    with user_manager(tmp_path, unit(serve)) as systemctl:
        systemctl("start", "kvass")
        assert adopted(socket) == 0, systemctl("status", "kvass")
        with ExitStack() as ending:
            Rows(socket, "mine", ROW, ending).store(KEYS)
        systemctl("restart", "kvass")
        assert (adopted(socket), hits(socket)) == (12, 12), "restarted"
        pid = int(systemctl("show", "-p", "MainPID", "--value", "kvass"))
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: adopted(socket) == 12), "killed: systemd starts it again"
        assert hits(socket) == 12
        assert int(systemctl("show", "-p", "NRestarts", "--value", "kvass")) == 1
        assert int(systemctl("show", "-p", "MainPID", "--value", "kvass")) != pid
        systemctl("stop", "kvass")
        systemctl("start", "kvass")
        assert hits(socket) == (12 if version() >= 254 else 0), "stopped and started"
