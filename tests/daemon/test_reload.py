"""SIGHUP: what can change does, the rest is named, and an error changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from kvass.config import Config, Size
from kvass.core.effects import QuotasAre
from kvass.daemon.listen import Access
from kvass.daemon.live import LiveConfig
from kvass.daemon.loop import Server
from kvass.daemon.notices import Notices
from kvass.messages import Clear, Cleared
from kvass.testing.daemon import Daemon, running_daemon
from tests.daemon.test_process import as_user, open_folder, stranger, try_to_connect
from tests.support.tiers.faulty import url
from tests.support.waiting import eventually
from tests.support.wire.raw_session import RawSession, engine

__all__ = ["open_folder", "stranger"]
CONFIG = "l1_size: 1MiB\nlog_level: info\n"


def hup(daemon: Daemon) -> str:
    """What it says to SIGHUP."""
    before = len(daemon.log())
    os.kill(daemon.pid, signal.SIGHUP)
    assert eventually(lambda: "SIGHUP: " in daemon.log()[before:])
    (line,) = daemon.log()[before:].splitlines()
    return line.split("Z kvass ", 1)[1]


def test_users_level_and_patience_change_and_the_rest_is_named(
    open_folder: Path, stranger: int
) -> None:
    file = open_folder / "kvass.yaml"
    file.write_text(CONFIG)
    with running_daemon(open_folder, l1_size="1MiB", config=str(file)) as daemon:
        boot = daemon.status()["boot"]
        assert hup(daemon) == "INFO SIGHUP: nothing has changed"
        assert as_user(stranger, [], try_to_connect(daemon.socket)) == 1
        file.write_text(CONFIG + f"allow_uid: [{stranger}]\nlease_s: 9\nstop_s: 1\nflush: none\n")
        assert hup(daemon) == (
            f"INFO SIGHUP: allow_uid is [{stranger}] (was []); stop_s is 1.0 (was 10.0); "
            "cannot change without a restart: lease_s, flush"
        )
        assert as_user(stranger, [], try_to_connect(daemon.socket)) == 0
        file.write_text(CONFIG + "socket_group: daemon\n")
        assert "cannot change" not in hup(daemon)
        assert as_user(stranger, [], try_to_connect(daemon.socket)) == 1
        entry = os.stat(daemon.socket)
        assert stat.S_IMODE(entry.st_mode) == 0o660
        assert as_user(stranger, [entry.st_gid], try_to_connect(daemon.socket)) == 0
        file.write_text("log_level: warning\n")
        os.kill(daemon.pid, signal.SIGHUP)
        assert eventually(lambda: stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o600)
        assert daemon.status()["boot"] == boot
        assert daemon.stop() == 0
        assert not daemon.log().endswith("left to flush\n"), "that is said at info"


def test_quotas_change(tmp_path: Path) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text(CONFIG + "quota: ['a=1MiB:4KiB', b=8KiB]\n")
    with running_daemon(tmp_path, l1_size="1MiB", config=str(file)) as daemon:
        file.write_text(CONFIG + "quota: ['a=1MiB:8KiB', c=8KiB]\n")
        assert hup(daemon).startswith("INFO SIGHUP: quota is ['a=1MiB:8KiB', 'c=8KiB'] (was ")
        quotas = {t["tenant"]: t for t in daemon.status()["tenants"] if t["quota"]}
        assert quotas.keys() == {"a", "c"}
        assert quotas["a"]["reserved_bytes"] == 8192
        file.write_text(CONFIG + "quota: ['a=1MiB:2MiB']\n")
        assert ":3: quota: quota of a: the cap 1MiB is below what is reserved, 2MiB" in hup(daemon)
        assert {t["tenant"] for t in daemon.status()["tenants"] if t["quota"]} == {"a", "c"}


WRONG = (
    ("log_level: info\nlease: 3\n", "unknown option 'lease' in "),
    ("\n\nlog_level: loud\n", ":3: log_level: say one of debug, info, warning, error"),
    ("allow_uid: [no-such-user]\n", ":1: allow_uid: there is no user 'no-such-user'"),
    ("socket_group: no-such-group\nlog_level: debug\n", "no such group"),
    ("a: [\n", "is no YAML: "),
    ("tier: ['floppy:/x']\n", ":1: tier: tier 'floppy:/x': unknown scheme"),
    ("stop_s: 0x_\n", "is no YAML: "),
    ("http: 2001-13-45\n", "is no YAML: "),
    ("log_level: !!timestamp x\n", "is no YAML: "),
    ('socket_group: "a\\0b"\n', "no such group"),
    ('allow_uid: ["a\\0b"]\n', "there is no user"),
    ("quota: [a=99999999999999999999]\n", "the cap is at most"),
)


def test_a_file_with_an_error_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text(CONFIG)
    with running_daemon(tmp_path, l1_size="1MiB", config=str(file)) as daemon:
        for text, why in WRONG:
            file.write_text(text)
            line = hup(daemon)
            assert line.startswith("ERROR SIGHUP: the options stay as they were: ")
            assert why in line
            assert daemon.status()["problems"] == [line.removeprefix("ERROR ")]
            file.write_text(CONFIG)
            assert hup(daemon) == "INFO SIGHUP: nothing has changed"
            assert daemon.status()["problems"] == []


async def no_other_tiers(urls: list[str]) -> None:
    raise AssertionError(urls)


def test_quotas_are_held_against_the_l1_that_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = Config(socket=str(tmp_path / "s"), l1_size=Size(1 << 20))
    wanted = msgspec.structs.replace(now, l1_size=Size(4 << 20), quota=["a=:2MiB"])
    live = LiveConfig(now, Access(now), Notices(), lambda: wanted)
    asyncio.run(live.reload(no_other_tiers))
    assert live.current == now
    assert "2MiB are reserved of an l1_size of 1MiB" in caplog.text


def test_quotas_that_could_not_be_set_are_a_problem_until_they_are(tmp_path: Path) -> None:
    """There were too many other tenants. The file stays as it is."""
    now = Config(socket=str(tmp_path / "s"), l1_size=Size(1 << 20))
    Path(now.socket).touch()
    wanted, notices = msgspec.structs.replace(now, quota=["a=:4KiB"]), Notices()
    machine, tried = SimpleNamespace(quotas=frozenset()), list[int]()

    def handle(event: QuotasAre) -> None:
        tried.append(len(notices.fields()["problems"]))
        machine.quotas = frozenset(event.quotas if len(tried) == 3 else ())

    live = LiveConfig(now, Access(now), notices, lambda: wanted)
    server: Any = SimpleNamespace(_live=live, _notices=notices, _machine=machine, _handle=handle)
    server._change_tiers = no_other_tiers
    for hangups in (2, 2):
        told: Any = SimpleNamespace(wait=AsyncMock(side_effect=[True] * hangups + [False]))
        told.clear = lambda: None
        asyncio.run(Server._reload(server, told))
        assert len(notices.fields()["problems"]) == (len(tried) == 2)
    assert tried == [0, 0, 0], "and nothing is tried when they are set"


def test_without_a_file_there_is_nothing_to_reload(tmp_path: Path) -> None:
    with running_daemon(tmp_path, l1_size="1MiB") as daemon:
        assert hup(daemon).startswith("WARNING SIGHUP: nothing to reload")
        assert daemon.running


def clears(daemon: Daemon) -> bool:
    """Whether its tier, too, confirms a clear."""
    with RawSession(daemon.socket).greet() as peer:
        peer.channel.send(Clear(seq=1, everything=True, tiers=True))
        return isinstance(peer.next(), Cleared)


def says_that_its_tier_is_down(daemon: Daemon, orders: Path) -> bool:
    """Whether the tier's process says it, from when on the tier is down until it is up again."""
    before = len(daemon.log())
    (orders / "dead").touch()
    assert not clears(daemon)
    assert eventually(lambda: not daemon.status()["tiers"][0]["up"])
    (orders / "dead").unlink()
    with engine(daemon.socket) as (scheduler, _):

        def is_back() -> bool:
            scheduler.lookup("a")  # each kind of what it is asked proves itself
            return clears(daemon) and bool(daemon.status()["tiers"][0]["up"])

        assert eventually(is_back)
    return "is down" in daemon.log()[before:]


