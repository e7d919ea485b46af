"""``kvass serve`` with tiers: what it refuses to start with, and how it stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from kvass.messages import Ping, Pong
from kvass.testing.daemon import Daemon, running_daemon
from tests.daemon.test_process import refused, serve
from tests.daemon.tier_rig import commit_two, disk, tier_of
from tests.support.tiers.faulty import url
from tests.support.waiting import eventually
from tests.support.wire.raw_session import engine

ROOT = Path(__file__).parents[2]


def comes_in(daemon: Daemon) -> bool:
    with socket.socket(socket.AF_UNIX) as late:
        return late.connect_ex(daemon.socket) == 0


def shared_kib(pid: int) -> int:
    """What it has of shared memory in its page tables."""
    return int(Path(f"/proc/{pid}/status").read_text().split("RssShmem:")[1].split()[0])


# ---------------------------------------------------------------- start


def test_a_disk_is_opened_told_of_and_let_go(tmp_path: Path, folder: Path) -> None:
    with running_daemon(tmp_path, tier=[disk(folder)]) as daemon:
        assert " tiers=1 boot=" in daemon.ready
        assert eventually(lambda: tier_of(daemon).get("up") is True)
        assert tier_of(daemon)["name"] == f"disk:{folder}"
        assert tier_of(daemon)["records"] == 0
        with engine(daemon.socket) as peers:
            commit_two(*peers)
            assert eventually(lambda: tier_of(daemon)["records"] == 2)
        assert daemon.stop() == 0
        assert {line.split()[2] for line in daemon.log().splitlines()} == {"INFO"}
        daemon.start()
        assert eventually(lambda: tier_of(daemon).get("records") == 2)
        daemon.restart()
        assert eventually(lambda: tier_of(daemon).get("records") == 2)


def test_a_wrong_key_is_told_of_before_anything_is_stored(tmp_path: Path, folder: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("11" * 32)
    tier = [f"{disk(folder)}&key_file={keys}"]
    with running_daemon(tmp_path, tier=tier) as daemon:
        with engine(daemon.socket) as peers:
            commit_two(*peers)
            assert eventually(lambda: tier_of(daemon)["records"] == 2)
        assert tier_of(daemon)["other_keys"] == 0
    keys.write_text("22" * 32)
    with running_daemon(tmp_path, tier=tier, flush="none") as daemon:
        assert eventually(lambda: tier_of(daemon).get("other_keys") == 1)
        assert "have stored records here and are not in key_file: 1;" in daemon.log()


FULL = """
import sys
from pathlib import Path
from kvass.client.health import notes, troubles
from kvass.cli.main import main
from kvass.testing.daemon import running_daemon
from tests.daemon.tier_rig import tier_of
from tests.support.waiting import eventually

disk = Path(sys.argv[1], "disk")
(disk / "others").write_bytes(bytes(84 << 20))
(disk / "kvass").mkdir(mode=0o700)
tier = f"disk:{disk}/kvass?capacity=90MiB"
with running_daemon(disk.parent, "1MiB", tier=[tier]) as daemon:
    assert eventually(lambda: tier_of(daemon).get("up") is True)
    (note,) = notes(daemon.status())
    assert troubles(daemon.status()) == [], "what there is room for is kept"
    assert main(["status", "--socket", daemon.socket]) == 0
    print(note)
    print(daemon.log())
    (disk / "others").unlink()
    main(["clear", "--tier", "--socket", daemon.socket])
    assert eventually(lambda: notes(daemon.status()) == []), "the disk has room again"
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount"
)
def test_a_disk_with_less_room_than_the_capacity_is_told_of(tmp_path: Path) -> None:
    """Its segments are allocated one by one."""
    (tmp_path / "disk").mkdir()
    mount = f"mount -t tmpfs -o size=100m none {tmp_path}/disk"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec {sys.executable} -c "$0" {tmp_path}', FULL],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    tier = f"tier disk:{tmp_path}/disk/kvass"
    note = f"{tier}: its disk has room for 16MiB of its capacity of "
    assert f"\n{note}" in done.stdout
    assert "OK\n  - tier disk:" in done.stdout, "kvass status"
    assert f"WARNING {note.removeprefix('tier disk:')}" in done.stdout


def test_its_process_maps_the_arena_before_anything_is_loaded(tmp_path: Path, folder: Path) -> None:
    size = 24 << 20  # a slice and a half
    with running_daemon(tmp_path, tier=[disk(folder)], l1_size=str(size)):
        tier = int((folder / "lock").read_text().split()[0])
        assert eventually(lambda: shared_kib(tier) == size >> 10)


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("disk:{folder}/none?capacity=1MiB", "no such folder"),
        ("redis:host?colour=red&password=hunter2", "unknown option 'colour'"),
        ("redis:host?password=hunter2&colour=red", "beside password, what follows is wrong"),
    ],
)
def test_bad_tiers_get_one_clear_line(tmp_path: Path, folder: Path, url: str, line: str) -> None:
    """What a tier says of its URL comes out of its process unchanged. All that can be wrong with a
    URL: ``tests/tiers/test_url.py``, ``test_redis.py``."""
    flags = ("--socket", str(tmp_path / "s"), "--l1-size", "1MiB", "--tier")
    got = refused(serve(*flags, url.format(folder=folder)))
    assert line in got
    assert "hunter2" not in got
    assert os.listdir(tmp_path) == ["tier"]


