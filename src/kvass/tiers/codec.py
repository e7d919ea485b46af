"""The format of a record in every tier: its key, its header and its bytes. No I/O.

``FORMAT`` is the version of the formats, ``SEALED`` that of an encrypted record. A damaged header,
or one of another version, is treated as absent. A record whose bytes do not match its checksums, or
its tag, is treated as damaged.

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

An **encrypted record** has the version ``SEALED``. Its key is the record's name (``encryption``),
its shards are encrypted, and before the header's checksum are 52 bytes more, the *seal*: whatever
decryption needs, and at its end a tag of 16 bytes. The tag covers ``authenticated`` and the shards.
No checksum of the shards is computed: in its place are the first 8 bytes of the tag. A tier without
keys takes no encrypted record, and one with keys no other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import accumulate, chain
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
import xxhash

from kvass.errors import UsageError
from kvass.tiers.base import MAX_KEY_BYTES, MAX_SHARDS, Buffer, Shards, taking
from kvass.tiers.buffers import page_buffer, size_of
from kvass.tiers.pacing import CHECKSUM_BYTES, paced

FORMAT: Final = 1
SEALED: Final = 2
SEAL_BYTES: Final = 52
TAG_BYTES: Final = 16

NAMESPACE_BYTES: Final = 32
_KEY: Final = struct.Struct(f">{NAMESPACE_BYTES}sQH")
_MAGIC: Final = b"kvassrec"
_FIXED: Final = struct.Struct("<8sHHIQQ")
FIXED_BYTES: Final = _FIXED.size
_CHECK: Final = struct.Struct("<Q")
MAX_HEADER_BYTES: Final = _FIXED.size + MAX_KEY_BYTES + 8 * MAX_SHARDS + SEAL_BYTES + _CHECK.size


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
    """The header of a record. ``lengths``: bytes of each shard. ``seal``: empty unless the record
    is encrypted."""

    key: bytes
    lengths: tuple[int, ...]
    sequence: int
    payload_checksum: int
    seal: bytes = b""


class Closing(Protocol):
    """The encryption of one record. If what ``move`` has written cannot be kept, the record is
    encrypted anew with another ``Closing``: one of them encrypts its bytes once."""

    def move(self, source: memoryview, target: memoryview) -> None:
        """Encrypt the record's next bytes. ``target`` is as long."""

    def end(self) -> bytes:
        """Return the seal. These were all bytes of the record. Called once."""


Seal: TypeAlias = Callable[[bytes, tuple[int, ...]], Closing]
"""``(key, lengths)``: begins to encrypt a record with shards of these lengths."""


class Opening(Protocol):
    """The decryption of one record. What ``move`` has written may be used only if ``right`` says
    so."""

    def move(self, source: memoryview, target: memoryview) -> None:
        """Decrypt the record's next bytes. ``target`` is as long, and may be the same memory."""

    def right(self) -> bool:
        """Whether these were all bytes of the record, and none was changed. Called once."""


Open: TypeAlias = Callable[[Header], Opening | None]
"""Begins to decrypt the record of a header; None if it cannot be decrypted."""


def payload_checksum(shards: Iterable[Buffer]) -> int:
    """Return xxh3_64 over the shards' bytes in order. Releases the GIL, and yields the processor
    between parts."""
    state = xxhash.xxh3_64()
    for shard in shards:
        for part in paced(shard, CHECKSUM_BYTES):
            state.update(part)
    return state.intdigest()


def header_bytes(header: Header) -> int:
    return _FIXED.size + len(header.key) + 8 * len(header.lengths) + len(header.seal) + _CHECK.size


def encode_header(header: Header) -> bytes:
    """Encode a header; at most ``MAX_HEADER_BYTES``."""
    key, lengths, version = header.key, header.lengths, SEALED if header.seal else FORMAT
    body = _FIXED.pack(
        _MAGIC, version, len(key), len(lengths), header.sequence, header.payload_checksum
    )
    body += key + struct.pack(f"<{len(lengths)}Q", *lengths) + header.seal
    return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def authenticated(key: bytes, lengths: tuple[int, ...], seal: bytes) -> bytes:
    """Return the parts of an encrypted record's header that its tag covers: all but the sequence
    number. ``seal``: without the tag."""
    body = _FIXED.pack(_MAGIC, SEALED, len(key), len(lengths), 0, 0)
    return body + key + struct.pack(f"<{len(lengths)}Q", *lengths) + seal


def header_size(raw: bytes | memoryview) -> int | None:
    """How long the header is that begins with the ``FIXED_BYTES`` of ``raw``. Returns ``None`` if
    there is none of this format. Only ``decode_header`` finds out whether it is damaged."""
    if len(raw) < FIXED_BYTES:
        return None
    magic, version, key_bytes, shards, _, _ = _FIXED.unpack_from(raw)
    if magic != _MAGIC or version not in (FORMAT, SEALED):
        return None
    if not 1 <= key_bytes <= MAX_KEY_BYTES or shards > MAX_SHARDS:
        return None
    seal_bytes = SEAL_BYTES if version == SEALED else 0
    return FIXED_BYTES + int(key_bytes) + 8 * int(shards) + seal_bytes + _CHECK.size


