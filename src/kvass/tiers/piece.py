"""A record in one piece: header and shards, one after the other, as servers keep it.

Law of this file: no I/O. Bytes that are not right never pass for a record.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

import numpy as np
import xxhash

from kvass.tiers.base import Buffer, Shards
from kvass.tiers.codec import Header, decode_header, encode_header, header_bytes, payload_check

_OWN_PAGES: Final = 128 << 10
"""From here on a piece gets pages of its own, which are gone with it. The allocator would keep what
the largest record took, for each thread that ever made one."""


def size_of(shards: Shards) -> int:
    """Bytes of a record's shards."""
    return sum(map(len, shards))


def pack(key: bytes, shards: Shards) -> bytes | Buffer:
    """The record as one piece; a copy."""
    header = encode_header(Header(key, tuple(map(len, shards)), 0, payload_check(shards)))
    size = len(header) + size_of(shards)
    if size < _OWN_PAGES:
        return b"".join([header, *(shard.data for shard in shards)])
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    piece = np.frombuffer(pages, np.uint8)
    at = 0
    for part in (np.frombuffer(header, np.uint8), *shards):
        piece[at : at + len(part)] = part
        at += len(part)
    return piece


def unpack(key: bytes, size: int, chunks: Iterator[bytes], into: Shards) -> bool | None:
    """Fill ``into`` from a piece of ``size`` bytes that comes in chunks; ``True``: it is whole.

    ``False``: it is a record of this key with shards of other lengths, of which no more is read.
    ``None``: it is not this record, or damaged. The first chunk holds the header, or it is the
    only one.
    """
    first = next(chunks, b"")
    header = decode_header(first)
    if header is None or header.key != key:
        return None
    if size != header_bytes(header) + sum(header.lengths):
        return None
    if header.lengths != tuple(map(len, into)):
        return False
    rest = chain([memoryview(first)[header_bytes(header) :]], map(memoryview, chunks))
    return True if _pour(rest, into) == header.payload_check else None


def _pour(chunks: Iterable[memoryview], into: Shards) -> int | None:
    """Put the chunks' bytes where they belong; their checksum, ``None`` if they are too many."""
    check = xxhash.xxh3_64()
    left = _Room(into)
    for chunk in chunks:
        check.update(chunk)
        if not left.put(chunk):
            return None
    return check.intdigest()


class _Room:
    """Shards, filled from the first byte to the last."""

    def __init__(self, into: Shards) -> None:
        self._shards = [shard for shard in into if len(shard)]
        self._shard = self._at = 0

    def put(self, chunk: memoryview) -> bool:
        """Whether all of it had a place."""
        while len(chunk) and self._shard < len(self._shards):
            shard = self._shards[self._shard]
            n = min(len(chunk), len(shard) - self._at)
            shard[self._at : self._at + n] = np.frombuffer(chunk[:n], np.uint8)
            chunk, self._at = chunk[n:], self._at + n
            if self._at == len(shard):
                self._shard, self._at = self._shard + 1, 0
        return not len(chunk)
