"""``kvass serve --take-over``: one daemon after the other, on one socket, and nobody between."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.rows import Rows
from kvass.cli.bench.rig import WIDTH
from kvass.client.client import Client
from kvass.errors import Incompatible
from kvass.testing.daemon import Daemon, running_daemon
from tests.daemon.test_process import refused, serve
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ScriptedDaemon


def whole(daemon: Daemon) -> bool:
    """Whether an engine is there with its scheduler and all ranks: else it reserves nothing."""
    engines = daemon.status()["engines"]
    return [(engine["scheduler"], engine["missing_ranks"]) for engine in engines] == [(True, [])]


def test_engines_of_the_former_daemon_are_the_next_ones(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon, ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", 64 << 10, ending)
        rows.store([os.urandom(WIDTH)])
        boot, pid = daemon.boot, daemon.pid
        assert daemon.take_over() == 0
        assert daemon.pid != pid
        assert daemon.boot != boot
        assert eventually(lambda: whole(daemon))
        assert eventually(lambda: rows.scheduler.connected)
        rows.store([os.urandom(WIDTH)])
        assert "the former daemon stopped after" in daemon.log()


def test_without_a_living_daemon_it_just_serves(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        daemon.kill()
        daemon.take_over()
        assert daemon.running
        assert "nothing to take over" in daemon.log()


def test_a_web_port_is_taken_over_too(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with running_daemon(tmp_path, http=address) as first:
        assert first.take_over() == 0
        assert first.running


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (("--socket-group", "no such group"), "no such group"),
        (("--numa", "x"), "give numbers of nodes"),
        (("--numa", "65535"), "the nodes with memory here are"),
        (("--arena", "/dev/shm/no", "--huge-pages", "2MiB"), "not with arena"),
        (("--tier", "disk:/no/such?capacity=1GiB"), "no such folder"),
        (("--tier", "redis:localhost:1?key_file=/no/such"), "cannot be read"),
        (("--http", "127.0.0.1:0", "--http-token-file", "/no/such"), "cannot read token file"),
    ],
)
def test_what_cannot_be_served_does_not_stop_the_daemon(
    tmp_path: Path, wrong: tuple[str, ...], why: str
) -> None:
    with running_daemon(tmp_path) as daemon:
        flags = ("--socket", daemon.socket, "--l1-size", "4MiB", "--take-over")
        assert why in refused(serve(*flags, *wrong))
        assert daemon.running
        assert daemon.status()["boot"] == daemon.boot.hex()


def test_an_older_daemon_is_not_asked_what_it_does_not_know(tmp_path: Path) -> None:
    older = pytest.raises(Incompatible, match="older than --take-over")
    with ScriptedDaemon(tmp_path / "s") as daemon, Client(daemon.path) as client, older:
        client.take_over("", 1.0)
