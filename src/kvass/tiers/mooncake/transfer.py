"""A record on its way to or from an object that is made of several pieces of memory.

Large shards that the library may use where they are go *direct*: only their checksum is computed
here. The header and all other shards take *room*, a part of the bounce buffer, in which they follow
each other without gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from kvass.tiers.base import Buffer, Shards
from kvass.tiers.buffers import size_of
from kvass.tiers.codec import Header, decode_header, encode_header, header_bytes, payload_check

DIRECT_BYTES: Final = 128 << 10
"""A smaller shard is copied to lie beside the header: each piece of memory is a request of its own
to the owner of the object, and takes longer than the copy (records of 32 KiB: 1.8 times as
long)."""


class ObjectTransfer:
    """One record: the name of its object, its header, and its memory here."""

    def __init__(self, name: str, header: Header, shards: Shards, direct: Callable[[Buffer], bool]):
        self.name = name
        self.header = header
        self.shards = [shard for shard in shards if len(shard)]
        self.head_bytes = header_bytes(header)
        self.size = self.head_bytes + size_of(self.shards)
        self._direct = [len(shard) >= DIRECT_BYTES and direct(shard) for shard in self.shards]
        self.bounced = sum(
            0 if is_direct else len(shard)
            for shard, is_direct in zip(self.shards, self._direct, strict=True)
        )
        """Bytes of shards that are copied."""
        self.room_bytes = self.head_bytes + self.bounced

    def use_room(self, room: Buffer) -> None:
        """Put the header and the shards that cannot go direct into ``room``."""
        self._room = room
        self._copies: list[tuple[Buffer, Buffer]] = []
        self._body: list[Buffer] = []
        first: int = room.ctypes.data
        self.addresses, self.sizes = [first], [self.head_bytes]
        end, in_room = self.head_bytes, True
        for shard, is_direct in zip(self.shards, self._direct, strict=True):
            part = shard if is_direct else room[end : end + len(shard)]
            self._body.append(part)
            if is_direct or not in_room:
                self.addresses.append(shard.ctypes.data if is_direct else first + end)
                self.sizes.append(len(shard))
            else:
                self.sizes[-1] += len(shard)  # it follows what the room had last
            if not is_direct:
                self._copies.append((part, shard))
                end += len(shard)
            in_room = not is_direct

    def add_checksum(self) -> None:
        """Before a store: let the header cover the shards."""
        check = payload_check(self.shards)
        self.header = msgspec.structs.replace(self.header, payload_check=check)

    def fill_room(self) -> None:
        """Before a store: copy to the room what goes through it."""
        self._room[: self.head_bytes] = memoryview(encode_header(self.header))
        for part, shard in self._copies:
            part[:] = shard

    def room_has_header(self) -> bool:
        """Whether what was read to the room is our header."""
        return self._room[: self.head_bytes].tobytes() == encode_header(self.header)

    def header_in_room(self) -> Header | None:
        """The header that a load brought, if it is one of our key."""
        found = decode_header(self._room[: self.head_bytes].tobytes())
        return found if found is not None and found.key == self.header.key else None

    def finish(self, found: Header) -> bool:
        """After a load: if all is as it was stored, copy the shards that came through the room."""
        if payload_check(self._body) != found.payload_check:
            return False
        for part, shard in self._copies:
            shard[:] = part
        self.header = found
        return True
