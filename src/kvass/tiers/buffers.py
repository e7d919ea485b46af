"""Functions on the memory of records: its size, its allocation and its division into parts."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np

from kvass.tiers.base import Buffer, Shards
from kvass.types import PAGE


def size_of(shards: Shards) -> int:
    return sum(map(len, shards))


def page_buffer(size: int = PAGE) -> Buffer:
    """Zeroed memory that begins at a multiple of ``PAGE``: uint8, shape ``(size,)``.

    Its pages are returned to the system when it is freed. The allocator of the C library would keep
    them.
    """
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


def split(buffers: Sequence[Buffer], size: int) -> Iterator[list[memoryview]]:
    """Yield the bytes of the buffers in order, in lists of ``size`` bytes (the last may be
    shorter), without a copy."""
    part: list[memoryview] = []
    room = size
    for buffer in buffers:
        left = buffer.data
        while left:
            part.append(left[:room])
            left = left[room:]
            room -= len(part[-1])
            if not room:
                yield part
                part, room = [], size
    if part:
        yield part


def groups(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Split a sequence into ranges of neighbours whose sizes add up to at most ``most``. An item
    that is larger gets a range of its own."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield range(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield range(first, len(sizes))
