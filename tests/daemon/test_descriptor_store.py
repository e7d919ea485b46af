"""``kvass serve --arena systemd``: what one daemon has cached, the service's next one has."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.rows import Rows
from kvass.arena import memory
from kvass.cli.main import main
from kvass.daemon import descriptor_store
from kvass.daemon.lasting import real_path
from kvass.testing.daemon import Daemon, running_daemon
from tests.daemon.test_lasting import KEYS, ROW, children, found, of_arena
from tests.daemon.test_process import refused, serve
from tests.support.huge_pages import reserved
from tests.support.systemd import START, Manager, with_manager
from tests.support.waiting import eventually

NAMES = {"kvass-slots", "kvass-index"}


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    made = with_manager(tmp_path, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def daemon(tmp_path: Path, manager: Manager) -> Iterator[Daemon]:
    """The service, in which ``KEYS`` are stored."""
    with running_daemon(tmp_path, program=START, arena="systemd") as daemon:
        store(daemon)
        yield daemon


def store(daemon: Daemon) -> None:
    with ExitStack() as ending:
        Rows(daemon.socket, "mine", ROW, ending).store(KEYS)


def hits(daemon: Daemon) -> int:
    """How many of ``KEYS`` are there, each as it was stored."""
    with ExitStack() as ending:
        return found(Rows(daemon.socket, "mine", ROW, ending))


@pytest.mark.parametrize("end", [Daemon.kill, Daemon.stop])
def test_rows_outlive_a_daemon_however_it_ends(
    daemon: Daemon, manager: Manager, end: Callable[[Daemon], Any]
) -> None:
    assert "systemd had nothing for it" in of_arena(daemon)["started_empty"]
    assert hits(daemon) == 12
    for _ in range(2):
        end(daemon)
        assert manager.stored().keys() == NAMES
        daemon.start()
        assert " adopted=12 " in daemon.ready
        fields = of_arena(daemon)
        assert (fields["place"], fields["started_empty"]) == ("systemd", "")
        assert hits(daemon) == 12


@pytest.mark.parametrize("lost", [{"kvass-index"}, {"kvass-slots"}, NAMES], ids=sorted)
def test_what_systemd_has_lost_is_started_without(
    daemon: Daemon, manager: Manager, lost: set[str]
) -> None:
    """The control: there are no rows, and none is wrong."""
    before = {name: os.fstat(fd).st_ino for name, fd in manager.stored().items()}
    daemon.kill()
    for name in lost:
        manager.forget(name)
    daemon.start()
    assert " adopted=0 " in daemon.ready
    assert of_arena(daemon)["started_empty"]
    after = {name: os.fstat(fd).st_ino for name, fd in manager.stored().items()}
    assert not {*before.values()} & {*after.values()}, "engines of before may write to the slots"
    with ExitStack() as ending:
        rows = Rows(daemon.socket, "mine", ROW, ending)
        assert found(rows) == 0
        assert not rows.arena.any()
        rows.store(KEYS)
    daemon.restart()
    assert hits(daemon) == 12, "the next one goes on as usual"


def another_s() -> int:
    os.seteuid(1000)
    try:
        return sealed()
    finally:
        os.seteuid(0)


def sealed(page_bytes: int = 1 << 12) -> int:
    fd = memory.memfd("kvass-index", page_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return fd


FOREIGN: dict[str, tuple[Callable[[], int], str]] = {
    "a device": (lambda: os.open("/dev/null", os.O_RDWR), "it is no memory"),
    "a file": (lambda: os.open(__file__, os.O_RDONLY), "it is no memory"),
    "a pipe": (lambda: os.pipe()[0], "it is no memory"),
    "not sealed": (lambda: memory.memfd("kvass-index"), "it is not sealed as it must be"),
    "sealed by a client": (lambda: memory.create(1 << 20)._fd, "it is not sealed as it must be"),
    "read only": (lambda: os.open(f"/proc/self/fd/{sealed()}", os.O_RDONLY), "cannot be written"),
    "another user's": (another_s, "it belongs to user 1000"),
    "empty": (sealed, "its slots or its index were removed or have another size"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_no_daemon_has_made_is_not_believed(
    daemon: Daemon, manager: Manager, kind: str
) -> None:
    if kind == "another user's" and os.geteuid():
        pytest.skip("only root can become another user")
    make, why = FOREIGN[kind]
    daemon.kill()
    manager.forget("kvass-index")
    manager.store("kvass-index", made := make())
    foreign = os.fstat(made)
    daemon.start()
    assert why in of_arena(daemon)["started_empty"]
    line = f"arena systemd: L1 starts empty: {of_arena(daemon)['started_empty']}"
    assert eventually(lambda: line in daemon.log())
    assert manager.stored().keys() == NAMES
    there = os.fstat(manager.stored()["kvass-index"])
    assert (there.st_dev, there.st_ino) != (foreign.st_dev, foreign.st_ino)
    assert hits(daemon) == 0
    store(daemon)
    daemon.restart()
    assert hits(daemon) == 12


def test_two_of_one_name_are_not_believed(daemon: Daemon, manager: Manager) -> None:
    daemon.kill()
    manager.store("kvass-slots", sealed())
    daemon.start()
    assert of_arena(daemon)["started_empty"].endswith("there are several")
    assert manager.stored().keys() == NAMES
    assert hits(daemon) == 0


@pytest.mark.parametrize(
    ("at", "word", "why"), [(8, b"c", "has format 99"), (16, b"x" * 16, "the index is damaged")]
)
def test_another_version_and_a_damaged_index_are_said(
    daemon: Daemon, manager: Manager, at: int, word: bytes, why: str
) -> None:
    daemon.kill()
    with mmap.mmap(manager.stored()["kvass-index"], 4096) as index:
        index[at : at + len(word)] = word
    daemon.start()
    assert why in of_arena(daemon)["started_empty"]
    assert hits(daemon) == 0


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"l1_size": "128MiB"}, 12), ({"l1_size": "32MiB"}, 12), ({"lease_s": 5}, 12)],
    ids=str,
)
def test_what_a_changed_option_keeps(
    tmp_path: Path, daemon: Daemon, options: dict[str, Any], kept: int
) -> None:
    """The table of docs/operating.md, as for a folder."""
    daemon.kill()
    with running_daemon(tmp_path, program=START, arena="systemd", **options) as after:
        assert hits(after) == kept


@pytest.mark.parametrize("other", ["", "a folder"])
def test_memory_that_is_not_wanted_any_more_is_given_back(
    tmp_path: Path, memory_folder: Path, daemon: Daemon, manager: Manager, other: str
) -> None:
    daemon.kill()
    arena = str(memory_folder) if other else ""
    with running_daemon(tmp_path, program=START, arena=arena) as after:
        assert manager.stored() == {}
        assert of_arena(after)["adopted_rows"] == 0


def test_a_process_that_has_the_lock_keeps_its_slots(
    tmp_path: Path, daemon: Daemon, manager: Manager
) -> None:
    """As a tier's does, which has inherited it, until it ends."""
    (tmp_path / "disk").mkdir()
    daemon.kill()
    index = manager.stored()["kvass-index"]
    tier = [f"disk:{tmp_path}/disk?capacity=16MiB"]
    with running_daemon(tmp_path, program=START, arena="systemd", tier=tier) as with_tier:
        (child,) = children(with_tier.pid)
        files = [os.stat(fd).st_ino for fd in Path(f"/proc/{child}/fd").iterdir()]
        assert os.fstat(index).st_ino in files
        with_tier.restart()
        assert of_arena(with_tier)["started_empty"] == ""
    holder = os.open(f"/proc/self/fd/{index}", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    daemon.start()
    os.close(holder)
    assert of_arena(daemon)["started_empty"] == "another process uses its memory"
    assert hits(daemon) == 0


def test_no_client_can_cut_or_seal_it(daemon: Daemon, manager: Manager) -> None:
    slots = manager.stored()["kvass-slots"]
    with pytest.raises(PermissionError):
        os.ftruncate(slots, 1 << 20)
    with pytest.raises(PermissionError):
        fcntl.fcntl(slots, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)


def test_with_reserved_huge_pages(tmp_path: Path, manager: Manager) -> None:
    options: dict[str, Any] = {"program": START, "arena": "systemd", "huge_pages": "2MiB"}
    with reserved(8):
        with running_daemon(tmp_path, "16MiB", **options) as daemon:
            assert " pages=2MiB " in daemon.ready
            store(daemon)
            daemon.restart()
            assert hits(daemon) == 12
        del options["huge_pages"]
        with running_daemon(tmp_path, "16MiB", **options) as daemon:
            why = "kvass-slots of systemd's store: its pages have another size"
            assert of_arena(daemon)["started_empty"] == why
        manager.forget("")
    too_many = serve("--arena=systemd", "--huge-pages=2MiB", "--l1-size=8GiB")
    assert "of 4096 pages of 2MiB only" in refused(too_many)


def test_without_systemd_it_is_refused(tmp_path: Path, manager: Manager) -> None:
    flags = ("--socket", str(tmp_path / "s"), "--arena", "systemd", "--l1-size", "1MiB")
    says = "set FileDescriptorStoreMax=2 in the unit and, from systemd 254 on, FileDescriptorSt"
    why = refused(serve(*flags, NOTIFY_SOCKET=""))
    assert "systemd has not started this process as a service of Type=notify" in why
    assert says in why
    assert "keeps 1 descriptors for this service" in refused(serve(*flags, FDSTORE="1"))
    assert says in refused(serve(*flags, FDSTORE="0"))


def test_others_descriptors_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "2")
    monkeypatch.setenv("LISTEN_FDNAMES", "kvass-slots:http")
    monkeypatch.setenv("LISTEN_PID", str(os.getppid()))
    assert descriptor_store.received() == {}, "of the process that started this one"


def test_the_command_says_who_has_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert real_path("systemd") == "systemd"
    assert main(["clear", "--arena", "systemd"]) == 2
    assert "systemctl clean --what=fdstore" in capsys.readouterr().err
