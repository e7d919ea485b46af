"""Bulk work in turns: the same bytes, and others have the processor in between."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvass.errors import TierDown
from kvass.folder import Folder
from kvass.testing.tier_suite import data_of, fetch, room_for, same
from kvass.tiers import pacing
from kvass.tiers.base import Buffer
from kvass.tiers.buffers import page_buffer
from kvass.tiers.codec import payload_checksum
from kvass.tiers.disk import DiskTier, reading
from kvass.tiers.disk import tier as disk_tier
from kvass.tiers.disk.reading import SlotReader, ThreadMemory
from kvass.tiers.disk.segment import SegmentFile
from kvass.tiers.pacing import CHECKSUM_BYTES as CHECK
from kvass.tiers.pacing import IO_BYTES, paced, yield_cpu
from kvass.types import PAGE
from tests.tiers.conftest import OpenDisk
from tests.tiers.system_calls import Calls

Count = Callable[[], int]
TURN = 3 * PAGE
LARGE = (2 * IO_BYTES + 5 * PAGE,)


@pytest.fixture
def given_way(monkeypatch: pytest.MonkeyPatch) -> Count:
    """How often way was given."""
    times: list[None] = []
    for module in ("pacing", "disk.segment"):
        monkeypatch.setattr(f"kvass.tiers.{module}.yield_cpu", lambda: times.append(None))
    return lambda: len(times)


def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("segment", "reading"):
        monkeypatch.setattr(f"kvass.tiers.disk.{module}.IO_BYTES", TURN)


def noise(size: int, seed: int) -> Buffer:
    made = page_buffer(size)
    made[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return made


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 23])
def test_turns_are_all_of_it_and_way_is_given_between_them(given_way: Count, size: int) -> None:
    data = noise(size, 1)
    assert b"".join(paced(data, 8)) == data.tobytes()
    assert given_way() == max(0, -(-size // 8) - 1)


class Clock:
    """Time stands still but for what a turn of others takes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.yields, self.away_s = time.monotonic() + 1, 0, 0.0
        patch.setattr(pacing, "_thread", type(pacing._thread)())
        patch.setattr(time, "monotonic", lambda: self.now)
        patch.setattr(os, "sched_yield", self._yield)

    def _yield(self) -> None:
        self.yields += 1
        self.now += self.away_s


@pytest.mark.parametrize(
    ("away_s", "working_s"), [(0.0, 0.0), (4e-6, 1e-6), (4e-4, 1e-4), (0.004, 2e-4), (1.0, 2e-4)]
)
def test_who_waited_for_long_works_for_a_while(
    monkeypatch: pytest.MonkeyPatch, away_s: float, working_s: float
) -> None:
    clock = Clock(monkeypatch)
    clock.away_s = away_s
    yield_cpu()
    assert clock.yields == 1
    clock.now += working_s * 0.9
    yield_cpu()
    assert clock.yields == (2 if working_s == 0 else 1)
    clock.now += working_s * 0.2
    before = clock.yields
    yield_cpu()
    assert clock.yields == before + 1


