"""How bulk work lets others have the processor.

Law of this file: whoever moves or reads much for a tier does it in parts, and gives way between
them. A kernel that does not preempt itself (``PREEMPT_NONE``, ours while measuring) leaves the
processor to a thread until its system call or its time slice is over; niceness decides who is next,
not when. On two cores a lookup waited 2 to 4 ms for the checksum of 32 MiB, or while the pages of
one large read were pinned.

Who yields forfeits the rest of its time slice, so beside threads that never sleep a checksum that
yielded every 50 us came to a twentieth of its speed. Therefore it works for a while after each
turn that was long in coming: too short for anybody to notice, long enough to get on.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Final

from kvass.tiers.base import Buffer

CHECKSUM_BYTES: Final = 512 << 10
"""Bytes: a checksum of so much takes some 50 us."""
IO_BYTES: Final = 4 << 20
"""Bytes by one system call. Halving it gains nothing more; a device has enough to do with it."""

_SHARE: Final = 0.25
"""Of the time that it took to come back. Less than what several of us give each other: 1 would let
their waits grow with each turn."""
_LONGEST_S: Final = 0.0002
"""At most. With two busy loops on two cores four threads check 3.6 GiB/s (0.5 with 0; 7.7 with
0.0005), and what a lookup's p99 loses by it is too little to be measured."""


class _PerThread(threading.local):
    until = 0.0
    """When this thread gives way again."""


_thread = _PerThread()


def yield_cpu() -> None:
    """Whoever waits for this processor has it now; releases the GIL.

    After it took long to come back, the processor is ours for a share of that.
    """
    before = time.monotonic()
    if before >= _thread.until:
        os.sched_yield()
        after = time.monotonic()
        _thread.until = after + min((after - before) * _SHARE, _LONGEST_S)


def paced(data: Buffer, size: int) -> Iterator[memoryview]:
    """``data`` in parts of at most ``size`` bytes; gives way before each but the first."""
    for at in range(0, len(data), size):
        if at:
            yield_cpu()
        yield data[at : at + size].data
