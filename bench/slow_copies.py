"""kvass's connector with slow copies, for ``bench.short_hits --slow-copies`` and ``bench.waves``.

Each row of a load takes so many times as long as it would; or as long as at a number of bytes per
second, one row after another, as on a device.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Lock
from typing import Final

from bench.short_hits import PACE, SLOW
from kvass.layout.copy_plan import RowCopy
from kvass.transfer.base import U8Array
from kvass.transfer.host import Bundle
from tests.support.vllm.switched import SwitchedConnector

__all__ = ["SwitchedConnector"]

LATE_S: Final = 0.002
"""A copy that begins so long after the end of another one does not follow it at once."""
Load = Callable[[Bundle, U8Array, RowCopy], None]


def slowed(load: Load, factor: float) -> Load:
    """``load``, and a pause after it."""

    def slow(bundle: Bundle, arena: U8Array, row: RowCopy) -> None:
        began_s = time.perf_counter()
        load(bundle, arena, row)
        time.sleep((factor - 1) * (time.perf_counter() - began_s))

    return slow


def paced(load: Load, bytes_s: float) -> Load:
    """``load``, with a pause after it, one at a time. Where one follows another at once, a pause
    that was too long makes the next one shorter."""
    device, free_s = Lock(), 0.0

    def slow(bundle: Bundle, arena: U8Array, row: RowCopy) -> None:
        nonlocal free_s
        with device:
            now_s = time.perf_counter()
            free_s = free_s if now_s - free_s < LATE_S else now_s
            free_s += bundle.slot(arena, row).nbytes / bytes_s
            load(bundle, arena, row)
            time.sleep(max(0.0, free_s - time.perf_counter()))

    return slow


if SLOW in os.environ:  # of an engine's process
    Bundle.load = slowed(Bundle.load, float(os.environ[SLOW]))  # type: ignore[assignment, method-assign]
if PACE in os.environ:
    Bundle.load = paced(Bundle.load, float(os.environ[PACE]))  # type: ignore[assignment, method-assign]