def test_a_folder_is_one_daemons(tmp_path: Path, folder: Path) -> None:
    flags = ("--socket", str(tmp_path / "other"), "--l1-size", "1MiB", "--tier")
    with running_daemon(tmp_path, tier=[disk(folder)]) as daemon:
        got = refused(serve(*flags, disk(folder)))
        owner = re.search(
            f"{folder}: in use by process (\\d+), started by process {daemon.pid}: ", got
        )
        assert owner, got
        status = Path(f"/proc/{owner[1]}/status").read_text()
        assert f"PPid:\t{daemon.pid}\n" in status, "the tier's process is the daemon's"
        there = ("--socket", daemon.socket, *flags[2:])
        taken = refused(serve(*there, "disk:/dev/null/x?capacity=1GiB"))
        assert "live daemon" in taken, "who has no socket opens no tier"
    assert "in use by process" in refused(serve(*flags, disk(folder), "--tier", disk(folder)))


def test_a_bad_second_tier_closes_the_first(tmp_path: Path, folder: Path) -> None:
    flags = ("--socket", str(tmp_path / "s"), "--l1-size", "1MiB")
    got = refused(serve(*flags, "--tier", url(folder), "--tier", "disk:/no/such?capacity=1MiB"))
    assert "/no/such: no such folder" in got
    assert (folder / "closed").exists()


def test_a_server_that_is_not_there_is_a_tier_that_is_down(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and not listening
        where = f"redis:127.0.0.1:{nobody.getsockname()[1]}"
        with running_daemon(tmp_path, tier=[f"{where}?password=hunter2"]) as daemon:
            assert eventually(lambda: tier_of(daemon).get("up") is False), "before any engine"
            assert "refused" in tier_of(daemon)["trouble"]
            with engine(daemon.socket) as peers:
                commit_two(*peers)
                assert eventually(lambda: tier_of(daemon).get("up") is False)
                assert daemon.status()["rows"] == 2
            assert daemon.stop() == 0
            assert f"tier {where} is down: " in daemon.log()
            assert "hunter2" not in daemon.log() + daemon.ready


def test_whatever_a_tier_says_its_password_is_not_told(tmp_path: Path) -> None:
    password = "Zq1x@Wv8k:Y p3/?#%&\"'\\é\u2028𝄞Kj7m"
    loud = f"tests.support.tiers.loud:LoudTier?password={quote(password, safe='')}"
    with running_daemon(tmp_path, tier=[loud]) as daemon:
        assert eventually(lambda: tier_of(daemon).get("up") is False)
        assert eventually(lambda: "it raised what no tier may" in daemon.log())
        assert eventually(lambda: daemon.log().count("connecting with") == 4)
        assert tier_of(daemon)["kept"] == 1, "what else it reports is shown"
        said = daemon.log() + daemon.ready + json.dumps(daemon.status())
    flags = ("--socket", str(tmp_path / "s"), "--l1-size", "1MiB", "--tier")
    said += refused(serve(*flags, f"{loud}&opens=no"))
    assert [
        line
        for line in said.splitlines()
        for part in ("Zq1x", "Wv8k", "p3/", "Kj7m")
        if part in line
    ] == []
    assert said.count("***") > 5


# ---------------------------------------------------------------- stop


def test_what_was_promised_is_flushed_before_it_stops(tmp_path: Path, folder: Path) -> None:
    (folder / "hold-store").touch()
    with (
        running_daemon(tmp_path, tier=[url(folder)], stop_s=60) as daemon,
        engine(daemon.socket) as (scheduler, worker),
    ):
        commit_two(scheduler, worker)
        assert eventually((folder / "in-store").exists)
        for pid in (daemon.pid, tier_of(daemon)["pid"]):  # as to all of a service
            os.kill(pid, signal.SIGTERM)
        assert eventually(lambda: not comes_in(daemon)), "nobody new"
        worker.ask(Ping(), Pong)  # who is there is served on
        assert daemon.running
        (folder / "hold-store").unlink()
        assert daemon.wait() == 0
        assert (folder / "stored").read_text() == "2"
        assert (folder / "closed").exists()
        assert {line.split()[2] for line in daemon.log().splitlines()} == {"INFO"}


def test_a_second_signal_waits_for_nothing(tmp_path: Path, folder: Path) -> None:
    (folder / "hold-store").touch()
    with running_daemon(tmp_path, tier=[url(folder)], stop_s=3600) as daemon:
        with engine(daemon.socket) as peers:
            commit_two(*peers)
            assert eventually((folder / "in-store").exists)
            os.kill(daemon.pid, signal.SIGTERM)
            peers[1].ask(Ping(), Pong)
            time.sleep(0.1)
            assert daemon.running
            os.kill(daemon.pid, signal.SIGINT)
            assert daemon.wait() == 0
        assert "a call is still running; it is left behind" in daemon.log()
        assert not os.path.exists(daemon.socket)


@pytest.mark.parametrize("how", ["hold-store", "stubborn-store"])
def test_a_tier_that_hangs_holds_up_no_stop_for_long(
    tmp_path: Path, folder: Path, how: str
) -> None:
    (folder / how).touch()
    with running_daemon(tmp_path, tier=[url(folder)], stop_s=0.5) as daemon:
        with engine(daemon.socket) as peers:
            commit_two(*peers)
            assert eventually((folder / "in-store").exists)
            assert daemon.stop() == 0
        assert "2 rows were not flushed" in daemon.log()
        assert not (folder / "closed").exists()
        assert not os.path.exists(daemon.socket)
        daemon.start()
