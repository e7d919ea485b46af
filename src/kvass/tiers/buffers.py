"""Functions for the buffers of records: size, allocation, splitting, batching."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from kvass.tiers.base import Buffer, Shards
from kvass.types import PAGE

HUGE_PAGE: Final = 2 << 20
"""Bytes of a huge page of most machines. Elsewhere the address is as good as any other."""


def size_of(shards: Shards) -> int:
    return sum(map(len, shards))


def page_buffer(size: int = PAGE) -> Buffer:
    """Return zeroed memory that begins at a multiple of ``PAGE``: uint8, shape ``(size,)``.

    The memory returns to the system when the array is freed. malloc would keep it.
    """
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


def huge_buffer(size: int) -> Buffer:
    """Return zeroed memory as ``page_buffer`` does, but of this process alone, at a multiple of
    2 MiB, and in huge pages if the system has them. A disk takes these in fewer requests."""
    memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE
    return whole[begin : begin + size]


def split(buffers: Sequence[Buffer], size: int) -> Iterator[list[memoryview]]:
    """Iterate over the bytes of all buffers in order, ``size`` bytes at a time (fewer at the end).
    Nothing is copied: each part is a list of views."""
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


def batches_by_size(sizes: Sequence[int], max_bytes: int) -> Iterator[range]:
    """Iterate over ranges of indices, in order. The sizes of a range add up to at most
    ``max_bytes``. An item that is larger has a range of its own."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > max_bytes:
            yield range(first, i)
            first, total = i, 0
        total += size
    if sizes:
        yield range(first, len(sizes))
