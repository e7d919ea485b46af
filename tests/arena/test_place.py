"""The place of an arena: one process's, safe to use, and its files never get smaller."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvass.arena import memory
from kvass.arena.place import folder_page_bytes, held_bytes, open_place, remove_place
from kvass.errors import ConfigError
from kvass.types import PAGE

MIB = 1 << 20
INDEX = 4 * MIB
NOBODY = 65534


def test_what_is_in_it_outlives_who_wrote_it(memory_folder: Path) -> None:
    path = str(memory_folder / "kvass")
    child = (
        "import os; from kvass.arena.place import open_place;"
        f"p = open_place({path!r}, {MIB}, {INDEX}); p.slots.buffer[7] = 3;"
        "p.allocate(0, 4096); p.index[9] = 4; assert p.found == (0, 0); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", child], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    place = open_place(path, MIB, INDEX)
    assert place.found == (MIB, INDEX)
    assert (place.slots.buffer[7], place.index[9]) == (3, 4)
    assert os.stat(path).st_mode & 0o777 == 0o700
    place.release()


def test_it_is_one_processs_until_it_is_released(memory_folder: Path) -> None:
    path = str(memory_folder)
    first = open_place(path, MIB, INDEX)
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from kvass.arena.place import open_place; open_place({path!r}, {MIB}, {INDEX})",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"ConfigError: {path}: in use by process {os.getpid()}: a folder" in other.stderr
    with pytest.raises(ConfigError, match="in use"):
        remove_place(path)
    first.release()
    second = open_place(path, MIB, INDEX)
    second.slots.buffer[0] = 5
    assert first.slots.buffer[0] == 5, "who released it has it mapped"
    second.release()


def test_a_lock_file_that_was_replaced_locks_nobody_out(memory_folder: Path) -> None:
    """Who owns the place is in the kernel; the number in the file is for people."""
    (memory_folder / "lock").write_text(f"{os.getpid()} 1")
    place = open_place(str(memory_folder), MIB, INDEX)
    assert place.slots.size == MIB
    place.release()


def test_an_owner_that_is_ending_is_waited_for_and_named(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvass.folder._LOCK_WAIT_S", 0.01)
    monkeypatch.setattr("kvass.folder._ORPHAN_WAIT_S", 0.2)
    caplog.set_level("INFO", "kvass")
    with subprocess.Popen(["true"]) as ended, (memory_folder / "lock").open("w") as lock:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        lock.write(f"{ended.pid} 1")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use by process"):
            open_place(str(memory_folder), MIB, INDEX)
    said = f"locked by process {ended.pid}, which is ending: waiting up to 0.2 s"
    assert [said in line for line in caplog.messages] == [True]


def test_files_never_get_smaller(memory_folder: Path) -> None:
    path = str(memory_folder)
    large = open_place(path, 4 * MIB, INDEX)
    engine = memory.attach(os.dup(large.slots.fileno()), 4 * MIB)
    engine.buffer[4 * MIB - 1] = 8
    large.release()
    small = open_place(path, MIB, INDEX // 2)
    assert (small.slots.size, len(small.index)) == (MIB, INDEX)
    attached = memory.attach(os.dup(small.slots.fileno()), MIB)
    assert attached.size == MIB
    small.slots.buffer[:] = 1
    assert engine.buffer[0] == 1, "the same memory"
    assert engine.buffer[4 * MIB - 1] == 8
    small.release()
    again = open_place(path, 8 * MIB, 2 * INDEX)
    assert again.slots.buffer[4 * MIB - 1] == 8
    assert len(again.index) == 2 * INDEX
    again.release()


def test_renewed_files_are_others(memory_folder: Path) -> None:
    """A process of before may still write to the old ones."""
    place = open_place(str(memory_folder), MIB, INDEX)
    writer = memory.attach(os.dup(place.slots.fileno()), MIB)
    place.index[0] = 1
    place.renew(MIB, INDEX)
    assert place.found == (0, 0)
    writer.buffer[:] = 9
    assert not np.any(place.slots.buffer)
    assert not np.any(place.index)
    place.release()


def test_only_what_is_allocated_takes_memory(memory_folder: Path) -> None:
    place = open_place(str(memory_folder), MIB, INDEX)
    index = memory_folder / "index"
    assert index.stat().st_blocks == held_bytes(str(memory_folder)) == 0
    assert place.allocate(MIB, 2 * MIB)
    assert index.stat().st_blocks * 512 == MIB
    place.slots.populate(0, MIB)
    assert held_bytes(str(memory_folder)) == MIB
    place.release()


# ---------------------------------------------------------------- what is refused


def test_a_disk_is_no_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path}: a file system of type \w+ is no memory"):
        open_place(str(tmp_path), MIB, INDEX)
    assert not list(tmp_path.iterdir())


def test_what_is_refused_leaves_no_folder_behind(tmp_path: Path, memory_folder: Path) -> None:
    """Neither one that is no memory, nor one that was locked and has too little room."""
    for path, size in ((tmp_path / "new", MIB), (memory_folder / "new", 1 << 50)):
        with pytest.raises(ConfigError, match=r"is no memory|do not fit"):
            open_place(str(path), size, INDEX)
        assert not path.exists()
    kept = memory_folder / "kept"
    kept.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match="do not fit"):
        open_place(str(kept), 1 << 50, INDEX)
    assert kept.exists(), "it was there before"


def test_a_folder_that_others_may_write_to_is_refused(memory_folder: Path) -> None:
    memory_folder.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write to it"):
        open_place(str(memory_folder), MIB, INDEX)


@pytest.mark.parametrize("name", ["slots", "index", "lock"])
def test_a_link_is_not_followed(memory_folder: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"another's")
    (memory_folder / name).symlink_to(victim)
    with pytest.raises(ConfigError, match=f"{name} is no file of this daemon's alone"):
        open_place(str(memory_folder), MIB, INDEX)
    assert victim.read_bytes() == b"another's"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_folder_that_cannot_be_looked_at_has_the_usual_pages(tmp_path: Path) -> None:
    """``open_place`` then says why."""
    tmp_path.chmod(0o700)
    path = str(tmp_path / "none/arena")
    os.seteuid(NOBODY)
    try:
        assert folder_page_bytes(path) == PAGE
        with pytest.raises(ConfigError, match="cannot be made: Permission denied"):
            open_place(path, PAGE, PAGE)
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_made_is_one_line(memory_folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made: No such file"):
        open_place(str(memory_folder / "no" / "kvass"), MIB, INDEX)


@pytest.mark.parametrize("too_many", [1, -1], ids=["slots", "index"])
def test_more_than_the_file_system_has_is_refused(memory_folder: Path, too_many: int) -> None:
    """An index needs room, too: 5 MiB at least."""
    space = os.statvfs(memory_folder)
    pages = space.f_bavail * space.f_frsize // PAGE
    with pytest.raises(ConfigError, match=r"do not fit into the .*: give less"):
        open_place(str(memory_folder), (pages + too_many) * PAGE, 2 * INDEX)
    open_place(str(memory_folder), MIB, INDEX).release()


SMALL = """
import os, sys
from kvass.arena import place
from kvass.arena.place import open_place
place.LEAST_INDEX = 0
MIB = 1 << 20
p = open_place(sys.argv[1] + "/kvass", MIB, 4 * MIB)
p.slots.populate(0, MIB)
print(p.allocate(0, MIB // 2), p.lacks_index, p.allocate(0, 4 * MIB), p.lacks_index, flush=True)
p.index[0] = 1
p.release()
print(open_place(sys.argv[1] + "/kvass", MIB, 4 * MIB).index[0], flush=True)
p.index[:] = 1
"""


def test_a_full_file_system_gives_no_index_and_kills_nobody(tmp_path: Path) -> None:
    """The control, a write to what was not allocated, is killed. What the place has already is not
    asked for again."""
    options = f"-t tmpfs -o size=2m,mode=755 none {tmp_path}"
    mount = f'mount {options} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, SMALL], capture_output=True, text=True, timeout=60
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout.splitlines() == ["True False False True", "1"], done.stderr
    assert done.returncode == -signal.SIGBUS


# ---------------------------------------------------------------- removed


def test_a_removed_place_is_gone_and_its_memory_with_it(memory_folder: Path) -> None:
    path = str(memory_folder / "kvass")
    open_place(path, MIB, INDEX).release()
    remove_place(path)
    assert not os.path.exists(path)
    with pytest.raises(ConfigError, match="no such folder"):
        remove_place(path)


@pytest.mark.parametrize("name", ["other", "index"])
def test_a_folder_without_an_arena_is_not_taken_for_one(memory_folder: Path, name: str) -> None:
    (memory_folder / name).touch()
    with pytest.raises(ConfigError, match="there is no arena"):
        remove_place(str(memory_folder))
    assert (memory_folder / name).exists()