def test_a_tiers_process_logs_as_the_daemon_does(tmp_path: Path) -> None:
    """From the next heartbeat on."""
    (tmp_path / "orders").mkdir()
    file = tmp_path / "kvass.yaml"
    file.write_text("log_format: json\n")
    with running_daemon(
        tmp_path, "1MiB", config=str(file), tier=[url(tmp_path / "orders")]
    ) as daemon:
        assert says_that_its_tier_is_down(daemon, tmp_path / "orders"), "the control"
        file.write_text("log_format: json\nlog_level: error\n")
        os.kill(daemon.pid, signal.SIGHUP)
        assert eventually(lambda: '"level": "info", "message": "SIGHUP: log_level' in daemon.log())
        assert eventually(lambda: not says_that_its_tier_is_down(daemon, tmp_path / "orders"))


def test_many_reloads_cost_no_memory_and_no_descriptor(tmp_path: Path) -> None:
    """1,000 were run once."""
    file = tmp_path / "kvass.yaml"
    file.write_text(CONFIG)
    with running_daemon(tmp_path, l1_size="1MiB", config=str(file)) as daemon:

        def reload(times: int) -> None:
            for n in range(times):
                file.write_text(CONFIG + f"stop_s: {1 + n % 2}\nallow_uid: [{7 + n % 2}]\n")
                assert "allow_uid is " in hup(daemon)

        def costs() -> tuple[int, int]:
            status = Path(f"/proc/{daemon.pid}/status").read_text()
            kib = int(status.split("RssAnon:")[1].split()[0])
            return kib, len(os.listdir(f"/proc/{daemon.pid}/fd"))

        reload(20)
        kib, descriptors = costs()
        reload(20)
        after = costs()
        assert after[1] == descriptors
        assert after[0] <= kib + 256


def test_systemd_is_told_when_a_reload_begins_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text(CONFIG)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with running_daemon(tmp_path, l1_size="1MiB", config=str(file)) as daemon:
            assert systemd.recv(100) == b"READY=1"
            os.kill(daemon.pid, signal.SIGHUP)
            assert systemd.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
            assert systemd.recv(100) == b"READY=1"


def test_another_socket_needs_a_restart_and_hinders_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "kvass.yaml"
    file.write_text(CONFIG + f"socket: {tmp_path}/kvass.sock\n")
    command = [sys.executable, "-m", "kvass", "serve", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stderr is not None
        assert daemon.stdout.readline().startswith(b"ready")
        file.write_text(CONFIG + f"socket: {tmp_path}/other.sock\nallow_uid: [7]\n")
        daemon.send_signal(signal.SIGHUP)
        line = daemon.stderr.readline()
        assert b"allow_uid is [7] (was []); cannot change without a restart: socket" in line
        assert stat.S_IMODE(os.stat(tmp_path / "kvass.sock").st_mode) == 0o666
        daemon.terminate()
