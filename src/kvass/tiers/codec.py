"""The format of records in all tiers: their keys and their bytes. No I/O.

``FORMAT`` is the version of both formats. A header that is damaged or has another version is
ignored, and so are bytes that do not match the header's checksums.

A **record key** is ``namespace digest (32) | epoch (u64) | group (u16) | chunk hash (8..32)``,
integers big-endian, so that the keys of one epoch share a prefix. The namespace digest covers the
digests of all ranks' layouts: of those the header repeats the shard lengths only.

A **record header** is, little-endian::

    offset  bytes
    0       8       magic "kvassrec"
    8       2       format version
    10      2       bytes of the key, k
    12      4       number of shards, n
    16      8       sequence number: of two records of one key the higher one counts
    24      8       xxh3_64 of the shards' bytes, in order, without padding
    32      k       key
    32+k    8n      bytes of each shard
    32+k+8n 8       xxh3_64 of all of the above

The header's checksum covers key and payload checksum: bytes that pass both belong to that key. A
server keeps a record in one piece: the header, then the shards without padding.
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
    """The key of a row in a tier. Raises ``UsageError`` for parts that are out of bounds."""
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
    """The header of a record. ``lengths`` are the bytes of each shard."""

    key: bytes
    lengths: tuple[int, ...]
    sequence: int
    payload_check: int


def payload_check(shards: Iterable[Buffer]) -> int:
    """xxh3_64 over the shards' bytes in order; releases the GIL, and yields the processor."""
    state = xxhash.xxh3_64()
    for shard in shards:
        for part in paced(shard, CHECKSUM_BYTES):
            state.update(part)
    return state.intdigest()


def header_bytes(header: Header) -> int:
    return _FIXED.size + len(header.key) + 8 * len(header.lengths) + _CHECK.size


def encode_header(header: Header) -> bytes:
    """The header's bytes; at most ``MAX_HEADER_BYTES``."""
    key, lengths = header.key, header.lengths
    sizes = len(key), len(lengths)
    body = _FIXED.pack(_MAGIC, FORMAT, *sizes, header.sequence, header.payload_check)
    body += key + struct.pack(f"<{len(lengths)}Q", *lengths)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def decode_header(raw: bytes | memoryview) -> Header | None:
    """The header at the beginning of ``raw``; ``None`` if there is none, or it is damaged."""
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
        payload_check=check,
    )


def header_of(key: bytes, shards: Shards, sequence: int = 0) -> Header:
    """The header of these shards; computes their checksum."""
    return Header(key, tuple(map(len, shards)), sequence, payload_check(shards))


def pack(key: bytes, shards: Shards) -> Buffer:
    """A record as one buffer, with a copy of the shards. Its pages are returned to the system when
    it is freed."""
    header = np.frombuffer(encode_header(header_of(key, shards)), np.uint8)
    piece = page_buffer(len(header) + size_of(shards))
    return np.concatenate([header, *shards], out=piece)


def unpack(key: bytes, size: int, chunks: Iterable[bytes], into: Shards) -> bool | None:
    """Fill ``into`` from a record of ``size`` bytes that comes in chunks; see ``unpack_body``.

    The first chunk holds the header, or it is the only one.
    """
    left = iter(chunks)
    first = next(left, b"")
    header = decode_header(first)
    if header is None:
        return None
    at = header_bytes(header)
    body = chain([memoryview(first)[at:]], map(memoryview, left))
    return unpack_body(key, header, size - at, body, into)


def unpack_body(
    key: bytes, header: Header, size: int, chunks: Iterable[memoryview], into: Shards
) -> bool | None:
    """Fill ``into`` from the ``size`` bytes behind a header. ``True``: the bytes are right.

    ``False``: the shards of the record have other lengths, and nothing was filled. ``None``: the
    record is damaged, or has another key.
    """
    if header.key != key or size != sum(header.lengths):
        return None
    if header.lengths != tuple(map(len, into)):
        return False
    whole = _fill(into, chunks)
    return True if whole and payload_check(into) == header.payload_check else None


def _fill(into: Shards, chunks: Iterable[memoryview]) -> bool:
    """Copy the chunks to the shards, in order. Returns whether they had the same length."""
    shards = iter(into)
    room: Buffer = np.empty(0, np.uint8)
    for chunk in chunks:
        left = np.frombuffer(chunk, np.uint8)
        while len(left):
            while not len(room):
                if (shard := next(shards, None)) is None:
                    return False
                room = shard
            n = min(len(left), len(room))
            room[:n] = left[:n]
            left, room = left[n:], room[n:]
    return not len(room) and not any(map(len, shards))
