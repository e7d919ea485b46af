"""A record in one piece: whole, whatever way it comes; or not at all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvass.testing.tier_suite import data_of, room_for, same
from kvass.tiers.codec import MAX_HEADER_BYTES, pack, unpack

SHAPES = [(), (0,), (1,), (700,), (4096, 0, 17, 5000), (64,) * 128, (100_000, 0, 50_000)]


def chunks(raw: bytes, size: int) -> Iterator[bytes]:
    """As a tier gets them: all but the last are at least of a size that holds any header."""
    return (raw[i : i + size] for i in range(0, len(raw), size))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 4096, 1 << 20])
def test_it_comes_back_in_any_chunks(shape: tuple[int, ...], size: int) -> None:
    want = data_of(b"key", shape)
    raw = bytes(pack(b"key", want))
    into = room_for(shape)
    assert unpack(b"key", len(raw), chunks(raw, size), into) is True
    assert same(into, want)


def test_any_flipped_byte_any_length_any_other_key_is_seen() -> None:
    shape = (900, 0, 150)
    raw = bytes(pack(b"key", data_of(b"key", shape)))
    into = room_for(shape)
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 1 << at % 8
        assert unpack(b"key", len(bad), chunks(bytes(bad), 4096), into) is None, at
    for cut in range(len(raw)):
        assert unpack(b"key", cut, chunks(raw[:cut], 4096), into) is None, cut
    assert unpack(b"key", len(raw) + 1, chunks(raw + b"\0", 4096), into) is None
    assert unpack(b"kex", len(raw), chunks(raw, 4096), into) is None


def test_a_size_that_was_a_lie_is_seen() -> None:
    """Fewer or more bytes than were announced, and nothing outside the buffers is touched."""
    shape = (900, 150)
    raw = bytes(pack(b"key", data_of(b"key", shape)))
    for sent in (raw[:-1], raw[:-151], raw + b"\0", raw + bytes(9000)):
        assert unpack(b"key", len(raw), chunks(sent, 4096), room_for(shape)) is None


def test_other_lengths_are_another_record() -> None:
    raw = bytes(pack(b"key", data_of(b"key", (900, 150))))
    for shape in [(), (900,), (150, 900), (1050,), (900, 150, 0), (900, 149)]:
        into = room_for(shape)
        assert unpack(b"key", len(raw), chunks(raw, 4096), into) is False
        assert all((shard == 0xA5).all() for shard in into)
        cut = len(raw) - 1  # damaged, whoever asks
        assert unpack(b"key", cut, chunks(raw[:cut], 4096), into) is None
