"""Keys, headers, records in one piece: what is not exactly what was written is none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.errors import UsageError
from kvass.testing.tier_suite import data_of, room_for, same
from kvass.tiers.base import MAX_KEY_BYTES, MAX_SHARDS
from kvass.tiers.codec import (
    MAX_HEADER_BYTES,
    Header,
    decode_header,
    encode_header,
    pack,
    payload_checksum,
    record_key,
    unpack,
)
from kvass.types import PAGE

U64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    Header,
    key=st.binary(min_size=1, max_size=MAX_KEY_BYTES),
    lengths=st.lists(U64, max_size=MAX_SHARDS).map(tuple),
    sequence=U64,
    payload_checksum=U64,
)


@given(headers, st.binary(max_size=64))
def test_a_header_says_what_it_was_told(header: Header, behind: bytes) -> None:
    raw = encode_header(header)
    assert len(raw) <= MAX_HEADER_BYTES <= PAGE
    assert decode_header(raw + behind) == header


@given(headers, st.data())
@settings(max_examples=300)
def test_one_flipped_bit_or_a_missing_end_is_no_header(header: Header, data: st.DataObject) -> None:
    raw = bytearray(encode_header(header))
    at = data.draw(st.integers(0, len(raw) * 8 - 1))
    assert decode_header(bytes(raw[: at // 8])) is None
    raw[at // 8] ^= 1 << at % 8
    assert decode_header(bytes(raw)) is None


@given(st.binary(max_size=200))
def test_garbage_is_no_header(raw: bytes) -> None:
    assert decode_header(raw) is None
    assert decode_header(b"kvassrec\1\0" + raw) is None


def test_a_header_of_another_format_is_none() -> None:
    raw = encode_header(Header(b"k", (1,), 1, 1))
    assert raw[8:10] == b"\1\0"
    from xxhash import xxh3_64_intdigest

    body = raw[:8] + b"\2\0" + raw[10:-8]
    assert decode_header(body + xxh3_64_intdigest(body).to_bytes(8, "little")) is None


def test_the_formats_are_frozen() -> None:
    """What an earlier release wrote is read: these bytes never change."""
    key = record_key(bytes(range(32)), 7, 2, b"chunkhash")
    assert key.hex() == bytes(range(32)).hex() + "0000000000000007" + "0002" + b"chunkhash".hex()
    shards = [np.frombuffer(b"abc", np.uint8), np.frombuffer(b"defg", np.uint8)]
    assert payload_checksum(shards) == payload_checksum([np.frombuffer(b"abcdefg", np.uint8)])
    raw = encode_header(Header(b"key", (3, 4), 5, payload_checksum(shards)))
    assert raw.hex() == (
        "6b76617373726563" "0100" "0300" "02000000" "0500000000000000" "2f054cd43fdc405a"
        "6b6579" "0300000000000000" "0400000000000000" "393b502c08814d39"
    )  # fmt: skip


def test_epoch_and_group_are_part_of_the_key() -> None:
    one = {
        record_key(bytes([n]) * 32, e, g, c)
        for n in (1, 2)
        for e in (0, 1)
        for g in (0, 1)
        for c in (b"a" * 8, b"b" * 8)
    }
    assert len(one) == 16


@pytest.mark.parametrize(
    ("namespace", "epoch", "group", "chunk"),
    [
        (b"short", 0, 0, b"x" * 16),
        (b"n" * 32, -1, 0, b"x" * 16),
        (b"n" * 32, 2**64, 0, b"x" * 16),
        (b"n" * 32, 0, 65536, b"x" * 16),
        (b"n" * 32, 0, 0, b"x" * 7),
        (b"n" * 32, 0, 0, b"x" * 33),
    ],
)
def test_parts_out_of_bounds_are_refused(
    namespace: bytes, epoch: int, group: int, chunk: bytes
) -> None:
    with pytest.raises(UsageError):
        record_key(namespace, epoch, group, chunk)


# ---------------------------------------------------------------- a record in one piece

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
