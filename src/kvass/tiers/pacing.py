"""Yields of the processor during bulk work (docs/decisions/002-bulk-work-yields.md).

A kernel that does not preempt (``PREEMPT_NONE``) runs a thread until its system call or its time
slice ends. So a tier works in parts and yields the processor between them.

A thread that yields loses the rest of its time slice. If other threads use the processor all the
time, a yield takes long. The thread then works for a short while before it yields again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Final

from kvass.tiers.base import Buffer

CHECKSUM_BYTES: Final = 512 << 10
"""Bytes that are checksummed between two yields: some 50 us of work."""
CIPHER_BYTES: Final = 512 << 10
"""Bytes that are encrypted or decrypted between two yields: some 60 us of work."""
IO_BYTES: Final = 4 << 20
"""Bytes of one system call. This keeps a device busy. With half of it, other threads would not wait
less."""

_SHARE: Final = 0.25
"""Time until the next yield, as a share of the duration of the last one. With 1, threads that yield
to each other would wait longer each time."""
_LONGEST_S: Final = 0.0002
"""Upper limit of the time until the next yield."""


class _PerThread(threading.local):
    until = 0.0
    """The time before which this thread does not yield."""


_thread = _PerThread()


def yield_cpu() -> None:
    """Yield this processor to other threads. Releases the GIL. Does nothing for a while after a
    yield that took long."""
    before = time.monotonic()
    if before >= _thread.until:
        os.sched_yield()
        after = time.monotonic()
        _thread.until = after + min((after - before) * _SHARE, _LONGEST_S)


def paced(data: Buffer, size: int) -> Iterator[memoryview]:
    """Iterate over ``data`` in parts of at most ``size`` bytes. Yields the processor before each
    part but the first."""
    for at in range(0, len(data), size):
        if at:
            yield_cpu()
        yield data[at : at + size].data
