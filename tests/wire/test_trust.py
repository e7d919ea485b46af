"""Who listens at a path is believed only if nobody else can have put a socket there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvass.client.client import Client
from kvass.client.scheduler import SchedulerClient
from kvass.errors import UntrustedDaemon
from kvass.messages import Ping, Register
from kvass.wire import trust
from kvass.wire.trust import check_daemon
from tests.support.waiting import eventually

THEIRS = 54_321
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")


@pytest.fixture
def safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A socket of user ``THEIRS`` in a folder of theirs. The folders above are taken to be root's:
    pytest makes them in a folder that everybody may write to."""
    folder = tmp_path / "safe"
    folder.mkdir(mode=0o755)
    path = folder / "kvass.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    for one in (path, folder):
        os.chown(one, THEIRS, THEIRS)
    inside: Callable[[str], Iterator[str]] = trust._folders
    monkeypatch.setattr(
        trust, "_folders", lambda at: (f for f in inside(at) if f.startswith(str(tmp_path)))
    )
    return path


def reason(path: Path | str) -> str:
    """Why user ``THEIRS`` is not believed there."""
    with pytest.raises(UntrustedDaemon) as raised:
        check_daemon(str(path), THEIRS)
    said = str(raised.value)
    assert said.startswith(f"uid {THEIRS} listens at {path}, and may be a stranger: ")
    assert f"kvass.daemon_uid {THEIRS}" in said
    return said


def test_root_and_our_own_user_are_believed_wherever_they_listen() -> None:
    check_daemon("/tmp/anywhere", 0)
    check_daemon("/tmp/anywhere", os.geteuid())


def test_a_user_that_was_named_is_believed_and_no_other() -> None:
    check_daemon("/tmp/anywhere", THEIRS, THEIRS)
    with pytest.raises(UntrustedDaemon, match=r"uid 54321 listens at /x: it has to be uid 7 "):
        check_daemon("/x", THEIRS, 7)


@root
def test_the_owner_of_the_socket_and_of_its_folders_is_believed(safe: Path) -> None:
    check_daemon(str(safe), THEIRS)
    os.chown(safe.parent, 0, 0)
    check_daemon(str(safe), THEIRS)


@root
def test_a_socket_that_is_another_users_is_not(safe: Path) -> None:
    os.chown(safe, THEIRS + 1, THEIRS)
    assert "the socket's file belongs to uid 54322" in reason(safe)


@root
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
def test_a_folder_that_others_may_write_to_is_not(safe: Path, mode: int) -> None:
    """Sticky or not, and wherever it is on the way."""
    safe.parent.chmod(mode)
    assert f"others may write to the folder {safe.parent}" in reason(safe)
    safe.parent.chmod(0o755)
    safe.parent.parent.chmod(mode)
    assert f"others may write to the folder {safe.parent.parent}" in reason(safe)


@root
def test_a_folder_of_a_third_user_is_not(safe: Path) -> None:
    os.chown(safe.parent, THEIRS + 1, THEIRS)
    assert f"the folder {safe.parent} belongs to uid 54322" in reason(safe)


@root
def test_a_link_in_a_folder_that_others_may_write_to_is_not(safe: Path, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    (open_to_all / "link").symlink_to(safe.parent)
    (tmp_path / "to-link").symlink_to("open/link")
    check_daemon(str(tmp_path / "to-link" / "kvass.sock"), THEIRS)
    open_to_all.chmod(0o1777)
    found = reason(tmp_path / "to-link" / "kvass.sock")
    assert f"others may write to the folder {open_to_all}" in found


@root
def test_a_user_that_this_namespace_does_not_know_is_not(
    safe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_overflow_uid", lambda: THEIRS)
    assert "all users that this user namespace does not know" in reason(safe)


@root
def test_what_is_gone_meanwhile_is_not(safe: Path) -> None:
    safe.unlink()
    assert "cannot be looked at" in reason(safe)


def speaks(listener: socket.socket) -> bool:
    """Whether the next one who came says something. Who hung up may have come again before."""
    heard, _ = listener.accept()
    with heard:
        heard.settimeout(20)
        return bool(heard.recv(1))


@root
def test_a_client_says_nothing_to_a_stranger_who_listened_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel says who listens, whoever owns the file."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        if (pid := os.fork()) == 0:
            os.setuid(THEIRS)
            listener.listen()
            os._exit(0)
        os.waitpid(pid, 0)
        with Client(path) as client, pytest.raises(UntrustedDaemon, match="uid 54321 listens at"):
            client.connect(20)
        heard, _ = listener.accept()
        with heard:
            heard.settimeout(20)
            assert heard.recv(1) == b"", "it hung up without a word"
        scheduler = SchedulerClient(path, Register("e", {}, 256))
        with caplog.at_level("WARNING"), pytest.raises(UntrustedDaemon):
            scheduler.connect(20)
        scheduler.close()
        assert scheduler.submit(Ping()) == 0, "it runs uncached"
        (line,) = (each for each in caplog.messages if "runs uncached" in each)
        assert line.startswith(f"runs uncached: uid {THEIRS} listens at {path}")
        listener.settimeout(20)
        with Client(path, daemon_uid=THEIRS) as client:
            client.start()
            assert eventually(lambda: speaks(listener)), "the one that was named is asked"
