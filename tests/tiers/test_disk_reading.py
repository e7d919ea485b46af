"""A record that was read through memory of the tier has the same bytes as one that was not, and the
faster way is chosen."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.folder import Folder
from kvass.testing.tier_suite import data_of, room_for, same
from kvass.tiers.base import Buffer
from kvass.tiers.buffers import huge_buffer, page_buffer
from kvass.tiers.codec import payload_checksum
from kvass.tiers.disk import DiskTier, choice, reading
from kvass.tiers.disk.choice import AGAIN, MEASURED, TURN, Choice
from kvass.tiers.disk.reading import SlotReader, ThreadMemory
from kvass.tiers.disk.segment import SegmentFile
from kvass.types import PAGE
from tests.tiers.conftest import OpenDisk
from tests.tiers.system_calls import Calls

PIECE = 3 * PAGE
SHAPES = [
    (PAGE,),
    (2 * PAGE,),
    (3 * PAGE,),
    (8 * PAGE,),
    (9 * PAGE,),
    (2 * PAGE, PAGE, 6 * PAGE),
    (PAGE, 7 * PAGE, PAGE, PAGE),
    (1,),
    (PAGE - 1, 0, PAGE + 1),
    (3 * PAGE + 5, 7, 4 * PAGE),
]
WHOLE = (5 * PAGE, 3 * PAGE)
"""Three pieces with the header's page."""


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of three pages, all of which may be staged. The page cache counts as direct, so any
    folder will do."""
    for module in ("segment", "reading"):
        monkeypatch.setattr(f"kvass.tiers.disk.{module}.IO_BYTES", PIECE)
    monkeypatch.setattr(reading, "LEAST_STAGED", PAGE)
    monkeypatch.setattr(reading, "CHECKSUM_BYTES", PAGE)
    monkeypatch.setattr(SegmentFile, "_go_direct", lambda self: setattr(self, "direct", True))


@pytest.fixture(params=[True, False], ids=["staged", "direct"])
def staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    way: bool = request.param
    monkeypatch.setattr(Choice, "staged", lambda self: way)
    return way


def stored(tier: DiskTier, key: bytes, shape: tuple[int, ...]) -> list[Buffer]:
    data = room_for(shape, aligned=True)
    for shard, right in zip(data, data_of(key, shape), strict=True):
        shard[:] = right
    assert tier.store([key], [data]) == [True]
    return data


def loaded(tier: DiskTier, key: bytes, shape: tuple[int, ...]) -> list[Buffer] | None:
    into = room_for(shape, aligned=True)
    return into if tier.load([key], [into]) == [True] else None


def test_both_ways_give_the_bytes_of_all_shapes(open_disk: OpenDisk, staged: bool) -> None:
    """Also in memory in which a longer record was before."""
    tier = open_disk(4 << 20, threads=1)
    for shape in (*SHAPES, *reversed(SHAPES)):
        right = stored(tier, repr(shape).encode(), shape)
        assert same(loaded(tier, repr(shape).encode(), shape) or [], right)


def test_the_disk_writes_where_the_choice_says(
    open_disk: OpenDisk, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk(4 << 20, threads=1)
    stored(tier, b"a", WHOLE)
    calls: list[int] = []
    real = os.preadv

    def counted(fd: int, parts: Any, at: int) -> int:
        calls.append(len(parts))
        return real(fd, parts, at)

    monkeypatch.setattr(os, "preadv", counted)
    assert loaded(tier, b"a", WHOLE)
    assert calls == ([1, 1, 1] if staged else [2, 1, 1])


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_piece_that_ends_early_is_a_miss(
    open_disk: OpenDisk, staged: bool, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The thread's memory has the right bytes of the rest, from the load before."""
    tier = open_disk(4 << 20, threads=1)
    right = stored(tier, b"a", WHOLE)
    assert same(loaded(tier, b"a", WHOLE) or [], right)
    with monkeypatch.context() as patch:
        calls = Calls(patch, "preadv", nth)
        assert loaded(tier, b"a", WHOLE) is None
        assert len(calls.sizes) == nth
    assert tier.report()["damaged"] == 1


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "control"])
@pytest.mark.parametrize("page", [1, 3, 8])
def test_a_bit_that_differs_is_a_miss(
    open_disk: OpenDisk,
    folder: Path,
    staged: bool,
    monkeypatch: pytest.MonkeyPatch,
    page: int,
    checked: bool,
) -> None:
    tier = open_disk(4 << 20, threads=1)
    right = stored(tier, b"a", WHOLE)
    with (folder / "00000001.seg").open("r+b", buffering=0) as file:
        file.seek(at := PAGE + page * PAGE + 77)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    if not checked:
        value = payload_checksum(right)
        monkeypatch.setattr(reading, "payload_checksum", lambda parts: value + 0 * len([*parts]))
    found = loaded(tier, b"a", WHOLE)
    assert (found is None) == checked
    assert found is None or not same(found, right)


