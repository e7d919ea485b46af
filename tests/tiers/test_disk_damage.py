"""What is read back after any damage is right, or a miss, and the slot can be used again."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvass.errors import ConfigError
from kvass.folder import Folder
from kvass.tiers import codec
from kvass.tiers.disk import DiskTier, reading, segment
from kvass.tiers.disk.index import fingerprint
from kvass.types import PAGE
from tests.tiers.conftest import OpenDisk
from tests.tiers.records import fill, hits, keys_of

SLOT = 4 * PAGE
KEYS = keys_of(12)
PLENTY = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one segment of ``KEYS``, closed; never touched again."""
    folder = tmp_path_factory.mktemp("intact")
    tier = DiskTier(folder, 4 << 20)
    assert all(fill(tier, KEYS))
    tier.close()
    return folder


@pytest.fixture
def damaged(
    intact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Path, Path], None]], list[bool]]:
    """Copies the intact folder, damages (segment, table), and asks for all records.

    Through the page cache: the bytes are the same, and no copy has to reach the disk first.
    """
    monkeypatch.setattr(segment.SegmentFile, "_go_direct", lambda self: None)

    def hits_after(damage: Callable[[Path, Path], None]) -> list[bool]:
        folder = tmp_path / "copy"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(intact, folder)
        damage(folder / "00000001.seg", folder / "00000001.idx")
        tier = DiskTier(folder, 4 << 20)
        found = hits(tier, KEYS)
        tier.close()
        tier = DiskTier(folder, 4 << 20)
        assert hits(tier, KEYS) == found  # what one boot made of it is as good for the next
        assert all(fill(tier, KEYS)), "what was damaged cannot be stored again"
        assert all(hits(tier, KEYS))
        tier.close()
        return found

    return hits_after


Damaged = Callable[[Callable[[Path, Path], None]], list[bool]]


def flip(path: Path, at: int, bits: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bits]))


@PLENTY
@given(at=st.integers(0, PAGE + 12 * SLOT - 1), bits=st.integers(1, 255))
def test_a_flipped_byte_costs_its_record_at_most(damaged: Damaged, at: int, bits: int) -> None:
    found = damaged(lambda seg, idx: flip(seg, at, bits))
    assert found.count(False) <= 1 or at < PAGE  # without its first page a segment is none


@pytest.mark.parametrize("byte", [0, 9, 20, 31, 40, 60, PAGE, PAGE + 4999, 3 * PAGE, SLOT - 1])
def test_a_flipped_byte_of_header_or_shard_is_a_miss(damaged: Damaged, byte: int) -> None:
    found = damaged(lambda seg, idx: flip(seg, PAGE + 3 * SLOT + byte, 1))
    assert found.count(False) == 1


