"""How bulk work lets others have the processor.

Law of this file: whoever moves or reads much for a tier does it in parts, and gives way between
them. A kernel that does not preempt itself (``PREEMPT_NONE``, as most servers have it) leaves the
processor to a thread until its system call or its time slice is over; niceness decides who is next,
not when. On two cores a lookup waited 2 to 4 ms for the checksum of 32 MiB, or while the pages of
one large read were pinned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from kvass.tiers.base import Buffer

CHECKED: Final = 512 << 10
"""Bytes: a checksum of so much takes some 50 us."""
MOVED: Final = 4 << 20
"""Bytes by one system call. Halving it gains nothing more; a device has enough to do with it."""

give_way = os.sched_yield
"""Whoever waits for this processor has it now; releases the GIL."""


def in_turns(data: Buffer, size: int) -> Iterator[memoryview]:
    """``data`` in parts of at most ``size`` bytes; gives way before each but the first."""
    for at in range(0, len(data), size):
        if at:
            give_way()
        yield data[at : at + size].data
