"""Keys and headers: whatever is not exactly what was written is no header."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.errors import UsageError
from kvass.tiers.base import MAX_KEY_BYTES, MAX_SHARDS
from kvass.tiers.codec import (
    MAX_HEADER_BYTES,
    Header,
    decode_header,
    encode_header,
    payload_check,
    record_key,
)
from kvass.types import PAGE

U64 = st.integers(0, 2**64 - 1)
headers = st.builds(
    Header,
    key=st.binary(min_size=1, max_size=MAX_KEY_BYTES),
    lengths=st.lists(U64, max_size=MAX_SHARDS).map(tuple),
    sequence=U64,
    payload_check=U64,
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
    assert payload_check(shards) == payload_check([np.frombuffer(b"abcdefg", np.uint8)])
    raw = encode_header(Header(b"key", (3, 4), 5, payload_check(shards)))
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
