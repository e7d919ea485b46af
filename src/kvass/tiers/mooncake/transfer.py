"""A record on its way to or from an object that is made of several pieces of memory.

Large shards that the library may use where they are go *direct*: only their checksum is computed
here. The header and all other shards go through *room*, in which they follow each other.
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
"""A smaller shard is copied to lie beside the header: each piece of memory is a request of its own
to the owner of the object, and takes longer than the copy (records of 32 KiB: 1.8 times as
long)."""


class ObjectTransfer:
    """One record: the name of its object, its key, and its memory here."""

    def __init__(self, name: str, key: bytes, shards: Shards, direct: Callable[[Buffer], bool]):
        self.name = name
        self.key = key
        self.shards = shards
        self.lengths = tuple(map(len, shards))
        self._head = header_bytes(Header(key, self.lengths, 0, 0))
        is_direct = [len(shard) >= DIRECT_BYTES and direct(shard) for shard in shards]
        copied = sum(n for n, straight in zip(self.lengths, is_direct, strict=True) if not straight)
        self.room = page_buffer(self._head + copied)
        self._body: list[Buffer] = []
        self._copies: list[tuple[Buffer, Buffer]] = []
        end: int = self.room.ctypes.data + self._head
        self.addresses, self.sizes = [end - self._head], [self._head]
        at = self._head
        for shard, straight in zip(shards, is_direct, strict=True):
            part = shard if straight else self.room[at : at + len(shard)]
            self._body.append(part)
            if not straight:
                self._copies.append((part, shard))
                at += len(shard)
            if part.ctypes.data == end:  # it follows what came last
                self.sizes[-1] += len(part)
            elif len(part):
                self.addresses.append(part.ctypes.data)
                self.sizes.append(len(part))
            end = self.addresses[-1] + self.sizes[-1]
        self.size = sum(self.sizes)

    def fill_room(self) -> None:
        """Before a store: the header, and the shards that do not go directly."""
        header = encode_header(header_of(self.key, self.shards))
        self.room[: self._head] = memoryview(header)
        for part, shard in self._copies:
            part[:] = shard

    def header_in_room(self) -> Header | None:
        """The header that a load brought, if it is one of our key."""
        found = decode_header(self.room[: self._head].tobytes())
        return found if found is not None and found.key == self.key else None

    def finish(self, found: Header) -> bool:
        """After a load: if all is as it was stored, copy the shards that came through the room."""
        if payload_checksum(self._body) != found.payload_checksum:
            return False
        for part, shard in self._copies:
            shard[:] = part
        return True
