"""Fault the arena in, in the background.

Law of this file: this process touches each page first, so its cgroup is charged for the memory. And
nobody waits for it: it runs at low priority, in slices, without the GIL.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from kvass.arena.memory import SLICE_BYTES, Arena

_NICE: Final = 5
_log = logging.getLogger("kvass.daemon")


def populate(arena: Arena, stopping: threading.Event, grew: Callable[[int], None]) -> None:
    """Populate all of ``arena``; ``grew(bytes)`` after each slice. Runs in a thread of its own.

    Memory that cannot be had ends it: the rest of the arena is faulted in by whoever writes there.
    """
    os.nice(_NICE)  # Linux: of this thread alone
    for lo in range(0, arena.size, SLICE_BYTES):
        if stopping.is_set():
            return
        hi = min(lo + SLICE_BYTES, arena.size)
        try:
            arena.populate(lo, hi)
        except OSError as error:
            _log.warning("populated %d of %d arena bytes only: %s", lo, arena.size, error)
            return
        grew(hi)
