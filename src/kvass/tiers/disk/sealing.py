"""Encrypted records on their way to a segment.

Law of this file: each write of a record is encrypted with a nonce of its own. If a part cannot be
written, its encryption ends there, and nothing of it is written again.

A record is encrypted part by part into buffers that the thread keeps, and each part is written
before the next one is encrypted. So a store needs no memory of its record's size, and the shards
need not be page-aligned. The first part waits in a buffer of its own: it has the header, and that
has the tag, which is known at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvass.tiers.base import Buffer, Shards
from kvass.tiers.codec import Closing, Seal, encode_header, sealed_header
from kvass.tiers.disk.reading import ThreadMemory
from kvass.tiers.disk.segment import SegmentFile
from kvass.types import PAGE


class SealedWriter:
    """Writes encrypted records, through both buffers of the thread's memory."""

    def __init__(self, memory: ThreadMemory) -> None:
        self._memory = memory

    def write(
        self, file: SegmentFile, slot: int, key: bytes, shards: Shards, stamp: int, seal: Seal
    ) -> None:
        """Write a record to ``slot``. Raises ``OSError`` if not all of it was written."""
        lengths = tuple(map(len, shards))
        closing = seal(key, lengths)
        parts = self._encrypted(closing, shards)
        first = next(parts)
        for number, part in enumerate(parts, 1):
            file.put(slot, number, [part])
        raw = encode_header(sealed_header(key, lengths, closing.end(), stamp))
        self._memory.first[: len(raw)] = memoryview(raw)
        self._memory.first[len(raw) : PAGE] = 0
        file.put(slot, 0, [first])

    def _encrypted(self, closing: Closing, shards: Shards) -> Iterator[memoryview]:
        """Encrypt the shards, and pad each to ``PAGE``. Yields the parts of the slot in order:
        first ``first``, which begins with room for the header, then ``next`` again and again."""
        buffer, used = self._memory.first, PAGE
        for shard in shards:
            left = shard.data
            while left:
                if used == len(buffer):
                    yield buffer.data
                    buffer, used = self._memory.next, 0
                n = min(len(left), len(buffer) - used)
                closing.move(left[:n], buffer[used : used + n].data)
                left, used = left[n:], used + n
            used += _pad(buffer, used)
        yield buffer[:used].data


def _pad(buffer: Buffer, used: int) -> int:
    """Zero ``buffer`` from ``used`` to the end of that page. Returns how many bytes that were."""
    padding = -used % PAGE
    buffer[used : used + padding] = 0
    return padding
