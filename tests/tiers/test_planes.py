"""The bytes of compressed records: nothing is lost, and no wrong one is served."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.tiers import planes, zstd
from kvass.tiers.base import Buffer
from kvass.tiers.planes import OTHER_LENGTHS, Coding, best_coding, decode, encode
from tests.tiers.records import allocating

PART = 64
CODINGS = [
    Coding(width, tuple(bool(mask >> k & 1) for k in range(width)))
    for width in planes.WIDTHS
    for mask in range(1 << width)
]
ALL_OF_BF16 = np.arange(1 << 16, dtype="<u2").view(np.uint8)
"""Each NaN with each payload, each denormal, both zeros, both infinities."""
made = np.random.default_rng(0)


def bf16(values: npt.NDArray[np.float32]) -> Buffer:
    return (values.view("<u4") >> 16).astype("<u2").view(np.uint8)


def e4m3(values: npt.NDArray[np.float32]) -> Buffer:
    """Eight bits: the sign, four of the exponent, three of the mantissa. Small ones become 0."""
    bits = values.view("<u4")
    rest = (bits >> 20 & 0x7FF).astype(np.int64) - (120 << 3)
    return (bits >> 24 & 0x80 | np.clip(rest, 0, 0x7E)).astype(np.uint8)


NORMAL = made.standard_normal(100_000, np.float32)
KINDS = {
    "bfloat16": (bf16(NORMAL), 2),
    "float16": (NORMAL.astype(np.float16).view(np.uint8), 2),
    "float32": (NORMAL.view(np.uint8), 4),
    "float8, e4m3": (e4m3(NORMAL), 1),
    "float8, e5m2": (NORMAL.astype(np.float16).view(np.uint8)[1::2].copy(), 1),
    "eight bits": (np.clip(NORMAL * 20 + 128, 0, 255).astype(np.uint8), 1),
    "zero": (np.zeros(100_000, np.uint8), 1),
}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "PART_BYTES", PART)


def packed(shards: list[Buffer], coding: Coding) -> Buffer:
    room = np.full(2 * sum(map(len, shards)) + 8 * len(shards) + 4096, 0xA5, np.uint8)
    return room[: encode(shards, coding, room)]


def unpacked(body: Buffer, lengths: list[int]) -> tuple[str, list[bytes]]:
    """What decoding says, and the shards. Nothing beside them may be written."""
    around = np.full(sum(lengths) + 16 * (len(lengths) + 1), 0x5A, np.uint8)
    at, into = 16, list[Buffer]()
    for length in lengths:
        into.append(around[at : at + length])
        at += length + 16
    why = decode(body, into)
    shards = [shard.tobytes() for shard in into]
    for shard in into:
        shard[:] = 0x5A
    assert (around == 0x5A).all()
    return why, shards


def bytes_of(kind: str, size: int, seed: int) -> Buffer:
    """Adversarial bytes: compressible, not compressible, special values, anything between."""
    random = np.random.default_rng(seed)
    if kind == "random":
        return random.integers(0, 256, size, np.uint8)
    if kind == "special":
        specials = [0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x7F81, 0, 0x8000, 1, 0x8001, 0x007F, 0x0080]
        return random.choice(np.array(specials, "<u2"), size // 2 + 1).view(np.uint8)[:size]
    if kind == "one value":
        return np.full(size, seed & 255, np.uint8)
    return np.tile(ALL_OF_BF16, size // len(ALL_OF_BF16) + 1)[seed % 9973 :][:size]


shards_of = st.lists(
    st.builds(
        bytes_of,
        st.sampled_from(["random", "special", "one value", "all patterns"]),
        st.integers(0, 5 * PART + 3),
        st.integers(0, 1 << 20),
    )
    | st.binary(max_size=3 * PART).map(lambda raw: np.frombuffer(raw, np.uint8)),
    max_size=5,
)


@given(shards=shards_of, coding=st.sampled_from(CODINGS))
def test_what_is_encoded_comes_back(shards: list[Buffer], coding: Coding) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planes, "PART_BYTES", PART)
        body = packed(shards, coding)
        why, got = unpacked(body, [*map(len, shards)])
    assert (why, got) == ("", [shard.tobytes() for shard in shards])


@pytest.mark.parametrize("coding", [best_coding([ALL_OF_BF16])[0], *CODINGS[-3:]])
def test_each_value_of_sixteen_bits_and_lengths_about_a_part(coding: Coding) -> None:
    """With parts as they are: a value is not cut at their ends."""
    part = planes.PART_BYTES
    for length in (part - 1, part, part + 1, 2 * part + 3):
        shards = [ALL_OF_BF16, np.resize(ALL_OF_BF16[1:], length)]
        why, got = unpacked(packed(shards, coding), [len(ALL_OF_BF16), length])
        assert (why, got) == ("", [shard.tobytes() for shard in shards])


@pytest.mark.parametrize(("plain", "width"), KINDS.values(), ids=KINDS)
def test_a_probe_finds_how_wide_values_are(plain: Buffer, width: int) -> None:
    coding, ratio = best_coding([plain])
    assert coding.width == width
    assert 0 <= ratio < 0.92
    size = len(packed([plain], coding))
    assert size / len(plain) == pytest.approx(ratio, abs=0.02)


def test_what_has_no_pattern_is_kept_as_it_is() -> None:
    coding, ratio = best_coding([made.integers(0, 256, 300_000, np.uint8)])
    assert (coding, ratio) == (Coding(1, (False,)), 1.0)
    for few in ([7], [0, 1, 2], [1] * 9):
        assert best_coding([np.array(few, np.uint8)])[0].width in planes.WIDTHS


def test_a_sample_is_of_all_shards() -> None:
    shards = [made.integers(0, 256, 300_000, np.uint8), KINDS["bfloat16"][0], KINDS["zero"][0]]
    assert best_coding(shards)[1] < 0.8


def test_without_room_nothing_is_encoded() -> None:
    plain = KINDS["bfloat16"][0]
    coding = Coding(2, (False, True))
    size = len(packed([plain], coding))
    for room in (0, 10, 100, size // 2, size - 1):
        assert encode([plain], coding, np.zeros(room, np.uint8)) == 0
    assert encode([plain], coding, np.zeros(size, np.uint8)) == size


@given(at=st.integers(0, 1 << 20), bits=st.integers(1, 255))
def test_a_flipped_byte_is_noticed(at: int, bits: int) -> None:
    shards = [KINDS["bfloat16"][0][:999], np.arange(7, dtype=np.uint8)]
    body = packed(shards, Coding(2, (False, True)))
    body[at % len(body)] ^= bits
    why, got = unpacked(body, [999, 7])
    assert why or got == [shard.tobytes() for shard in shards]


def test_any_shorter_body_is_noticed(small_parts: None) -> None:
    shards = [KINDS["bfloat16"][0][:201], np.arange(7, dtype=np.uint8)]
    body = packed(shards, Coding(2, (True, True)))
    for size in range(len(body)):
        assert unpacked(body[:size], [201, 7])[0]
    assert unpacked(np.append(body, np.zeros(4096, np.uint8)), [201, 7])[0] == "", "padding"


def test_other_lengths_are_told_from_damage() -> None:
    body = packed([KINDS["zero"][0][:999]], Coding(1, (True,)))
    for lengths in ([998], [1000], [999, 0], []):
        assert unpacked(body, lengths)[0] == OTHER_LENGTHS


def test_a_checksum_is_of_the_plain_bytes() -> None:
    """The control of the tests above: a plane that is kept as it is has no other one."""
    plain = made.integers(0, 256, 5000, np.uint8)
    body = packed([plain], Coding(1, (False,)))
    body[-1] ^= 1
    assert unpacked(body, [5000])[0] == "its checksum is wrong"


BOMB = 64 << 20


def bomb(says: int | None) -> Buffer:
    """A frame of 64 MiB, which says of itself that it has ``says`` bytes, or nothing."""
    frame = bytearray(zstd.compressed(np.zeros(BOMB, np.uint8)))
    sizes = {0: 0, 1: 2, 2: 4, 3: 8}[frame[4] >> 6]
    assert sizes >= 4, "the frame has its size"
    begin = 5 + (0 if frame[4] & 0x20 else 1)
    assert int.from_bytes(frame[begin : begin + sizes], "little") == BOMB
    if says is None:
        frame[4] &= 0x3F
        del frame[begin : begin + sizes]
    else:
        frame[begin : begin + sizes] = says.to_bytes(sizes, "little")
    return np.frombuffer(bytes(frame), np.uint8)


@pytest.mark.parametrize("says", [BOMB, 1000, None])
def test_no_frame_takes_more_memory_than_its_plane(says: int | None) -> None:
    frame = bomb(says)
    head = planes._FIXED.pack(planes.VERSION, 1, 1, 1, 0) + struct.pack("<QI", 1000, len(frame))
    body = np.concatenate([np.frombuffer(head, np.uint8), frame])
    with allocating(BOMB // 4):
        assert unpacked(body, [1000])[0] == "its bytes cannot be decompressed"


def test_a_frame_of_another_length_is_none() -> None:
    frame = np.frombuffer(zstd.compressed(np.arange(100, dtype=np.uint8)), np.uint8)
    assert zstd.decompressed(frame, 100) == bytes(range(100))
    assert [zstd.decompressed(frame, size) for size in (0, 99, 101)] == [None] * 3
    assert zstd.decompressed(frame[:-1], 100) is None
    assert zstd.decompressed(frame[1:], 100) is None
