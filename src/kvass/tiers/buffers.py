"""Memory that records lie in: what it takes, how it is made and how it is cut."""

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

    Its pages go back to the system with it; the allocator would keep them.
    """
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


def split(buffers: Sequence[Buffer], size: int) -> Iterator[list[memoryview]]:
    """The buffers' bytes in order, ``size`` at a time (the last time fewer), without a copy."""
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
    """Neighbours whose sizes come to at most ``most``; one that is larger is alone."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > most:
            yield range(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield range(first, len(sizes))
