"""Parts are counted as a decoder finds them, and a large frame of small ones is not decoded."""

from __future__ import annotations

from struct import pack
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.errors import FrameError
from kvass.messages import Ping, Reserve, ReserveItem
from kvass.types import Limits
from kvass.wire import framing
from kvass.wire.parts import has_more_parts

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.sampled_from([200, 300, 70_000]).map(lambda n: "x" * n),
    st.sampled_from([200, 300, 70_000]).map(bytes),
    st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=300)),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=60,
)


def parts(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + parts(one) for one in value.values())
    return 1 + (sum(map(parts, value)) if isinstance(value, list) else 0)


def counted(value: Any) -> None:
    payload, there = memoryview(msgspec.msgpack.encode(value)), parts(value)
    assert not has_more_parts(payload, there)
    assert has_more_parts(payload, there - 1)


@given(VALUES)
def test_parts_are_counted_as_they_are(value: Any) -> None:
    counted(value)


@pytest.mark.parametrize(
    "value", [[0] * 70_000, [0] * 300, {str(i): [i] for i in range(300)}, {"a": {}, "b": {}}]
)
def test_parts_of_long_lists_and_maps(value: Any) -> None:
    counted(value)


@given(st.binary(max_size=60))
def test_any_bytes_have_some_parts(data: bytes) -> None:
    assert has_more_parts(memoryview(data), len(data) + 8) in (True, False)


def ping(pairs: bytes, count: int) -> bytes:
    """A frame of a ``Ping`` with more fields."""
    return framing.frame(b"\xdf" + pack(">I", count + 1) + b"\xa1t\xa4ping" + pairs * count)


MANY = Limits().register_bytes // 4
SEVERAL = Limits().register_bytes // 500 + 1


@pytest.mark.parametrize(
    "frame",
    [
        ping(b"\xa3seq\x01", MANY),
        ping(b"\xa2no\x01", MANY),
        ping(b"\xa1a" + b"\x91" * 500 + b"\x01", SEVERAL),
        ping(b"\xa1a\xdd" + pack(">I", 4 * MANY) + b"\x01" * 4 * MANY, 1),
    ],
    ids=["a field again and again", "unknown fields", "nested lists", "a long list"],
)
def test_a_large_frame_of_small_parts_is_refused_undecoded(frame: bytes) -> None:
    with pytest.raises(FrameError, match="bytes of more than 20000 parts: send fewer at a time"):
        [*framing.from_clients().feed(frame)]


def test_the_largest_reserve_has_fewer_parts() -> None:
    one = ReserveItem(
        *("r" * 512, bytes(2048), 1, 1, bytes(512)),
        tenant="t" * 64,
        session=1,
        keep_s=1.0,
        then_s=1.0,
    )
    said = Reserve(items=[one] * 1024)
    assert len(framing.encode(said)) > 3 << 20
    assert [*framing.from_clients().feed(framing.encode(said))] == [said]
    assert [*framing.from_clients().feed(ping(b"\xa2no\x01", 1000))] == [Ping()]