def decode_header(raw: bytes | memoryview) -> Header | None:
    """Decode the header at the beginning of ``raw``. Returns ``None`` if there is no header of this
    format, or if it is damaged."""
    size = header_size(raw)
    if size is None or len(raw) < size:
        return None
    _, _, key_bytes, shards, sequence, check = _FIXED.unpack_from(raw)
    lengths_at = _FIXED.size + key_bytes
    seal_at = lengths_at + 8 * shards
    end = size - _CHECK.size
    if _CHECK.unpack_from(raw, end)[0] != xxhash.xxh3_64_intdigest(raw[:end]):
        return None
    return Header(
        key=bytes(raw[_FIXED.size : lengths_at]),
        lengths=struct.unpack_from(f"<{shards}Q", raw, lengths_at),
        sequence=sequence,
        payload_checksum=check,
        seal=bytes(raw[seal_at:end]),
    )


def header_of(key: bytes, shards: Shards, sequence: int = 0) -> Header:
    """Return the header of these shards. Computes their checksum."""
    return Header(key, tuple(map(len, shards)), sequence, payload_checksum(shards))


def sealed_header(key: bytes, lengths: tuple[int, ...], seal: bytes, sequence: int = 0) -> Header:
    """Return the header of an encrypted record. ``seal``: what ``Closing.end`` returned."""
    check = int.from_bytes(seal[-TAG_BYTES:][: _CHECK.size], "little")
    return Header(key, lengths, sequence, check, seal)


def _encrypted(key: bytes, shards: Shards, into: Shards, seal: Seal) -> Header:
    """Encrypt the shards into other memory, and return the header of that record."""
    lengths = tuple(map(len, shards))
    closing = seal(key, lengths)
    for shard, part in zip(shards, into, strict=True):
        closing.move(shard.data, part.data)
    return sealed_header(key, lengths, closing.end())


def prepared(key: bytes, shards: Shards, seal: Seal | None) -> tuple[Header, Shards]:
    """Return the header of a record, and its bytes: the shards, or with ``seal`` an encrypted
    copy."""
    if seal is None:
        return header_of(key, shards), shards
    into = _parts(page_buffer(size_of(shards)), shards)
    return _encrypted(key, shards, into, seal), into


def pack(key: bytes, shards: Shards, seal: Seal | None = None) -> Buffer:
    """Return a record as one buffer, with a copy of the shards, which ``seal`` encrypts. The memory
    returns to the system when the array is freed."""
    if seal is None:
        header = np.frombuffer(encode_header(header_of(key, shards)), np.uint8)
        piece = page_buffer(len(header) + size_of(shards))
        return np.concatenate([header, *shards], out=piece)
    at = header_bytes(Header(key, tuple(map(len, shards)), 0, 0, bytes(SEAL_BYTES)))
    piece = page_buffer(at + size_of(shards))
    made = _encrypted(key, shards, _parts(piece[at:], shards), seal)
    piece[:at] = memoryview(encode_header(made))
    return piece


def _parts(memory: Buffer, shards: Shards) -> list[Buffer]:
    """Return consecutive parts of ``memory``, each as long as a shard."""
    begins = accumulate(map(len, shards), initial=0)
    return [memory[at : at + len(s)] for s, at in zip(shards, begins, strict=False)]


def unpack(
    key: bytes, size: int, pieces: Iterable[bytes], into: Shards, open_: Open | None = None
) -> bool | None:
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
    return unpack_body(key, header, size - at, body, into, open_)


def unpack_body(
    key: bytes,
    header: Header,
    size: int,
    pieces: Iterable[memoryview],
    into: Shards,
    open_: Open | None = None,
) -> bool | None:
    """Fill ``into`` from the ``size`` bytes after a header, which arrive in pieces. ``open_``
    decrypts them.

    Returns ``True`` if the checksum or the tag matches. ``False``: the record's shards have other
    lengths than ``into``, and nothing was filled. ``None``: the record is damaged, belongs to
    another key, or cannot be decrypted.
    """
    if header.key != key or size != sum(header.lengths):
        return None
    there = taking(header.lengths, into)
    if there is None:
        return False
    into = there
    if open_ is None:
        whole = not header.seal and _fill(into, pieces, _copy)
        return True if whole and payload_checksum(into) == header.payload_checksum else None
    opening = open_(header)
    if opening is None:
        return None
    return True if _fill(into, pieces, opening.move) and opening.right() else None


def _copy(source: memoryview, target: memoryview) -> None:
    np.frombuffer(target, np.uint8)[:] = np.frombuffer(source, np.uint8)


def _fill(
    into: Shards, pieces: Iterable[memoryview], move: Callable[[memoryview, memoryview], None]
) -> bool:
    """Move the pieces to the shards, in order. Returns whether both have the same total length."""
    shards = iter(into)
    room = memoryview(b"")
    for left in pieces:
        while left:
            while not room:
                if (shard := next(shards, None)) is None:
                    return False
                room = shard.data
            n = min(len(left), len(room))
            move(left[:n], room[:n])
            left, room = left[n:], room[n:]
    return not room and not any(map(len, shards))
