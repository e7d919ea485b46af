"""Reads of records from a segment: directly into the shards, or through memory of the thread.

Laws of this file:

- A record is right only if its header, key and checksum (or tag) match.
- Nothing is yielded of a piece that was not read as a whole. So what the thread's memory had before
  is never taken for a record's bytes.

Shards that are not page-aligned are always read through the thread's memory. So are aligned ones
if ``Choice`` has found that faster. Pieces below ``LEAST_STAGED`` are not: a disk takes that many
pages of 4 KiB in one request. Nor is a file that is read through the page cache, from which the
kernel copies itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Final, TypeAlias

import numpy as np

from kvass.tiers.base import Buffer, Shards, Varying, taking
from kvass.tiers.buffers import HUGE_PAGE, huge_buffer, page_buffer, size_of
from kvass.tiers.codec import Header, Open, decode_header, payload_checksum
from kvass.tiers.disk.choice import Choice
from kvass.tiers.disk.segment import SegmentFile, page_aligned, slot_bytes_of
from kvass.tiers.pacing import CHECKSUM_BYTES, IO_BYTES, paced
from kvass.types import PAGE, align_up

LEAST_STAGED: Final = 1 << 20

Pair: TypeAlias = tuple[memoryview, memoryview]
"""Where some bytes are, and where they belong, of the same length. May be one object."""


class ThreadMemory(threading.local):
    """Memory that each thread keeps for its I/O: a page for a record's header, and two buffers of
    ``IO_BYTES``. The system gives memory to what is used only."""

    def __init__(self) -> None:
        self.page = page_buffer()
        self.first = huge_buffer(IO_BYTES)
        self.next = huge_buffer(IO_BYTES)

    def get(self) -> None:
        """Get this thread's memory, if it has none yet, as any access does (``threading.local``).
        Raises ``OSError`` if there is none."""


class SlotReader:
    """Reads slots of segments. Thread-safe."""

    def __init__(
        self, memory: ThreadMemory, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._memory = memory
        self._clock = clock
        self._choice = Choice()

    def load(
        self, file: SegmentFile, slot: int, key: bytes, into: Shards, open_: Open | None
    ) -> str:
        """Fill ``into`` with a record. Returns what is wrong, ``mismatched`` or ``damaged``, or an
        empty text. Raises ``OSError``."""
        if isinstance(into, Varying):
            into = Varying([into[0][: file.slot_bytes - PAGE]])
        if slot_bytes_of(into) != file.slot_bytes:
            return "mismatched"
        pairs = self.read(file, slot, into)
        header = decode_header(next(pairs, (b"",))[0])
        if header is None or header.key != key:
            return "damaged"
        there = taking(header.lengths, into)
        if there is None:
            return "mismatched"
        if isinstance(into, Varying):
            pairs = _beginning(pairs, size_of(there))
        right = _checked if open_ is None else partial(_decrypted, open_)
        return "" if right(header, pairs) else "damaged"

    def read(self, file: SegmentFile, slot: int, shards: Shards) -> Iterator[Pair]:
        """Read a record's slot, a few MiB at a time. Yields the bytes in order, after they were
        read: first the page with the header, then those of the shards. Who takes a pair moves its
        bytes to where they belong. Stops early if the file is too short. Raises ``OSError``.

        A ``Varying`` shard is not read through the thread's memory: it is in such memory itself."""
        aligned, stage = page_aligned(shards), self._memory.next
        targets = [self._memory.page, *shards]
        begins = [*accumulate((align_up(len(target)) for target in targets), initial=0)]
        for number, at in enumerate(range(0, begins[-1], IO_BYTES)):
            size = min(IO_BYTES, begins[-1] - at)
            parts = [
                (max(begin - at, 0), target[max(at - begin, 0) : at + size - begin].data)
                for begin, target in zip(begins, targets, strict=False)
                if begin < at + size and begin + len(target) > at and len(target)
            ]
            free = aligned and file.direct and size >= LEAST_STAGED
            free = free and not isinstance(shards, Varying)
            staged = self._choice.staged() if free else not aligned
            if staged:
                stage[::HUGE_PAGE] = 0  # the system gives the memory now, not while the disk reads
            began = self._clock()
            if not file.get(slot, number, [stage[:size].data] if staged else [p for _, p in parts]):
                return
            for offset, part in parts:
                yield (stage[offset : offset + len(part)].data if staged else part), part
            if free:
                self._choice.took(staged, self._clock() - began, size)


def _checked(header: Header, pairs: Iterator[Pair]) -> bool:
    """Read a record that is not encrypted. Returns whether it is right."""
    return not header.seal and payload_checksum(_moved(pairs)) == header.payload_checksum


def _moved(pairs: Iterator[Pair]) -> Iterator[Buffer]:
    """Move what was read to where it belongs. Yields it there, in parts that are still in the
    processor's cache."""
    for source, target in pairs:
        whole = np.frombuffer(target, np.uint8)
        if source is target:
            yield whole
            continue
        at = 0
        for part in paced(np.frombuffer(source, np.uint8), CHECKSUM_BYTES):
            there = whole[at : at + len(part)]
            there[:] = part
            yield there
            at += len(part)


def _decrypted(open_: Open, header: Header, pairs: Iterator[Pair]) -> bool:
    """Read an encrypted record. It is decrypted on the way to where it belongs, which may be where
    it was read to. Returns whether it is right."""
    opening = open_(header)
    if opening is None:
        return False
    for source, target in pairs:
        opening.move(source, target)
    return opening.right()


def _beginning(pairs: Iterator[Pair], size: int) -> Iterator[Pair]:
    """Yield the first ``size`` bytes of all pairs. All of them are read."""
    for source, target in pairs:
        part = target[:size]
        if part:
            yield (part if source is target else source[:size]), part
        size -= len(part)
