"""The cap, on the disk's own word, at every step; who leaves; what is given back; what it costs."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bench.disk_capacity import Watch
from kvass.folder import Folder
from kvass.testing.tier_suite import data_of, fetch, same
from kvass.tiers.buffers import page_buffer
from kvass.tiers.disk import DiskTier, index, segment
from kvass.types import PAGE
from tests.tiers.conftest import OpenDisk
from tests.tiers.records import SHAPE, fill, hits, keys_of

MIB = 1 << 20


def on_disk(folder: Path) -> int:
    """What the file system says that the folder takes, itself included."""
    watch = Watch(folder)
    watch.look()
    return watch.most


# ---------------------------------------------------------------- the cap


@pytest.mark.parametrize("capacity", [MIB, 5 * MIB + 12_345])
def test_three_times_the_capacity_never_exceeds_it(
    folder: Path, open_disk: OpenDisk, capacity: int
) -> None:
    watch = Watch(folder)
    with watch.watching():
        turn_over(folder, open_disk, capacity)
    assert watch.most <= capacity
    assert on_disk(folder) >= capacity * 0.5, "so little is used that the test proves nothing"


def turn_over(folder: Path, open_disk: OpenDisk, capacity: int) -> None:
    tier = open_disk(capacity)
    shapes = [(100,), (5000, PAGE), (40_000,), (3 * PAGE, 3 * PAGE, 1)]
    written = step = 0
    while written < 3 * capacity:
        shape = shapes[step // 8 % 4]
        assert all(fill(tier, keys_of(10, f"step {step}"), shape))
        assert on_disk(folder) <= capacity
        written += 10 * sum(shape)
        step += 1
    assert all(hits(tier, keys_of(10, f"step {step - 1}"), shape))
    tier.close()
    tier = open_disk(capacity)
    assert all(fill(tier, keys_of(10, "after")))
    assert tier.report()["bytes"] <= capacity


def test_every_slot_written_out_of_order_stays_within_its_segments_estimate(
    folder: Path,
) -> None:
    """The worst for a file system's notes: every other slot of what was only allocated."""
    slots = 20_000
    made = segment.SegmentFile.create(Folder(folder), 1, 2 * PAGE, slots)
    page = page_buffer()
    for slot in range(0, slots, 2):
        made.write(slot, [page], list)
        made.set_entry(slot, slot + 1, 1)
    assert on_disk(folder) <= made.bytes
    made.close()


def test_a_smaller_capacity_gives_back_the_oldest_at_once(
    folder: Path, open_disk: OpenDisk
) -> None:
    tier = open_disk(16 * MIB)
    for i in range(9):
        assert all(fill(tier, keys_of(100, f"batch {i}")))
    tier.close()
    tier = open_disk(4 * MIB)
    assert on_disk(folder) <= 4 * MIB
    assert not any(hits(tier, keys_of(100, "batch 0")))
    assert all(hits(tier, keys_of(20, "batch 8")))


def test_deleting_and_clearing_gives_space_back(folder: Path, open_disk: OpenDisk) -> None:
    tier = open_disk(16 * MIB)
    empty = on_disk(folder)
    keys = keys_of(400)
    assert all(fill(tier, keys))
    full = on_disk(folder)
    tier.delete(keys[:399])
    assert on_disk(folder) < full / 3
    assert hits(tier, keys) == [False] * 399 + [True]
    assert all(fill(tier, keys))
    tier.clear()
    assert on_disk(folder) <= empty + PAGE  # the lock says who holds it
    assert tier.report()["bytes"] == 0


def test_a_record_that_fits_nowhere_is_refused_and_told_of_once(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_disk(MIB)
    big = np.zeros(MIB, np.uint8)
    assert tier.store([b"big", b"small"], [[big], [big[:100]]]) == [False, True]
    assert tier.store([b"big"], [[big]]) == [False]
    assert tier.report()["too_large"] == 2
    (line,) = caplog.messages
    assert "rows that take 1028KiB are not kept: one is more than the capacity" in line
    assert tier.store([b"most of it"], [[big[: MIB * 3 // 4]]]) == [True]


# ---------------------------------------------------------------- who leaves


def test_the_least_recently_used_leave_first(open_disk: OpenDisk) -> None:
    tier = open_disk(8 * MIB)
    keys = keys_of(400)
    assert all(fill(tier, keys))
    kept = keys[100:200]
    assert all(hits(tier, kept))
    for i in range(6):
        assert all(fill(tier, keys_of(40, f"more {i}")))
        assert all(hits(tier, kept))
    assert not any(tier.probe(keys[:50]))
    assert tier.report()["evicted"] > 50


def test_a_record_used_after_it_was_lined_up_to_leave_stays(open_disk: OpenDisk) -> None:
    tier = open_disk(8 * MIB, threads=1)
    keys = keys_of(600)
    assert all(fill(tier, keys))  # turns over: the oldest ones are lined up by now
    held = [key for key, there in zip(keys, tier.probe(keys), strict=True) if there]
    assert len(held) < 600
    used = held[:60:2]
    assert all(hits(tier, used))
    assert all(fill(tier, keys_of(50, "more")))
    assert all(tier.probe(used))


def test_a_new_size_gets_room_from_an_old_one(open_disk: OpenDisk) -> None:
    tier = open_disk(8 * MIB)
    old = keys_of(400, "old")
    assert all(fill(tier, old))
    new = keys_of(60, "new")
    for key in new:
        assert all(fill(tier, [key], (70_000,)))
    assert all(hits(tier, new, (70_000,)))
    assert 0 < sum(tier.probe(old)) < 300


# ---------------------------------------------------------------- what it costs


def test_a_hundred_thousand_rows_take_little_memory_and_come_back_by_the_tables(
    folder: Path, open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are entered into the index and the table without their bytes: what is measured is
    both. That a start needs no header is seen by forbidding to read one."""
    rows = 100_000
    for number in range(1, 5):
        made = segment.SegmentFile.create(Folder(folder), number, 2 * PAGE, rows // 4)
        for slot in range(made.slots):
            made.set_entry(slot, index.fingerprint(b"%d/%d" % (number, slot)), slot + 1)
        made.close()

    def forbidden(*_: object) -> bool:
        raise AssertionError("a header was read")

    monkeypatch.setattr(segment.SegmentFile, "get", forbidden)
    tracemalloc.start()
    tier = open_disk(1 << 30)
    gc.collect()
    used, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tier.report()["records"] == rows
    assert tier.probe([b"1/0", b"4/24999", b"4/25000"]) == [True, True, False]
    assert used <= 200 * rows
    assert most <= 200 * rows


def test_a_clock_that_was_set_back_makes_no_old_record_the_newer_one(
    open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_disk(16 * MIB)
    assert all(fill(tier, [b"key", b"other"]))
    tier.close()
    monkeypatch.setattr("kvass.tiers.disk.tier.time.time_ns", lambda: 1)
    tier = open_disk(16 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_erase", lambda self, place: None)  # it dies before that
        assert all(fill(tier, [b"key"], version=1))
    tier.close()
    assert same(fetch(open_disk(16 * MIB), b"key", SHAPE) or [], data_of(b"key", SHAPE, 1))
