"""A client that was told no socket finds the daemon at the default places, and no stranger's."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvass.client.client import Client
from kvass.errors import ConfigError, Unavailable, UntrustedDaemon
from kvass.messages import Hello, Ping, Pong
from kvass.wire import places
from kvass.wire.channel import Channel
from kvass.wire.places import default_socket
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ScriptedDaemon


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A machine with the default places in ``tmp_path``. The function changes the environment of
    this process to that of a login session, or of a service."""
    own = tmp_path / "user" / str(os.geteuid())
    for folder in (own, tmp_path / "run", tmp_path / "tmp"):
        folder.mkdir(parents=True)
    monkeypatch.setattr(places, "SERVICE_FOLDER", str(tmp_path / "run" / "kvass"))
    monkeypatch.setattr(places, "_LOGIN_FOLDERS", str(tmp_path / "user"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))

    def environment(kind: str) -> None:
        if kind == "login":
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
        else:
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    environment("service")
    return environment


def make_place() -> Path:
    """The daemon's default socket; its folder is there."""
    path = default_socket()
    places.make_folder(path)
    return Path(path)


def test_the_daemon_takes_the_first_place_that_it_may_use(
    machine: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_place() == tmp_path / "run/kvass/kvass.sock"
    machine("login")
    assert make_place() == tmp_path / f"user/{os.geteuid()}/kvass.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "absent"))
    assert make_place() == tmp_path / "run/kvass/kvass.sock"
    monkeypatch.setattr(places, "SERVICE_FOLDER", str(tmp_path / "absent" / "kvass"))
    assert make_place() == tmp_path / f"tmp/kvass-{os.geteuid()}/kvass.sock"
    assert make_place().parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("first", ["daemon", "client"])
@pytest.mark.parametrize("client", ["login", "service"])
@pytest.mark.parametrize("daemon", ["login", "service", "without /run/kvass"])
def test_daemon_and_client_find_each_other(
    machine: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    daemon: str,
    client: str,
    first: str,
) -> None:
    if daemon.startswith("without"):
        monkeypatch.setattr(places, "SERVICE_FOLDER", str(tmp_path / "absent" / "kvass"))
    machine(daemon)
    path = make_place()
    machine(client)
    with Client("") as waiting:
        if first == "client":
            with pytest.raises(Unavailable, match="no daemon at"):
                waiting.call(Ping())
        with ScriptedDaemon(path):
            if first == "daemon":
                waiting.call(Ping())
            assert eventually(lambda: waiting.connected)
            assert waiting.connection is not None
            assert waiting.connection.path == str(path)


def test_a_dead_daemons_socket_hides_no_living_daemon(machine: Callable[[str], None]) -> None:
    machine("login")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(make_place()))
    machine("service")
    with ScriptedDaemon(make_place()), Client("") as client:
        machine("login")
        assert isinstance(client.call(Ping()), Pong)


def test_a_client_follows_its_daemon_to_another_place(machine: Callable[[str], None]) -> None:
    with Client("") as client:
        with ScriptedDaemon(make_place()):
            client.call(Ping())
        machine("login")
        with ScriptedDaemon(path := make_place()):
            assert eventually(
                lambda: client.connection is not None and client.connection.path == str(path)
            )


def test_a_folder_that_may_not_be_looked_into_hides_nothing(
    machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after ``su``, which keeps the other user's ``XDG_RUNTIME_DIR``."""
    connect = Channel.connect

    def refused(path: str, timeout_s: float) -> Channel:
        if path.startswith("/no/entry/"):
            error = PermissionError(13, "Permission denied")
            raise Unavailable(f"not allowed to connect to {path}") from error
        return connect(path, timeout_s)

    monkeypatch.setattr(Channel, "connect", refused)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/entry")
    with Client("") as client, pytest.raises(Unavailable, match="no daemon at /no/entry/") as none:
        client.call(Ping())
    assert isinstance(none.value.__cause__, FileNotFoundError), "so kvass run starts one"


def test_a_strangers_socket_is_refused_with_one_line(
    machine: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SERVICE_FOLDER", str(tmp_path / "absent" / "kvass"))
    stranger = tmp_path / "tmp" / f"kvass-{os.geteuid()}"
    stranger.mkdir(mode=0o777)
    stranger.chmod(0o777)
    with ScriptedDaemon(stranger / "kvass.sock") as theirs:
        with Client("") as client, pytest.raises(ConfigError, match=f"chmod 700 {stranger}$"):
            client.call(Ping())
        machine("login")
        with ScriptedDaemon(make_place()), Client("") as client:
            client.call(Ping())  # it hides no daemon of ours
        stranger.chmod(0o700)  # who listens is looked at, too
        with monkeypatch.context() as patched:
            patched.setattr(Channel, "daemon_uid", 54_321)
            refused = pytest.raises(UntrustedDaemon, match="uid 54321 listens at")
            with Client("") as client, refused:
                client.call(Ping())
        assert theirs.received == []
        with Client("") as client:  # the control: it was the user alone that was wrong
            client.call(Ping())
        assert len(theirs.got(Hello)) == 1
