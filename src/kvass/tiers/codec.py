"""The format of a record in every tier: its key, its header and its bytes. No I/O.

``FORMAT`` is the version of the formats. A damaged header, or one of another version, is treated as
absent. A record whose bytes do not match its checksums is treated as damaged.

A **record key** is ``namespace digest (32) | epoch (u64) | group (u16) | chunk hash (8..32)``,
integers big-endian, so that the keys of one epoch share a prefix. The namespace digest covers the
layouts of all ranks. The header contains only the shard lengths of these.

A **record header** is, little-endian::

    offset  bytes
    0       8       magic "kvassrec"
    8       2       format version
    10      2       bytes of the key, k
    12      4       number of shards, n
    16      8       sequence number: of two records with one key, the one with the higher is used
    24      8       xxh3_64 of the shards' bytes, in order, without padding
    32      k       key
    32+k    8n      bytes of each shard
    32+k+8n 8       xxh3_64 of all of the above

The header's checksum covers the key and the payload checksum, so bytes that match both checksums
belong to that key. Tiers that keep a record on a server keep it in one piece: the header, then the
shards without padding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain
from typing import Final

import msgspec
import numpy as np
import xxhash

from kvass.errors import UsageError
from kvass.tiers.base import MAX_KEY_BYTES, MAX_SHARDS, Buffer, Shards
from kvass.tiers.buffers import page_buffer, size_of
from kvass.tiers.pacing import CHECKSUM_BYTES, paced

FORMAT: Final = 1

NAMESPACE_BYTES: Final = 32
_KEY: Final = struct.Struct(f">{NAMESPACE_BYTES}sQH")
_MAGIC: Final = b"kvassrec"
_FIXED: Final = struct.Struct("<8sHHIQQ")
_CHECK: Final = struct.Struct("<Q")
MAX_HEADER_BYTES: Final = _FIXED.size + MAX_KEY_BYTES + 8 * MAX_SHARDS + _CHECK.size


def record_key(namespace: bytes, epoch: int, group: int, chunk: bytes) -> bytes:
    """Return the key of a row in a tier. Raises ``UsageError`` if a part is out of bounds."""
    if len(namespace) != NAMESPACE_BYTES or not 8 <= len(chunk) <= 32:
        raise UsageError(
            f"a record key takes a namespace of {NAMESPACE_BYTES} bytes and a chunk hash of 8 to "
            f"32, not {len(namespace)} and {len(chunk)}"
        )
    try:
        return _KEY.pack(namespace, epoch, group) + chunk
    except struct.error as error:
        raise UsageError(f"epoch {epoch}, group {group}: {error}") from error


class Header(msgspec.Struct, frozen=True):
    """The header of a record. ``lengths``: bytes of each shard."""

    key: bytes
    lengths: tuple[int, ...]
    sequence: int
    payload_checksum: int


def payload_checksum(shards: Iterable[Buffer]) -> int:
    """Return xxh3_64 over the shards' bytes in order. Releases the GIL, and yields the processor
    between parts."""
    state = xxhash.xxh3_64()
    for shard in shards:
        for part in paced(shard, CHECKSUM_BYTES):
            state.update(part)
    return state.intdigest()


def header_bytes(header: Header) -> int:
    return _FIXED.size + len(header.key) + 8 * len(header.lengths) + _CHECK.size


def encode_header(header: Header) -> bytes:
    """Encode a header; at most ``MAX_HEADER_BYTES``."""
    key, lengths = header.key, header.lengths
    body = _FIXED.pack(
        _MAGIC, FORMAT, len(key), len(lengths), header.sequence, header.payload_checksum
    )
    body += key + struct.pack(f"<{len(lengths)}Q", *lengths)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def decode_header(raw: bytes | memoryview) -> Header | None:
    """Decode the header at the beginning of ``raw``. Returns ``None`` if there is no header of this
    format, or if it is damaged."""
    if len(raw) < _FIXED.size:
        return None
    magic, version, key_bytes, shards, sequence, check = _FIXED.unpack_from(raw)
    if magic != _MAGIC or version != FORMAT:
        return None
    if not 1 <= key_bytes <= MAX_KEY_BYTES or shards > MAX_SHARDS:
        return None
    lengths_at = _FIXED.size + key_bytes
    end = lengths_at + 8 * shards
    if len(raw) < end + _CHECK.size:
        return None
    if _CHECK.unpack_from(raw, end)[0] != xxhash.xxh3_64_intdigest(raw[:end]):
        return None
    return Header(
        key=bytes(raw[_FIXED.size : lengths_at]),
        lengths=struct.unpack_from(f"<{shards}Q", raw, lengths_at),
        sequence=sequence,
        payload_checksum=check,
    )


def header_of(key: bytes, shards: Shards, sequence: int = 0) -> Header:
    """Return the header of these shards. Computes their checksum."""
    return Header(key, tuple(map(len, shards)), sequence, payload_checksum(shards))


def pack(key: bytes, shards: Shards) -> Buffer:
    """Return a record as one buffer, with a copy of the shards. The memory returns to the system
    when the array is freed."""
    header = np.frombuffer(encode_header(header_of(key, shards)), np.uint8)
    piece = page_buffer(len(header) + size_of(shards))
    return np.concatenate([header, *shards], out=piece)


def unpack(key: bytes, size: int, pieces: Iterable[bytes], into: Shards) -> bool | None:
    """Fill ``into`` from a record of ``size`` bytes that arrives in pieces. Returns what
    ``unpack_body`` returns.

    The first piece must contain the whole header, unless it is the only piece.
    """
    left = iter(pieces)
    first = next(left, b"")
    header = decode_header(first)
    if header is None:
        return None
    at = header_bytes(header)
    body = chain([memoryview(first)[at:]], map(memoryview, left))
    return unpack_body(key, header, size - at, body, into)


def unpack_body(
    key: bytes, header: Header, size: int, pieces: Iterable[memoryview], into: Shards
) -> bool | None:
    """Fill ``into`` from the ``size`` bytes after a header, which arrive in pieces.

    Returns ``True`` if the checksum matches. ``False``: the record's shards have other lengths than
    ``into``, and nothing was filled. ``None``: the record is damaged, or belongs to another key.
    """
    if header.key != key or size != sum(header.lengths):
        return None
    if header.lengths != tuple(map(len, into)):
        return False
    whole = _fill(into, pieces)
    return True if whole and payload_checksum(into) == header.payload_checksum else None


def _fill(into: Shards, pieces: Iterable[memoryview]) -> bool:
    """Copy the pieces to the shards, in order. Returns whether both have the same total length."""
    shards = iter(into)
    room: Buffer = np.empty(0, np.uint8)
    for piece in pieces:
        left = np.frombuffer(piece, np.uint8)
        while len(left):
            while not len(room):
                if (shard := next(shards, None)) is None:
                    return False
                room = shard
            n = min(len(left), len(room))
            room[:n] = left[:n]
            left, room = left[n:], room[n:]
    return not len(room) and not any(map(len, shards))