@pytest.mark.parametrize("sizes", [(0,), (CHECK,), (CHECK + 1, 3), (5, 3 * CHECK - 1)])
def test_a_checksum_in_turns_is_the_checksum(given_way: Count, sizes: tuple[int, ...]) -> None:
    shards = [noise(size, size) for size in sizes]
    assert payload_checksum(shards) == xxhash.xxh3_64_intdigest(
        b"".join(s.tobytes() for s in shards)
    )
    assert given_way() == sum(max(0, -(-size // CHECK) - 1) for size in sizes)


@pytest.mark.parametrize("pages", [(1,), (2,), (4,), (1, 3), (1, 3, 1), (2, 6), (1, 1, 1, 1, 4)])
def test_a_slot_is_written_and_read_in_turns(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given_way: Count, pages: tuple[int, ...]
) -> None:
    short_turns(monkeypatch)
    slot, slots = (1 + sum(pages)) * PAGE, 3
    file = SegmentFile.create(Folder(folder), 1, slot, slots)
    written, read = Calls(monkeypatch, "pwritev"), Calls(monkeypatch, "preadv")
    parts = [[noise(n * PAGE, 100 * i + k) for k, n in enumerate(pages)] for i in range(slots)]
    for i in reversed(range(slots)):
        file.write(i, [page_buffer(), *parts[i]], list)
    into = [page_buffer(n * PAGE) for n in pages]
    reader = SlotReader(ThreadMemory())
    for i in range(slots):
        assert sum(len(part) for part, _ in reader.read(file, i, into)) == slot
        assert same(into, parts[i])
    file.close()
    assert sorted(written.sizes) == sorted(read.sizes)
    assert max(written.sizes) <= TURN
    turns = -(-slot // TURN)
    assert len(written.sizes) == slots * turns
    assert given_way() == 2 * slots * (turns - 1)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_turn_of_a_write_that_ends_early_fails_the_record(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    tier = open_disk()
    assert tier.store([b"a"], [data_of(b"a", LARGE)]) == [True]
    with monkeypatch.context() as patch:
        calls = Calls(patch, "pwritev", nth)
        with pytest.raises(TierDown, match=r"wrote \d+ of"):
            tier.store([b"b"], [data_of(b"b", LARGE)])
        assert len(calls.sizes) == nth  # nothing is written behind a hole
    assert fetch(tier, b"b", LARGE) is None
    assert same(fetch(tier, b"a", LARGE) or [], data_of(b"a", LARGE))
    assert tier.report()["write_errors"] == 1


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_turn_of_a_read_that_ends_early_is_a_miss(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    tier = open_disk()
    assert tier.store([b"a"], [data_of(b"a", LARGE)]) == [True]
    assert same(fetch(tier, b"a", LARGE) or [], data_of(b"a", LARGE))
    with monkeypatch.context() as patch:
        calls = Calls(patch, "preadv", nth)
        assert fetch(tier, b"a", LARGE) is None
        assert len(calls.sizes) == nth
    assert tier.report()["damaged"] == 1


SHORT_TURNS = (5 * PAGE, 2 * PAGE)
"""Whole pages, so that nothing is copied; with a header of a page three turns of ``TURN``."""


@pytest.fixture
def in_turns(open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch) -> DiskTier:
    """A tier with two such records."""
    short_turns(monkeypatch)
    tier = open_disk(4 << 20)
    for key in (b"a", b"other"):
        assert tier.store([key], [aligned(key)]) == [True]
    return tier


def aligned(key: bytes) -> list[Buffer]:
    made = room_for(SHORT_TURNS, aligned=True)
    for buffer, data in zip(made, data_of(key, SHORT_TURNS), strict=True):
        buffer[:] = data
    return made


def got(tier: DiskTier, key: bytes) -> list[Buffer] | None:
    into = room_for(SHORT_TURNS, aligned=True)
    return into if tier.load([key], [into]) == [True] else None


def test_each_turn_is_checked_before_the_next(
    in_turns: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, read = Calls(monkeypatch, "pwritev"), Calls(monkeypatch, "preadv")
    seen: list[tuple[int, int]] = []

    def check(parts: Iterable[Buffer]) -> int:
        def noted(part: Buffer) -> Buffer:
            seen.append((len(written.sizes), len(read.sizes)))
            return part

        return payload_checksum(map(noted, parts))

    for module in (disk_tier, reading):
        monkeypatch.setattr(module, "payload_checksum", check)
    assert in_turns.store([b"b"], [aligned(b"b")]) == [True]
    assert seen == [(0, 0), (1, 0), (2, 0)]
    assert written.sizes == [TURN, 2 * PAGE, TURN]  # the one with the header is the last
    seen.clear()
    assert same(got(in_turns, b"b") or [], data_of(b"b", SHORT_TURNS))
    assert seen == [(3, 1), (3, 2), (3, 3)]


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "control"])
@pytest.mark.parametrize("page", range(1, 8))
def test_a_byte_that_differs_in_any_turn_is_a_miss(
    in_turns: DiskTier, folder: Path, monkeypatch: pytest.MonkeyPatch, page: int, checked: bool
) -> None:
    with (folder / "00000001.seg").open("r+b", buffering=0) as file:
        file.seek(at := PAGE + page * PAGE + 77)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    if not checked:
        right = payload_checksum(data_of(b"a", SHORT_TURNS))
        monkeypatch.setattr(reading, "payload_checksum", lambda parts: right + 0 * len([*parts]))
    found = got(in_turns, b"a")
    assert (found is None) == checked
    assert found is None or not same(found, data_of(b"a", SHORT_TURNS))


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_slot_that_was_half_written_over_gives_nothing_wrong(
    in_turns: DiskTier,
    folder: Path,
    open_disk: OpenDisk,
    monkeypatch: pytest.MonkeyPatch,
    turns: int,
) -> None:
    """As after a power loss: the table still names the record that was there before. With three
    turns the slot has the new one."""
    table = folder / "00000001.idx"
    names_a = table.read_bytes()
    in_turns.delete([b"a"])
    left, write = iter(range(turns)), os.pwritev

    def limited(fd: int, parts: list[memoryview], at: int) -> int:
        if next(left, None) is None:
            raise OSError(errno.EIO, "no more")
        return write(fd, parts, at)

    monkeypatch.setattr(os, "pwritev", limited)
    with nullcontext() if turns == 3 else pytest.raises(TierDown, match="no more"):
        in_turns.store([b"b"], [aligned(b"b")])
    in_turns.close()
    table.write_bytes(names_a)
    tier = open_disk(4 << 20)
    found = got(tier, b"a")
    assert (found is None) == (turns > 0)
    assert found is None or same(found, data_of(b"a", SHORT_TURNS))
    assert got(tier, b"b") is None
