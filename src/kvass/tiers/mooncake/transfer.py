"""The transfer of a record to or from an object of a Mooncake Store.

A large shard is transferred *directly* from or to its own memory, if the library may use that
memory. The header and all other shards are copied to or from one *staging* buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvass.tiers.base import Buffer, Shards
from kvass.tiers.buffers import page_buffer
from kvass.tiers.codec import (
    Header,
    decode_header,
    encode_header,
    header_bytes,
    header_of,
    payload_checksum,
)

DIRECT_BYTES: Final = 128 << 10
"""Smaller shards are copied to the staging buffer. Each separate piece of memory is a request of
its own, which takes longer than the copy (records of 32 KiB: 1.8 times as long)."""


class ObjectTransfer:
    """The transfer of one record: the name of its object, its key, and its pieces of memory.

    ``direct`` says whether the library may use a buffer directly. ``addresses`` and ``sizes``: the
    pieces of memory, in the order of the object's bytes.
    """

    def __init__(self, name: str, key: bytes, shards: Shards, direct: Callable[[Buffer], bool]):
        self.name = name
        self.key = key
        self.shards = shards
        self.lengths = tuple(map(len, shards))
        self._head = header_bytes(Header(key, self.lengths, 0, 0))
        is_direct = [len(shard) >= DIRECT_BYTES and direct(shard) for shard in shards]
        copied = sum(n for n, straight in zip(self.lengths, is_direct, strict=True) if not straight)
        self.staging = page_buffer(self._head + copied)
        self._body: list[Buffer] = []
        self._copies: list[tuple[Buffer, Buffer]] = []
        end: int = self.staging.ctypes.data + self._head
        self.addresses, self.sizes = [end - self._head], [self._head]
        at = self._head
        for shard, straight in zip(shards, is_direct, strict=True):
            part = shard if straight else self.staging[at : at + len(shard)]
            self._body.append(part)
            if not straight:
                self._copies.append((part, shard))
                at += len(shard)
            if part.ctypes.data == end:  # it directly follows the last piece: extend that one
                self.sizes[-1] += len(part)
            elif len(part):
                self.addresses.append(part.ctypes.data)
                self.sizes.append(len(part))
            end = self.addresses[-1] + self.sizes[-1]
        self.size = sum(self.sizes)

    def fill_staging(self) -> None:
        """Prepare a store: write the header and the copied shards to the staging buffer."""
        header = encode_header(header_of(self.key, self.shards))
        self.staging[: self._head] = memoryview(header)
        for part, shard in self._copies:
            part[:] = shard

    def loaded_header(self) -> Header | None:
        """Return the header after a load. None if it is invalid or of another key."""
        found = decode_header(self.staging[: self._head].tobytes())
        return found if found is not None and found.key == self.key else None

    def finish(self, found: Header) -> bool:
        """End a load: copy the shards that were not loaded directly, if the checksum matches.
        Returns whether it matches."""
        if payload_checksum(self._body) != found.payload_checksum:
            return False
        for part, shard in self._copies:
            shard[:] = part
        return True