@pytest.mark.parametrize("huge", [True, False])
def test_memory_of_a_thread_needs_no_huge_pages(
    monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    class Memory(mmap.mmap):
        def madvise(self, *about: int) -> None:
            asked.append(about)
            if not huge:
                raise OSError(errno.EINVAL, "no huge pages here")

    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(mmap, "mmap", Memory)
    made = huge_buffer(5 * PAGE)
    assert asked == [(mmap.MADV_HUGEPAGE,)]
    assert made.ctypes.data % (2 << 20) == 0
    assert made.shape == (5 * PAGE,)
    made[:] = 1


class Disk:
    """A segment of one slot of a piece, and a clock: a read takes ``direct_s`` or ``staged_s``."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.direct_s = self.staged_s = 1.0
        self.ways: list[bool] = []
        self.memory = ThreadMemory()
        self.into = [page_buffer(PIECE - PAGE)]
        self.file = SegmentFile.create(Folder(folder), 1, PIECE, 1)
        self.reader = SlotReader(self.memory, lambda: self.now)
        self._real = os.preadv
        patch.setattr(os, "preadv", self._read)

    def _read(self, fd: int, parts: Any, at: int) -> int:
        self.ways.append(len(parts) == 1)
        self.now += self.staged_s if self.ways[-1] else self.direct_s
        return self._real(fd, parts, at)

    def read(self, times: int) -> list[bool]:
        """Whether each of so many reads was staged."""
        self.ways.clear()
        for _ in range(times):
            assert sum(len(source) for source, _ in self.reader.read(self.file, 0, self.into))
        return self.ways[:]


@pytest.fixture
def disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(folder, monkeypatch)
    yield made
    made.file.close()


IN_TURNS = [n // TURN % 2 == 0 for n in range(MEASURED)]


@pytest.mark.parametrize(
    ("direct_s", "staged_s", "better"),
    [(1.0, 0.5, True), (1.0, 0.89, True), (1.0, 0.91, False), (1.0, 1.0, False), (0.5, 1.0, False)],
)
def test_the_faster_way_is_chosen_after_turns(
    disk: Disk, direct_s: float, staged_s: float, better: bool
) -> None:
    disk.direct_s, disk.staged_s = direct_s, staged_s
    assert disk.read(MEASURED) == IN_TURNS
    assert disk.read(100) == [better] * 100


def test_it_is_measured_again(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "AGAIN", 2 * MEASURED)
    assert 4 * MEASURED < AGAIN
    disk.staged_s = 0.5
    assert disk.read(2 * MEASURED) == IN_TURNS + [True] * MEASURED
    disk.direct_s = 0.25
    assert disk.read(2 * MEASURED) == IN_TURNS + [False] * MEASURED


def test_reads_that_fail_delay_the_choice(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not made of fewer times than the others, and turns go on until there are enough."""
    disk.staged_s = 0.5
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: read(fd, parts, at) - 1)
    assert [*disk.reader.read(disk.file, 0, disk.into)] == []
    monkeypatch.setattr(os, "preadv", read)
    assert disk.read(MEASURED - 1) == IN_TURNS[1:]
    assert disk.read(100) == [True] * 100


def test_that_some_reads_are_slow_changes_nothing(disk: Disk) -> None:
    disk.staged_s = 100.0
    disk.read(TURN - 1)
    disk.staged_s = 0.5
    disk.read(MEASURED)
    assert all(disk.read(100))


def small(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reading, "LEAST_STAGED", PIECE + PAGE)


def cached(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    disk.file.direct = False


@pytest.mark.parametrize("why", [small, cached])
def test_small_pieces_and_the_page_cache_are_never_staged(
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    why: Callable[[Disk, pytest.MonkeyPatch], None],
) -> None:
    why(disk, monkeypatch)
    disk.staged_s = 0.1
    assert not any(disk.read(2 * MEASURED))
