"""A record on its way to or from a store that takes several pieces of memory as one object.

Law of this file: large shards that may go straight are not touched, but by the checksum. The header
and all other shards take room of the store's own: one piece a record, in which they follow each
other without gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kvass.tiers.base import Buffer, Shards
from kvass.tiers.codec import Header, decode_header, encode_header, header_bytes, payload_check

WORTH_IT: Final = 128 << 10
"""A smaller shard is copied to lie beside the header: each piece is a request of its own to whoever
holds the object, and takes longer than the copy (records of 32 KiB: 1.8 times as long)."""


class ObjectTransfer:
    """One record on its way: an object's name, our header, and the memory of both ends."""

    def __init__(self, name: str, header: Header, shards: Shards, direct: Callable[[Buffer], bool]):
        self.name = name
        self.header = header
        self.shards = [shard for shard in shards if len(shard)]
        self.head = header_bytes(header)
        self.size = self.head + sum(map(len, self.shards))
        self._straight = [len(s) >= WORTH_IT and direct(s) for s in self.shards]
        self.bounced = sum(
            len(shard)
            for shard, straight in zip(self.shards, self._straight, strict=True)
            if not straight
        )

    def lie(self, room: Buffer) -> None:
        """Use ``room`` for the header and for the shards that cannot go straight."""
        self.room = room
        self.copies: list[tuple[Buffer, Buffer]] = []
        self.body: list[Buffer] = []
        first: int = room.ctypes.data
        self.addresses, self.sizes = [first], [self.head]
        end, in_room = self.head, True
        for shard, straight in zip(self.shards, self._straight, strict=True):
            part = shard if straight else room[end : end + len(shard)]
            self.body.append(part)
            if straight or not in_room:
                self.addresses.append(shard.ctypes.data if straight else first + end)
                self.sizes.append(len(shard))
            else:
                self.sizes[-1] += len(shard)  # it follows what the room had last
            if not straight:
                self.copies.append((part, shard))
                end += len(shard)
            in_room = not straight

    def sign(self) -> None:
        """Before a store: let the header cover the shards."""
        check = payload_check(self.shards)
        self.header = msgspec.structs.replace(self.header, payload_check=check)

    def depart(self) -> None:
        """Fill the room for a store."""
        raw = encode_header(self.header)
        self.room[: self.head] = memoryview(raw)
        for part, shard in self.copies:
            part[:] = shard

    def same_head(self) -> bool:
        """Whether the room has our header."""
        return self.room[: self.head].tobytes() == encode_header(self.header)

    def found(self) -> Header | None:
        """The header that a load brought, if it is one of our key."""
        found = decode_header(self.room[: self.head].tobytes())
        return found if found is not None and found.key == self.header.key else None

    def arrive(self, found: Header) -> bool:
        """Empty the room after a load, if all is as it was stored."""
        if payload_check(self.body) != found.payload_check:
            return False
        for part, shard in self.copies:
            shard[:] = part
        return True
