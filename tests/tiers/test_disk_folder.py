"""The disk tier's folder is one daemon's: it follows no link there, and knows when it lost it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvass.errors import ConfigError, TierDown
from kvass.folder import Folder
from kvass.tiers.disk import DiskTier
from kvass.tiers.disk import tier as disk_tier
from tests.daemon.test_process import as_user
from tests.tiers.conftest import OpenDisk
from tests.tiers.records import KEYS, fill, hits, keys_of

VICTIM = b"what another program wrote"
STRANGER = 12345


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file outside the folder."""
    made = tmp_path / "victim"
    made.write_bytes(VICTIM)
    return made


@pytest.fixture
def looked_up_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the folder is ours is looked up with every call."""
    monkeypatch.setattr(disk_tier, "_CHECK_S", -1.0)


def segments(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.*")}


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("name", ["lock", "00000001.seg", "00000001.idx"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_that_is_a_link_is_refused(
    folder: Path,
    open_disk: OpenDisk,
    tmp_path: Path,
    name: str,
    link: Callable[[Path, Path], None],
) -> None:
    tier = open_disk()
    fill(tier, KEYS)
    tier.close()
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    before = outside.read_bytes()
    link(outside, folder / name)
    with pytest.raises(ConfigError, match=f"{name} is .*: remove it"):
        open_disk()
    assert outside.read_bytes() == before


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_new_notes_are_not_written_through_a_link(
    folder: Path, open_disk: OpenDisk, victim: Path, link: Callable[[Path, Path], None]
) -> None:
    tier = open_disk()
    link(victim, folder / "notes.new")
    tier.set_note("epoch", b"7")
    assert tier.note("epoch") == b"7"
    assert victim.read_bytes() == VICTIM
    assert not (folder / "notes").is_symlink()


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_notes_are_not_read_through_a_link(
    folder: Path, open_disk: OpenDisk, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    tier = open_disk()
    tier.set_note("epoch", b"7")
    (folder / "notes").rename(tmp_path / "elsewhere")
    link(tmp_path / "elsewhere", folder / "notes")
    with pytest.raises(TierDown, match=r"notes is .*: remove it"):
        tier.note("epoch")


def test_a_new_segment_is_not_made_through_a_link(
    folder: Path, open_disk: OpenDisk, tmp_path: Path
) -> None:
    tier = open_disk()
    for suffix in (".seg", ".idx"):
        (folder / f"00000001{suffix}").symlink_to(tmp_path / "outside")
    assert "TierDown" in str(stored_or_why(tier)) or not any(hits(tier, KEYS))
    assert not (tmp_path / "outside").exists()


def stored_or_why(tier: DiskTier) -> object:
    try:
        return fill(tier, KEYS)
    except TierDown as error:
        return repr(error)


def test_a_fifo_keeps_nobody_waiting(folder: Path, open_disk: OpenDisk) -> None:
    os.mkfifo(folder / "notes")
    with pytest.raises(TierDown, match="notes is no file of this daemon's"):
        open_disk().note("epoch")


# ---------------------------------------------------------------- who may write


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777, 0o2770])
def test_a_folder_that_others_may_write_to_is_refused(
    folder: Path, open_disk: OpenDisk, mode: int
) -> None:
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=rf"\(mode {mode:04o}\): `chmod go-w {folder}`"):
        open_disk()
    folder.chmod(mode & ~0o022)
    assert all(fill(open_disk(), KEYS))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(folder: Path, open_disk: OpenDisk) -> None:
    os.chown(folder, STRANGER, -1)
    with pytest.raises(ConfigError, match=f"belongs to user {STRANGER}, .*`chown -R 0 {folder}`"):
        open_disk()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["lock", "00000001.seg"])
def test_another_users_file_is_refused(folder: Path, open_disk: OpenDisk, name: str) -> None:
    (folder / name).touch()
    os.chown(folder / name, STRANGER, -1)
    with pytest.raises(ConfigError, match=f"{name} is no file of this daemon's"):
        open_disk()


def test_a_link_to_the_folder_is_followed_once(
    folder: Path, tmp_path: Path, looked_up_always: None
) -> None:
    """The operator may give one; where it leads later is another folder."""
    (tmp_path / "named").symlink_to(folder)
    tier = DiskTier(tmp_path / "named", 64 << 20)
    try:
        assert all(fill(tier, KEYS))
        (tmp_path / "other").mkdir(mode=0o755)
        (tmp_path / "named").unlink()
        (tmp_path / "named").symlink_to(tmp_path / "other")
        with pytest.raises(TierDown, match="replaced by another folder"):
            tier.set_note("epoch", b"7")
        assert not list((tmp_path / "other").iterdir())
    finally:
        tier.close()


# ---------------------------------------------------------------- lost while running


def test_a_folder_whose_lock_was_removed_is_not_used_any_more(
    folder: Path, open_disk: OpenDisk, looked_up_always: None
) -> None:
    """A second daemon gets it, and clears it; the first one says why it is down, and goes."""
    first = open_disk()
    first.set_note("epoch", b"1")
    assert all(fill(first, KEYS))
    (folder / "lock").unlink()
    second = open_disk()
    second.set_note("epoch", b"2")
    second.clear()
    more = keys_of(4, "second")
    assert all(fill(second, more))
    before = segments(folder)
    for call in (
        lambda: first.probe(KEYS),
        lambda: hits(first, KEYS),
        lambda: fill(first, KEYS),
        lambda: first.delete(KEYS),
        lambda: first.note("epoch"),
        lambda: first.set_note("epoch", b"3"),
        lambda: first.clear(),
    ):
        with pytest.raises(TierDown, match=r"tier: its lock file was removed .*restart the daemon"):
            call()
    first.close()
    assert segments(folder) == before
    assert second.note("epoch") == b"2"
    assert all(hits(second, more))


def test_a_store_that_is_under_way_makes_no_segment_in_anothers_folder(
    folder: Path, open_disk: OpenDisk
) -> None:
    """It was let in before the folder was lost."""
    first = open_disk()
    (folder / "lock").unlink()
    second = open_disk()
    before = sorted(os.listdir(folder))
    assert stored_or_why(first) == [False] * len(KEYS)
    assert sorted(os.listdir(folder)) == before
    second.close()


@pytest.mark.parametrize("how", ["moved", "removed", "opened to others"])
def test_a_folder_that_changed_is_not_used_any_more(
    folder: Path, open_disk: OpenDisk, tmp_path: Path, looked_up_always: None, how: str
) -> None:
    tier = open_disk()
    fill(tier, KEYS)
    if how == "opened to others":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "moved") if how == "moved" else shutil.rmtree(folder)
        folder.mkdir(mode=0o755)
    with pytest.raises(TierDown, match="not used any more"):
        hits(tier, KEYS)
    tier.close()
    assert how == "opened to others" or not list(folder.iterdir())


def test_it_stays_down_once_the_lock_is_put_back(
    folder: Path, open_disk: OpenDisk, tmp_path: Path, looked_up_always: None
) -> None:
    """Somebody else may have been there meanwhile."""
    tier = open_disk()
    (folder / "lock").rename(tmp_path / "lock")
    with pytest.raises(TierDown):
        tier.note("epoch")
    (tmp_path / "lock").rename(folder / "lock")
    with pytest.raises(TierDown):
        tier.probe(KEYS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_folder_in_which_no_file_can_be_made_is_refused_though_its_lock_is_there() -> None:
    home = Path(tempfile.mkdtemp())
    try:
        home.chmod(0o755)
        shared = home / "tier"
        shared.mkdir()
        (shared / "lock").touch(0o600)
        for each in (shared, shared / "lock"):
            os.chown(each, STRANGER, STRANGER)

        def opened() -> None:
            there = Folder(shared)
            there.lock()
            there.close()

        def refused() -> None:
            with pytest.raises(
                ConfigError, match="cannot be locked and written: Permission denied"
            ):
                opened()

        assert as_user(STRANGER, [], opened) == 0, "the control"
        shared.chmod(0o500)
        assert as_user(STRANGER, [], refused) == 0
    finally:
        shutil.rmtree(home)
