"""``deploy/kvass.service``, in the sandbox that it describes: it serves engines, and keeps L1 over
restarts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.support import systemd_process
from tests.support.systemd_process import ENGINE, Systemd, system_manager
from tests.support.waiting import eventually

DEPLOYED: Final = Path(__file__).parents[2] / "deploy/kvass.service"
SOCKET: Final = "/run/kvass/kvass.sock"
KVASS: Final = "/opt/kvass/bin/kvass"


def rows(systemd: Systemd, *do: str) -> str:
    """How many rows another engine finds."""
    module = ["env", "MODULE=tests.support.stored_rows", KVASS, SOCKET]
    return systemd.run(*module, *do, user=ENGINE)


def shown(systemd: Systemd, name: str) -> int:
    return int(systemd.ctl("show", "-p", name, "--value", "kvass"))


def test_the_service_serves_engines_and_keeps_its_rows(tmp_path: Path) -> None:
    """All of the unit but L1's place and size."""
    unit = DEPLOYED.read_text()
    (serve,) = re.findall("^ExecStart=(.+)$", unit, re.M)
    assert serve.startswith(f"{KVASS} serve --socket {SOCKET} ")
    drop_in = f"[Service]\nExecStart=\nExecStart={serve} --l1-size 64MiB --arena /dev/shm/kvass\n"
    with system_manager(tmp_path, unit, drop_in) as systemd:
        said = systemd.ctl("start", "kvass")
        checked = systemd.run(KVASS, "status", "--check", "--socket", SOCKET, user=ENGINE)
        assert checked == "ok", said + systemd.ctl("status", "kvass")
        pid = shown(systemd, "MainPID")
        assert systemd.run("stat", "-c", "%U %a", SOCKET, f"/proc/{pid}") == "kvass 660\nkvass 555"
        assert rows(systemd, "store") == "12"
        systemd.ctl("restart", "kvass")
        assert rows(systemd) == "12", "restarted"
        pid = shown(systemd, "MainPID")
        systemd.run("kill", "-KILL", str(pid))
        assert eventually(lambda: rows(systemd) == "12"), "killed: systemd starts it again"
        assert shown(systemd, "NRestarts") == 1
        assert shown(systemd, "MainPID") != pid
        systemd.ctl("stop", "kvass")
        systemd.ctl("start", "kvass")
        assert rows(systemd) == "12", "stopped and started"


def test_a_sandbox_that_does_not_run_is_no_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd_process, "_WITHIN", "echo no such mount >&2; exit 32")
    with (
        pytest.raises(pytest.fail.Exception, match="no such mount"),
        system_manager(tmp_path, "", ""),
    ):
        pass


def test_namespaces_that_the_kernel_refuses_are_a_skip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "unshare: unshare failed: Operation not permitted"
    monkeypatch.setattr(systemd_process, "_UNSHARE", "false")
    assert systemd_process._refused() == "", "another failure"
    (tmp_path / "unshare").write_text(f"#!/bin/sh\necho {said} >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setattr(systemd_process, "_UNSHARE", str(tmp_path / "unshare"))
    assert systemd_process._refused() == said
