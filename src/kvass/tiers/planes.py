"""The bytes of a compressed record: *planes* of its values, of which some are compressed.

Law of this file: nothing is lost, whatever the bytes are. A value is only a number of bytes here.
Decoding writes into the shards alone, and uses no more memory than a part of the record takes.

Of values of ``width`` bytes, the first bytes of all are a plane, their second bytes another one,
and so on. Half of what bfloat16 has are signs and exponents, which take few values; mantissas take
all. So the plane with the exponents is compressed, and the other one is kept as it is.

A compressed record is one shard of an ordinary one, little-endian::

    offset  bytes
    0       1       version
    1       1       width, w: 1, 2 or 4
    2       2       which planes are compressed: bit k is that of plane k, which has the bytes k
    4       4       number of shards, n
    8       8       xxh3_64 of the shards' bytes, in order
    16      8n      bytes of each shard
    16+8n   4 each  for each part and each of its compressed planes: bytes of the frame; 0: the
                    plane is kept as it is
    ...             the parts

A *part* is up to ``PART_BYTES`` of one shard: its planes in order, then what is left over of a
value. A part of less than one value has no planes. What follows the last part is padding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvass.tiers.base import MAX_SHARDS, Buffer, Shards
from kvass.tiers.pacing import paced
from kvass.tiers.zstd import compressed, decompressed

VERSION: Final = 1
PART_BYTES: Final = 512 << 10
"""Bytes between two yields: 0.5 ms of work, or less. Smaller parts take more of Python's time."""
OTHER_LENGTHS: Final = "other lengths"
WIDTHS: Final = (1, 2, 4)
_FIXED: Final = struct.Struct("<BBHIQ")
_SAMPLES: Final = 8
_SAMPLE_BYTES: Final = 32 << 10
_PLANE_GAIN: Final = 0.97
"""A plane is compressed if it takes less than this part of its size."""
_WIDTH_GAIN: Final = 0.99
"""A larger width must take less than this part of what a smaller one does."""


class Coding(NamedTuple):
    """How a record is compressed. ``packed``: for each plane whether it is compressed."""

    width: int
    packed: tuple[bool, ...]

    def mask(self) -> int:
        return sum(1 << k for k, one in enumerate(self.packed) if one)


def best_coding(shards: Shards) -> tuple[Coding, float]:
    """Return the coding that makes a sample of these bytes the smallest, and to which part of its
    size. ``shards``: with at least one byte."""
    parts = list(_parts(shards))
    chosen = parts[:: -(-len(parts) // _SAMPLES)]
    sample = [one[: min(len(one), _SAMPLE_BYTES)] for one in chosen]
    best, least = Coding(1, (False,)), 1.0
    for width in WIDTHS:
        sizes, packed = 0, []
        words = [one[: len(one) - len(one) % width].view(f"<u{width}") for one in sample]
        for k in range(width):
            plane = np.concatenate([_shifted(some, k).astype(np.uint8) for some in words])
            size = len(compressed(plane))
            packed.append(size < _PLANE_GAIN * len(plane))
            sizes += size if packed[-1] else len(plane)
        ratio = sizes / max(1, sum(map(len, words)) * width)
        if ratio < least * _WIDTH_GAIN:
            best, least = Coding(width, tuple(packed)), ratio
    return best, least


def encode(shards: Shards, coding: Coding, into: Buffer) -> int:
    """Compress a record. Returns the number of bytes written to ``into``; 0 if it has no room."""
    lengths = tuple(map(len, shards))
    table_at = _FIXED.size + 8 * len(shards)
    at = table_at + 4 * _count(lengths) * sum(coding.packed)
    if at > len(into):
        return 0
    state, sizes = xxhash.xxh3_64(), []
    for part in _parts(shards):
        state.update(part.data)
        values = len(part) // coding.width
        words = part[: values * coding.width].view(f"<u{coding.width}")
        for k, packed in enumerate(coding.packed):
            plane = _shifted(words, k)
            if packed:
                plane = plane.astype(np.uint8)
                frame = compressed(plane)
                smaller = len(frame) < values
                sizes.append(len(frame) if smaller else 0)
                plane = np.frombuffer(frame, np.uint8) if smaller else plane
            if at + len(plane) > len(into):
                return 0
            into[at : at + len(plane)] = plane
            at += len(plane)
        rest = part[values * coding.width :]
        if at + len(rest) > len(into):
            return 0
        into[at : at + len(rest)] = rest
        at += len(rest)
    head = _FIXED.pack(VERSION, coding.width, coding.mask(), len(shards), state.intdigest())
    head += struct.pack(f"<{len(shards)}Q{len(sizes)}I", *lengths, *sizes)
    into[: len(head)] = memoryview(head)
    return at


def decode(body: Buffer, into: Shards) -> str:
    """Fill ``into`` from a compressed record. Returns an empty text, or why it cannot be:
    ``OTHER_LENGTHS`` if it is a record of other shards."""
    if len(body) < _FIXED.size:
        return "it is cut"
    version, width, mask, shards, check = _FIXED.unpack_from(body.data)
    if version != VERSION or width not in WIDTHS or mask >> width or shards > MAX_SHARDS:
        return f"its form is unknown: {version}, {width}, {mask}"
    lengths = tuple(map(len, into))
    table_at = _FIXED.size + 8 * shards
    packed = [bool(mask >> k & 1) for k in range(width)]
    if len(body) < table_at:
        return "it is cut"
    if struct.unpack_from(f"<{shards}Q", body.data, _FIXED.size) != lengths:
        return OTHER_LENGTHS
    count = _count(lengths) * sum(packed)
    if len(body) < table_at + 4 * count:
        return "it is cut"
    sizes = iter(struct.unpack_from(f"<{count}I", body.data, table_at))
    left, state = body[table_at + 4 * count :], xxhash.xxh3_64()
    for part in _parts(into):
        values = len(part) // width
        planes = []
        for one in packed:
            size = next(sizes) if one else 0
            piece = left[: size or values]
            if len(piece) < (size or values):
                return "it is cut"
            plain = decompressed(piece, values) if size else piece
            if plain is None:
                return "its bytes cannot be decompressed"
            planes.append(np.frombuffer(plain, np.uint8))
            left = left[len(piece) :]
        rest = part[values * width :]
        if len(left) < len(rest):
            return "it is cut"
        rest[:] = left[: len(rest)]
        left = left[len(rest) :]
        _join(planes, part[: values * width].view(f"<u{width}"))
        state.update(part.data)
    return "" if state.intdigest() == check else "its checksum is wrong"


def _count(lengths: Sequence[int]) -> int:
    """Return the number of parts of shards of these lengths."""
    return sum(-(-length // PART_BYTES) for length in lengths)


def _parts(shards: Shards) -> Iterator[Buffer]:
    """Iterate over the parts of all shards. Yields the processor between them."""
    for shard in shards:
        for part in paced(shard, PART_BYTES):
            yield np.frombuffer(part, np.uint8)


def _shifted(words: npt.NDArray[Any], k: int) -> npt.NDArray[Any]:
    """Return words whose lowest bytes are the bytes ``k`` of these. To cut them off takes numpy a
    third of the time of a copy of every second byte."""
    return words if k == 0 else words >> words.dtype.type(8 * k)


def _join(planes: Sequence[Buffer], words: npt.NDArray[Any]) -> None:
    words[:] = planes[-1]
    for plane in reversed(planes[:-1]):
        np.left_shift(words, 8, out=words)
        np.bitwise_or(words, plane, out=words)
