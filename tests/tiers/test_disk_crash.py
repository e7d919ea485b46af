"""A process that dies at any moment, and a disk that refuses: right or a miss, and back again."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvass.errors import ItemRefused, TierDown
from kvass.testing.tier_suite import data_of, fetch, same
from kvass.tiers import codings, compressed
from kvass.tiers.base import Buffer
from kvass.tiers.compressed import CompressedTier
from kvass.tiers.disk import DiskTier, reading
from kvass.tiers.disk.segment import SegmentFile
from kvass.tiers.record_tier import RecordTier
from tests.tiers.conftest import OpenDisk
from tests.tiers.records import SHAPE, fill, hits, keys_of

ROOT = Path(__file__).parent.parent.parent

SHAPES = [(5000, 4096), (20_000,), (300,)]
WRITER = """
import sys
from kvass.tiers import codings, compressed
from kvass.tiers.compressed import CompressedTier
from kvass.tiers.disk import DiskTier
from kvass.tiers.disk.segment import SegmentFile
from tests.tiers.records import data_of, keys_of
from tests.tiers.test_disk_crash import SHAPES
tier = DiskTier(sys.argv[1], 3 << 20)
if sys.argv[2] == "compressed":
    compressed.LEAST_BYTES, codings.WORTH = 100, 1.2
    tier = CompressedTier(tier, "lossless", remote=False)
keys = keys_of(400)
for i in range(10**9):
    at, version = i * 7 % 400, i % 4
    if i % 13 == 5:
        tier.delete([keys[at]])
        print(at, "deleted", flush=True)
    else:
        tier.store([keys[at]], [data_of(keys[at], SHAPES[at % 3], version)])
        print(at, version, flush=True)
"""


def answers_of_a_writer_killed(folder: Path, after: int, how: str) -> dict[int, str]:
    """Key number -> the version stored last, or "deleted"; ``after`` so many answers it dies."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    try:
        lines = [child.stdout.readline() for _ in range(after)]
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=30)
    with child.stdout:
        lines += child.stdout.read().splitlines()
    said = dict(line.split() for line in lines if line.count(" ") == 1)
    return {int(at): answer for at, answer in said.items()}


@pytest.mark.parametrize(("answers", "how"), [(40, "plain"), (900, "plain"), (600, "compressed")])
def test_kill_9_in_the_middle_of_writing(
    folder: Path, open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, answers: int, how: str
) -> None:
    """What was answered last about a key is what is found, if anything is: a kill is no power loss.
    The folder turns over several times its capacity meanwhile."""
    said = answers_of_a_writer_killed(folder, answers, how)
    tier: RecordTier = open_disk(3 << 20)
    if how == "compressed":
        monkeypatch.setattr(compressed, "LEAST_BYTES", 100)
        monkeypatch.setattr(codings, "WORTH", 1.2)
        tier = CompressedTier(tier, "lossless", remote=False)
    in_doubt = 0
    for at, key in enumerate(keys_of(400)):
        shape = SHAPES[at % 3]
        (held,) = hits(tier, [key], shape, versions=4)
        if held:
            answer = said.get(at, "never")
            found = fetch(tier, key, shape) or []
            in_doubt += not answer.isdigit() or not same(found, data_of(key, shape, int(answer)))
    assert in_doubt <= 1, "only the key that it was busy with may be other than was said"
    assert tier.report()["damaged"] <= 1
    keys = keys_of(50, "next")
    assert all(fill(tier, keys))
    assert all(hits(tier, keys))
    assert tier.report().get("compressed_records", 50) == 50


@pytest.mark.parametrize("newer_is_first", [True, False])
def test_of_two_records_of_one_key_the_newer_counts(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, newer_is_first: bool
) -> None:
    """As a death between writing the new one and erasing the old one leaves them."""
    tier = open_disk(4 << 20)
    assert all(fill(tier, [b"first slot"]))
    assert all(fill(tier, [b"key"]))
    if newer_is_first:
        tier.delete([b"first slot"])
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_erase", lambda self, place: None)
        assert all(fill(tier, [b"key"], version=1))
    tier.close()
    tier = open_disk(4 << 20)
    assert same(fetch(tier, b"key", SHAPE) or [], data_of(b"key", SHAPE, 1))
    tier.delete([b"key"])
    tier.close()
    assert fetch(open_disk(4 << 20), b"key", SHAPE) is None  # the older one is gone as well


