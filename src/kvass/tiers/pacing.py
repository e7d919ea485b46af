"""Bulk work that yields the processor to other threads (docs/decisions/002-bulk-work-yields.md).

A kernel that does not preempt (``PREEMPT_NONE``) leaves the processor to a thread until its system
call or its time slice ends. So a tier works in parts and yields the processor between them.

A thread that yields loses the rest of its time slice. If other threads never sleep, a yield takes
long. After such a yield a thread works for a short while before it yields again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Final

from kvass.tiers.base import Buffer

CHECKSUM_BYTES: Final = 512 << 10
"""The part of a checksum between two yields: some 50 us."""
IO_BYTES: Final = 4 << 20
"""What one system call moves. Half of it gains nothing more, and it keeps a device busy."""

_SHARE: Final = 0.25
"""How long a thread works after a yield, as a share of what the yield took. With 1, threads that
yield to each other would wait longer each time."""
_LONGEST_S: Final = 0.0002
"""The longest time that a thread works after a yield."""


class _PerThread(threading.local):
    until = 0.0
    """When this thread yields again."""


_thread = _PerThread()


def yield_cpu() -> None:
    """Let other threads have this processor; releases the GIL. Does nothing for a while after a
    yield that took long."""
    before = time.monotonic()
    if before >= _thread.until:
        os.sched_yield()
        after = time.monotonic()
        _thread.until = after + min((after - before) * _SHARE, _LONGEST_S)


def paced(data: Buffer, size: int) -> Iterator[memoryview]:
    """``data`` in parts of at most ``size`` bytes; yields the processor before each but the
    first."""
    for at in range(0, len(data), size):
        if at:
            yield_cpu()
        yield data[at : at + size].data