def test_without_checksums_a_flipped_byte_would_be_served(
    damaged: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above: they see wrong bytes if the tier serves them."""
    monkeypatch.setattr(reading, "payload_checksum", lambda parts: 0 * sum(map(len, parts)))
    real = codec.decode_header

    def forgiving(raw: bytes | memoryview) -> object:
        header = real(raw)
        return None if header is None else codec.Header(header.key, header.lengths, 1, 0)

    monkeypatch.setattr(reading, "decode_header", forgiving)
    with pytest.raises(AssertionError, match="wrong bytes"):
        damaged(lambda seg, idx: flip(seg, PAGE + 3 * SLOT + PAGE, 1))


@PLENTY
@given(size=st.integers(0, PAGE + 12 * SLOT))
def test_a_truncated_segment_serves_what_is_left(damaged: Damaged, size: int) -> None:
    found = damaged(lambda seg, idx: os.truncate(seg, size))
    whole = max(0, (size - PAGE) // SLOT)
    assert whole <= found.count(True) <= whole + 1  # the last page of one may be padding


# ---------------------------------------------------------------- the table


@PLENTY
@given(at=st.integers(0, PAGE + 12 * 24 - 1), length=st.integers(1, 600), seed=st.integers(0, 99))
def test_a_torn_table_costs_what_it_named(
    damaged: Damaged, at: int, length: int, seed: int
) -> None:
    garbage = np.random.default_rng(seed).bytes(length)

    def tear(seg: Path, idx: Path) -> None:
        raw = bytearray(idx.read_bytes())
        raw[at : at + length] = garbage if seed else bytes(length)
        idx.write_bytes(raw)

    torn = (at + length - PAGE) // 24 - (at - PAGE) // 24 + 1
    assert damaged(tear).count(False) <= torn or at < PAGE  # without its first page it is none


@pytest.mark.parametrize("size", [0, PAGE - 1, PAGE, PAGE + 12, PAGE + 24 * 5 + 3])
def test_a_truncated_table_costs_what_is_gone(damaged: Damaged, size: int) -> None:
    left = max(0, size - PAGE) // 24
    assert left <= damaged(lambda seg, idx: os.truncate(idx, size)).count(True) <= left + 1


@pytest.mark.parametrize("how", ["lost", "another segment's"])
def test_without_its_table_a_segment_is_empty(damaged: Damaged, tmp_path: Path, how: str) -> None:
    (tmp_path / "other").mkdir()
    tier = DiskTier(tmp_path / "other", 4 << 20)
    fill(tier, keys_of(200, "strange"))
    tier.close()
    table = max((tmp_path / "other").glob("*.idx"))
    assert table.name != "00000001.idx"

    def replace(seg: Path, idx: Path) -> None:
        idx.unlink()
        if how != "lost":
            shutil.copyfile(table, idx)

    assert not any(damaged(replace))


def test_an_entry_that_cannot_be_right_is_a_free_slot(damaged: Damaged) -> None:
    def spoil(seg: Path, idx: Path) -> None:
        raw = bytearray(idx.read_bytes())
        raw[PAGE : PAGE + 16] = struct.pack("<QQ", 5, (1 << 63) - 1)  # no later stamp has a place
        idx.write_bytes(raw)

    assert damaged(spoil).count(False) == 1


@pytest.mark.parametrize(
    ("sequence", "size"), [((1 << 62) - 1, 16), ((1 << 62) - 1, 24), ((1 << 61) - 1, 24)]
)
def test_a_damaged_sequence_number_costs_its_record_and_none_of_later(
    folder: Path, open_disk: OpenDisk, sequence: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All later ones are above it: no process may begin where the next one believes nothing.

    ``size``: 24 for an entry that was stored without a checksum.
    """
    tier = open_disk(16 << 20)
    assert all(fill(tier, keys_of(24)))
    tier.close()
    [table] = folder.glob("*.idx")
    raw = bytearray(table.read_bytes())
    raw[PAGE + 8 : PAGE + size] = struct.pack("<QQ", sequence, 0)[: size - 8]
    table.write_bytes(raw)
    tier = open_disk(16 << 20)
    lost = sequence >= 1 << 61
    assert hits(tier, keys_of(24)).count(False) == lost
    assert caplog.text.count("damaged entries: 1;") == lost
    assert all(fill(tier, keys_of(48)))
    tier.close()
    for _ in range(2):
        tier = open_disk(16 << 20)
        assert hits(tier, keys_of(48)).count(True) == 48
        tier.close()


@pytest.mark.parametrize("clock_ns", [1 << 62, (1 << 63) - 1])
def test_a_clock_that_is_far_ahead_loses_nothing(
    folder: Path, open_disk: OpenDisk, clock_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: clock_ns)
        tier = open_disk(4 << 20)
        assert all(fill(tier, KEYS))
        tier.close()
    assert all(hits(open_disk(4 << 20), KEYS))


def test_every_flipped_bit_of_an_entry_is_noticed(tmp_path: Path) -> None:
    file = segment.SegmentFile.create(Folder(tmp_path), 1, SLOT, 2)
    file.set_entry(0, 99, 10)
    right = (tmp_path / "00000001.idx").read_bytes()[PAGE : PAGE + 24]
    for bit in range(24 * 8):
        flip(tmp_path / "00000001.idx", PAGE + bit // 8, 1 << bit % 8)
        fingerprints, sequences, damaged = file.entries()
        assert (*fingerprints, *sequences, damaged) == (0, 0, 0, 0, 1), bit
        flip(tmp_path / "00000001.idx", PAGE + bit // 8, 1 << bit % 8)
    with (tmp_path / "00000001.idx").open("r+b") as table:
        table.seek(PAGE)
        table.write(bytes(24) + right)
    assert file.entries()[2] == 1, "it stands at another slot"
    file.close()


def test_entries_of_before_they_had_checksums_are_found(damaged: Damaged) -> None:
    def blank(seg: Path, idx: Path) -> None:
        raw = np.frombuffer(bytearray(idx.read_bytes()), "<u8")
        raw[PAGE // 8 + 2 :: 3] = 0
        idx.write_bytes(raw.tobytes())

    assert all(damaged(blank))


def test_entries_of_other_slots_are_no_wrong_bytes(damaged: Damaged) -> None:
    def swap(seg: Path, idx: Path) -> None:
        raw = bytearray(idx.read_bytes())
        a, b = PAGE + 2 * 24, PAGE + 7 * 24
        raw[a : a + 24], raw[b : b + 24] = raw[b : b + 24], raw[a : a + 24]
        idx.write_bytes(raw)

    assert damaged(swap).count(False) == 2


def test_a_table_of_yesterday_gives_misses(folder: Path, open_disk: OpenDisk) -> None:
    """A power loss may keep slots and lose the entries written after them."""
    tier = open_disk(4 << 20)
    fill(tier, KEYS)
    tier.close()
    old = {path: path.read_bytes() for path in folder.glob("*.idx")}
    tier = open_disk(4 << 20)
    tier.delete(KEYS[:6])
    fill(tier, keys_of(6, "new"))
    fill(tier, KEYS[6:9], version=1)
    tier.close()
    for path, raw in old.items():
        path.write_bytes(raw)
    tier = open_disk(4 << 20)
    found = hits(tier, KEYS, versions=2)
    assert not any(found[:6])
    assert all(found[9:])
    hits(tier, keys_of(6, "new"))
    assert all(fill(tier, KEYS + keys_of(6, "new")))
    assert all(hits(tier, KEYS + keys_of(6, "new")))


# ---------------------------------------------------------------- damage while it is open


def test_damage_under_a_live_tier_is_seen(folder: Path, open_disk: OpenDisk) -> None:
    tier = open_disk(4 << 20)
    fill(tier, KEYS)
    assert all(hits(tier, KEYS))
    flip(folder / "00000001.seg", PAGE + 3 * SLOT + PAGE, 1)
    assert hits(tier, KEYS).count(False) == 1
    assert tier.report()["damaged"] == 1
    assert tier.probe(KEYS).count(False) == 1
    assert all(fill(tier, KEYS))
    assert all(hits(tier, KEYS))


# ---------------------------------------------------------------- formats and strangers


def test_the_formats_are_frozen(intact: Path, tmp_path: Path) -> None:
    """Folders of an earlier release open: these bytes never change."""
    first, table = (intact / "00000001.seg").read_bytes(), (intact / "00000001.idx").read_bytes()
    described = "6b766173737365670100000001000000" + "0040000000000000" + "0f00000000000000"
    assert first[:40].hex() == described + "26d1db9297c3405a"
    assert table[:PAGE] == first[:PAGE]
    assert first[PAGE : PAGE + 10] == b"kvassrec\1\0"
    assert table[PAGE : PAGE + 8] == fingerprint(KEYS[0]).to_bytes(8, "little")
    assert not any(table[PAGE + 12 * 24 :])
    file = segment.SegmentFile.create(Folder(tmp_path), 7, SLOT, 3)
    file.set_entry(2, 0x123456789ABCDEF, 1_800_000_000_000_000_000)
    file.close()
    entry = (tmp_path / "00000007.idx").read_bytes()[PAGE + 2 * 24 : PAGE + 3 * 24]
    assert entry.hex() == "efcdab8967452301" + "0000b49376e2fa18" + "5133643035ad62a8"


def test_a_newer_format_is_refused_and_left_alone(
    folder: Path, open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(segment, "FORMAT", segment.FORMAT + 1)
        tier = open_disk(4 << 20)
        fill(tier, KEYS)
        tier.close()
    before = {path.name: path.stat().st_size for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="newer kvass"):
        DiskTier(folder, 4 << 20)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == before


def test_an_older_format_makes_room(
    folder: Path, open_disk: OpenDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(segment, "FORMAT", segment.FORMAT - 1)
        tier = open_disk(4 << 20)
        fill(tier, KEYS)
        tier.close()
    tier = open_disk(4 << 20)
    assert not any(hits(tier, KEYS))
    assert list(folder.glob("*.seg")) == []


def test_a_file_with_the_highest_number_is_no_end(folder: Path, open_disk: OpenDisk) -> None:
    """What is not a segment says nothing about the number of the next one."""
    (folder / "ffffffff.seg").write_text("not a segment")
    tier = open_disk(4 << 20)
    assert all(fill(tier, KEYS))
    tier.close()
    assert all(hits(open_disk(4 << 20), KEYS))


def test_files_of_others_are_left_alone(folder: Path, open_disk: OpenDisk) -> None:
    names = ["README", "00000001.txt", "zzzzzzzz.seg", "0000000a.seg.bak"]
    for name in names:
        (folder / name).write_text("mine")
    tier = open_disk(4 << 20)
    fill(tier, KEYS)
    tier.clear()
    tier.close()
    open_disk(4 << 20).close()
    assert [(folder / name).read_text() for name in names] == ["mine"] * 4
