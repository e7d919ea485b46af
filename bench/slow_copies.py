"""kvass's connector with slow copies, for ``bench.short_hits --slow-copies``.

Each row of a load takes so many times as long as it would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from bench.short_hits import SLOW
from kvass.layout.copy_plan import RowCopy
from kvass.transfer.base import U8Array
from kvass.transfer.host import Bundle
from tests.support.vllm.switched import SwitchedConnector

__all__ = ["SwitchedConnector"]


def slowed(
    load: Callable[[Bundle, U8Array, RowCopy], None], factor: float
) -> Callable[[Bundle, U8Array, RowCopy], None]:
    """``load``, and a pause after it."""

    def slow(bundle: Bundle, arena: U8Array, row: RowCopy) -> None:
        began_s = time.perf_counter()
        load(bundle, arena, row)
        time.sleep((factor - 1) * (time.perf_counter() - began_s))

    return slow


if SLOW in os.environ:  # of an engine's process
    Bundle.load = slowed(Bundle.load, float(os.environ[SLOW]))  # type: ignore[assignment, method-assign]
