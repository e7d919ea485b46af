"""What a record is called and how it describes itself, in every tier.

Law of this file: pure. The formats are fixed by ``FORMAT``; a header that is damaged, or of a
format that we do not read, is no header.

A **record key** is ``namespace digest (32) | epoch (u64) | group (u16) | chunk hash (8..32)``,
integers big-endian, so that the keys of one epoch share a prefix. The namespace digest covers the
digests of all ranks' layouts (DESIGN section 4): no field of the header repeats them, the shard
lengths excepted.

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

The header's checksum covers key and payload checksum: bytes that pass both belong to that key.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

import msgspec
import xxhash

from kvass.errors import UsageError
from kvass.tiers.base import MAX_KEY_BYTES, MAX_SHARDS, Buffer
from kvass.tiers.pacing import CHECKSUM_BYTES, paced

FORMAT: Final = 1

NAMESPACE_BYTES: Final = 32
_KEY: Final = struct.Struct(f">{NAMESPACE_BYTES}sQH")
_MAGIC: Final = b"kvassrec"
_FIXED: Final = struct.Struct("<8sHHIQQ")
_CHECK: Final = struct.Struct("<Q")


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
    """What a record says of itself; ``lengths``: bytes of each shard."""

    key: bytes
    lengths: tuple[int, ...]
    sequence: int
    payload_check: int


def payload_check(shards: Iterable[Buffer]) -> int:
    """xxh3_64 over the shards' bytes in order; releases the GIL, and the processor now and then."""
    state = xxhash.xxh3_64()
    for shard in shards:
        for part in paced(shard, CHECKSUM_BYTES):
            state.update(part)
    return state.intdigest()


def header_bytes(header: Header) -> int:
    """How long ``encode_header`` makes it."""
    return _FIXED.size + len(header.key) + 8 * len(header.lengths) + _CHECK.size


def encode_header(header: Header) -> bytes:
    """The header's bytes; at most ``MAX_HEADER_BYTES``."""
    fixed = _FIXED.pack(
        _MAGIC,
        FORMAT,
        len(header.key),
        len(header.lengths),
        header.sequence,
        header.payload_check,
    )
    body = fixed + header.key + struct.pack(f"<{len(header.lengths)}Q", *header.lengths)
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def decode_header(raw: bytes | memoryview) -> Header | None:
    """The header at the beginning of ``raw``, or ``None`` if none of ours is there, undamaged."""
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


MAX_HEADER_BYTES: Final = _FIXED.size + MAX_KEY_BYTES + 8 * MAX_SHARDS + _CHECK.size
