"""How a record lies in a slot of the disk tier, and in memory on its way there.

A slot is a page with the record's header (``codec``), then the shards, each padded to ``PAGE``.
Shards that begin and end at pages go to and from the device as they are. If one does not, all of
the record's go through a bounce buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvass.tiers.base import Buffer, Shards
from kvass.tiers.buffers import page_buffer
from kvass.tiers.codec import Header, encode_header
from kvass.types import PAGE, align_up


def slot_bytes(shards: Shards) -> int:
    """What a record of these shards takes."""
    return PAGE + sum(align_up(len(shard)) for shard in shards)


def to_write(page: Buffer, header: Header, shards: Shards) -> list[Buffer]:
    """What to write to the slot. ``page`` is filled with the header."""
    raw = encode_header(header)
    page[: len(raw)] = memoryview(raw)
    page[len(raw) :] = 0
    if _aligned(shards):
        return [page, *shards]
    bounce = page_buffer(slot_bytes(shards) - PAGE)
    for shard, part in zip(shards, _cut(bounce, shards), strict=True):
        part[:] = shard
    return [page, bounce]


def to_read(page: Buffer, shards: Shards) -> list[Buffer]:
    """Where to read the slot to; call ``finish_read`` afterwards."""
    return [page, *shards] if _aligned(shards) else [page, page_buffer(slot_bytes(shards) - PAGE)]


def finish_read(parts: list[Buffer], shards: Shards) -> None:
    """Copy what was read to the parts of ``to_read`` to the shards, if it is not there yet."""
    if not _aligned(shards):
        for shard, part in zip(shards, _cut(parts[1], shards), strict=True):
            shard[:] = part


def _aligned(shards: Shards) -> bool:
    """Whether a device can read and write all of them where they are."""
    return all(len(s) % PAGE == 0 and s.ctypes.data % PAGE == 0 for s in shards)


def _cut(bounce: Buffer, shards: Shards) -> Iterator[Buffer]:
    """Where in ``bounce`` each of the shards lies."""
    at = 0
    for shard in shards:
        yield bounce[at : at + len(shard)]
        at += align_up(len(shard))
