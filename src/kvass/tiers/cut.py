"""A record that is too large for one value: a head that stands for it, and pieces beside it.

Law of this file: no I/O; pieces of two stores are never mixed. Every store of a record makes a
nonce, which the names of its pieces carry and its head tells: whoever has a head finds the pieces
that belong to it, or fewer, and the header's checksum covers all of them.

A **head** is, little-endian: the record's header (``codec``); magic "kvasscut"; nonce (16 bytes);
bytes of a piece (u64), the last one excepted; xxh3_64 of all of that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import msgspec
import xxhash

from kvass.tiers.base import Shards
from kvass.tiers.codec import MAX_HEADER_BYTES, Header, decode_header, encode_header, header_bytes

NONCE_BYTES: Final = 16
_MAGIC: Final = b"kvasscut"
_TAIL: Final = struct.Struct(f"<8s{NONCE_BYTES}sQ")
_CHECK: Final = struct.Struct("<Q")

MAX_HEAD_BYTES: Final = MAX_HEADER_BYTES + _TAIL.size + _CHECK.size


class Head(msgspec.Struct, frozen=True):
    """What stands for a record that was cut."""

    header: Header
    nonce: bytes
    piece_bytes: int

    @property
    def size(self) -> int:
        """Of header and shards together, as ``piece.unpack`` wants it."""
        return header_bytes(self.header) + sum(self.header.lengths)

    def pieces(self) -> Iterator[tuple[bytes, int]]:
        """Name and bytes of each, in order."""
        total = sum(self.header.lengths)
        for i, at in enumerate(range(0, total, self.piece_bytes)):
            yield b"%s:%d" % (self.nonce.hex().encode(), i), min(self.piece_bytes, total - at)

    def encode(self) -> bytes:
        body = encode_header(self.header) + _TAIL.pack(_MAGIC, self.nonce, self.piece_bytes)
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def decode_head(value: bytes) -> Head | None:
    """The head that ``value`` is; ``None``: it is a whole record, or nothing that we know."""
    header = decode_header(value) if len(value) <= MAX_HEAD_BYTES else None
    if header is None:
        return None
    at = header_bytes(header)
    end = at + _TAIL.size
    if len(value) != end + _CHECK.size or len(value) == at + sum(header.lengths):
        return None
    magic, nonce, piece_bytes = _TAIL.unpack_from(value, at)
    if magic != _MAGIC or not piece_bytes:
        return None
    if _CHECK.unpack_from(value, end)[0] != xxhash.xxh3_64_intdigest(value[:end]):
        return None
    return Head(header, nonce, piece_bytes)


def cut(shards: Shards, size: int) -> Iterator[bytes | memoryview]:
    """The shards' bytes in pieces of ``size``; copied only where a piece has bytes of several."""
    parts: list[memoryview] = []
    left = size
    for shard in shards:
        rest = shard.data
        while len(rest):
            parts.append(rest[:left])
            rest, left = rest[left:], left - len(parts[-1])
            if not left:
                yield _joined(parts)
                parts, left = [], size
    if parts:
        yield _joined(parts)


def _joined(parts: list[memoryview]) -> bytes | memoryview:
    return parts[0] if len(parts) == 1 else b"".join(parts)