@pytest.mark.parametrize("dies_at", ["write", "set_entry"])
def test_the_table_never_names_what_was_overwritten(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    """A slot changes hands, and the process dies before or after the record is written."""
    tier = open_disk(4 << 20)
    assert all(fill(tier, [b"old", b"other"]))
    real = SegmentFile.set_entry

    def dies(self: SegmentFile, slot: int, what: Any, *_: Any) -> None:
        if what == 0:
            real(self, slot, 0, 0)
        else:
            raise OSError(errno.EIO, "died")

    with monkeypatch.context() as patch:
        patch.setattr(SegmentFile, "set_entry", lambda *_: None)
        tier.delete([b"old"])  # its entry and its header stay, as those of one that is evicted
        patch.setattr(SegmentFile, "set_entry", real)
        patch.setattr(SegmentFile, dies_at, dies)
        with pytest.raises(TierDown):
            fill(tier, [b"new"])
    tier.close()
    tier = open_disk(4 << 20)
    assert tier.probe([b"old", b"other"]) == [False, True]
    assert hits(tier, [b"old", b"other"]) == [False, True]
    assert tier.report()["damaged"] == 0


# ---------------------------------------------------------------- a disk that refuses


class Faults:
    """Stands before the system calls and answers some of them with an error."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.error: dict[str, int] = {}
        for name in ("pwritev", "preadv", "pwrite", "posix_fallocate", "fsync"):
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, real: Any) -> Any:
        def call(fd: int, *args: Any) -> Any:
            if number := self.error.get(name):
                raise OSError(number, os.strerror(number))
            return real(fd, *args)

        return call


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def test_a_disk_without_room_for_a_segment_uses_what_it_has(
    open_disk: OpenDisk, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("kvass.tiers.disk.tier.time.monotonic", lambda: now[0])
    tier = open_disk(4 << 20)
    keys = keys_of(80)
    faults.error["posix_fallocate"] = errno.ENOSPC
    assert not any(fill(tier, keys[:5]))
    assert tier.report()["full"] == 5
    assert tier.report()["write_errors"] == 1  # and then it waited before it asked again
    faults.error.clear()
    now[0] += 60
    assert all(fill(tier, keys[:15]))  # one segment of 15 slots
    faults.error["posix_fallocate"] = errno.ENOSPC
    assert all(fill(tier, keys[15:40]))
    assert sum(hits(tier, keys)) == 15
    faults.error.clear()
    now[0] += 60
    assert all(fill(tier, keys))
    assert all(hits(tier, keys))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_writes_that_fail_are_said_and_forgotten(
    folder: Path, open_disk: OpenDisk, faults: Faults, number: int
) -> None:
    tier = open_disk(4 << 20)
    keys = keys_of(10)
    assert all(fill(tier, keys[:5]))
    faults.error["pwritev"] = faults.error["pwrite"] = number
    with pytest.raises(TierDown, match=os.strerror(number)):
        fill(tier, keys[3:])
    faults.error["fsync"] = number
    with pytest.raises(ItemRefused, match=os.strerror(number)):
        tier.set_note("epoch", b"7")
    assert all(hits(tier, keys[:5]))  # it can still be read
    tier.delete(keys[:1])
    assert hits(tier, keys) == [False] + [True] * 4 + [False] * 5
    faults.error.clear()
    assert all(fill(tier, keys))
    assert all(hits(tier, keys))
    tier.close()
    assert all(hits(open_disk(4 << 20), keys))


def test_reads_that_fail_are_misses_and_the_records_are_given_up(
    open_disk: OpenDisk, faults: Faults
) -> None:
    tier = open_disk(4 << 20)
    keys = keys_of(10)
    assert all(fill(tier, keys))
    faults.error["preadv"] = errno.EIO
    with pytest.raises(TierDown, match="Input/output"):
        hits(tier, keys[:4])
    assert tier.report()["read_errors"] == 4
    assert not any(hits(tier, keys_of(3, "absent")))  # a miss needs no disk
    with pytest.raises(TierDown, match="Input/output"):
        tier.check_store(whole=False)
    faults.error.clear()
    assert not tier.check_store(), "it is readable, and nothing was written"
    assert hits(tier, keys) == [False] * 4 + [True] * 6
    assert all(fill(tier, keys))
    assert all(hits(tier, keys))


def test_one_bad_sector_is_one_miss(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_disk(4 << 20)
    keys = keys_of(10)
    assert all(fill(tier, keys))
    bad, preadv = list[int](), os.preadv

    def read(fd: int, buffers: Any, at: int) -> int:
        if at == (bad or [at])[0]:
            bad[:] = [at]
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", read)
    assert hits(tier, keys[3:4]) == [False], "no trouble of the disk"
    assert tier.report()["read_errors"] == 1
    assert tier.report()["refusals"] == {"Input/output error": 1}
    assert sum(hits(tier, keys)) == 9
    bad[:] = [-1]  # a disk replaces a bad sector when it is written
    assert all(fill(tier, keys))
    assert all(hits(tier, keys))


def test_a_lack_of_memory_to_read_into_gives_no_record_up(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, tier = keys_of(10), open_disk(4 << 20)
    assert all(fill(tier, keys))
    tier.close()
    tier = open_disk(4 << 20)  # no thread has memory yet

    def no_memory(*_: int) -> Buffer:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as lack:
        lack.setattr(reading, "huge_buffer", no_memory)
        with pytest.raises(TierDown, match="Cannot allocate memory"):
            hits(tier, keys[:4])
    assert tier.report()["read_errors"] == 0
    assert all(hits(tier, keys))
