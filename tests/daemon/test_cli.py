"""``kvass``: what each command prints, and one line and an exit status for what goes wrong."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvass._version import __version__
from kvass.cli import bench
from kvass.cli.bench.lookups import LAYOUT
from kvass.cli.bench.rig import EngineConnections
from kvass.cli.doctor import machine
from kvass.cli.doctor.devices import DeviceReport
from kvass.cli.main import COMMANDS, main
from kvass.config import load
from kvass.testing.daemon import Daemon
from kvass.web.server import WebServer
from kvass.wire.channel import Channel

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _no_kvass_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("KVASS_"):
            monkeypatch.delenv(name)


def test_socket_from_the_environment(
    daemon: Daemon, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASS_SOCKET", daemon.socket)
    assert main(["status"]) == 0
    assert "engines  none connected" in capsys.readouterr().out


ASKING = [
    ["status", "--check"],
    ["top", "--times", "1"],
    ["clear"],
    ["quota", "--remove", "x"],
    ["doctor"],
    ["web"],
    ["bench", "--rounds", "1"],
]


@pytest.mark.parametrize("by", ["flag", "environment"])
@pytest.mark.parametrize("argv", ASKING, ids=lambda argv: str(argv[0]))
def test_a_command_believes_the_user_that_was_named(
    argv: list[str], by: str, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """All sockets are taken to be of a user to whom their files do not belong."""
    monkeypatch.setattr(Channel, "daemon_uid", 54_321)
    monkeypatch.setattr(bench, "MIN_ROUNDS", 1)
    asked: list[str] = []

    def serve(server: WebServer) -> None:
        asked.append(server.source.status()[1])
        server.server_close()
        server.source.client.close()

    monkeypatch.setattr(WebServer, "run", serve)
    monkeypatch.setattr(bench, "measure_copies", _connect)
    monkeypatch.setattr(bench, "measure_lookups", _connect)
    monkeypatch.setattr(machine, "ask_torch", DeviceReport)  # an import of torch takes seconds
    argv = [*argv, "--socket", daemon.socket, *(["--http", "127.0.0.1:0"] * (argv == ["web"]))]
    main(argv)
    assert "--daemon-uid 54321" in "".join([*capsys.readouterr(), *asked]), "the control"
    asked.clear()
    if by == "flag":
        argv += ["--daemon-uid", "54321"]
    else:
        monkeypatch.setenv("KVASS_DAEMON_UID", "54321")
    main(argv)
    assert "54321" not in "".join([*capsys.readouterr(), *asked])


def _connect(socket: str, *_: object, **how: Any) -> dict[str, Any]:
    """In the place of a measurement."""
    with ExitStack() as ending:
        EngineConnections(socket, (LAYOUT,), ending, daemon_uid=how["daemon_uid"])
    return {"bytes_equal": True}


def test_a_command_refuses_a_user_that_is_none(capsys: Captured) -> None:
    assert main(["status", "--daemon-uid", "no such user"]) == 2
    said = "kvass: --daemon-uid: there is no user 'no such user' here: give the id\n"
    assert capsys.readouterr().err == said
    assert main(["status", "--daemon-uid", "-1"]) == 2
    assert capsys.readouterr().err == "kvass: --daemon-uid: Expected `int` >= 0 (got '-1')\n"
    assert main(["bench", "--daemon-uid", "7"]) == 2


@pytest.mark.parametrize("command", ["status", "clear"])
def test_no_daemon(command: str, tmp_path: Path, capsys: Captured) -> None:
    path = str(tmp_path / "none")
    assert main([command, "--socket", path]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"kvass: no daemon at {path}")


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["status", "--nonsense"], ["serve", "--l1-size"], ["--socket", "x"]]
)
def test_wrong_use_is_one_line(argv: list[str], capsys: Captured) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "--help" in err


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help(argv: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 0
    assert "usage: kvass" in capsys.readouterr().out


def test_version(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"kvass {__version__}\n"


def test_print_config_shows_no_secret_and_is_a_config(capsys: Captured, tmp_path: Path) -> None:
    flags = ["--tier", "redis:h:6379?password=hunter2&db=1", "--tier", "disk:/d?capacity=1GiB"]
    assert main(["serve", "--print-config", *flags]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert "redis:h:6379?password=***&db=1\n" in out
    assert out.startswith("# Secrets are hidden")
    file = tmp_path / "kvass.yaml"
    file.write_text(out.replace("***", "hunter2"))
    assert load({}, {}, str(file)).tier == flags[1::2]
    assert main(["serve", "--print-config", *flags[2:]]) == 0
    assert not capsys.readouterr().out.startswith("#")


@pytest.mark.parametrize("tier", ["disk:/tmp/\udcff?capacity=1GiB", "no.such\udcff:Tier"])
def test_a_tier_that_is_no_text_is_one_line(capsys: Captured, tier: str) -> None:
    """What the shell hands on as it is: bytes that are no UTF-8."""
    assert main(["serve", "--print-config", "--tier", tier]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert "UTF-8" in said


def test_mistakes_show_no_secret(capsys: Captured, tmp_path: Path) -> None:
    url = "redis:h?password=hunter2"
    file = tmp_path / "kvass.yaml"
    file.write_text(f"tier: [{url}, ]: oops\n")
    beside = ["--tier", "redis:h?password=a", "hunter2"]
    for wrong in (["--teir", url], ["--config", str(file)], ["--stop-s", url], beside):
        assert main(["serve", "--print-config", *wrong]) == 2
        said = capsys.readouterr()
        assert "hunter2" not in said.out + said.err
        says = ("arguments: --teir;", "line 1, column ", "got 'redis:h?password=***", "no options;")
        assert any(one in said.err for one in says)
