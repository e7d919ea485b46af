"""The kernel that moves short runs, in Triton: many small reads over the bus at once.

Law of this file: byte for byte what a loop over the runs would move; words of ``KERNEL_UNIT``
bytes, in any number, at any addresses that are multiples of them.

Runs in Triton's interpreter on a CPU (``TRITON_INTERPRET=1`` before the import).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import triton
import triton.language as tl

from kvass.errors import UsageError
from kvass.transfer.descriptors import KERNEL_UNIT

PROGRAMS: Final = 12
"""Enough to fill the bus, few enough to leave the engine its processors (published, not ours)."""
LANES: Final = 1024


# No annotations but Triton's own: its compiler looks up every name in them, and knows no ``Any``.
# One variant of the kernel, whatever the number of runs.
@triton.jit(do_not_specialize=["runs"])
def _copy_runs(table, runs, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row 0 of ``table``: targets; row 1: sources; row 2: bytes. Each program takes every n-th."""
    for i in range(tl.program_id(0), runs, tl.num_programs(0)):
        target = tl.load(table + i).to(tl.pointer_type(tl.int64))
        source = tl.load(table + runs + i).to(tl.pointer_type(tl.int64))
        words = tl.load(table + 2 * runs + i) // 8
        for begin in range(0, words, lanes):
            place = begin + tl.arange(0, lanes)
            inside = place < words
            tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


def copy_runs(table: Any, programs: int = PROGRAMS) -> None:
    """Launch on the current stream. ``table``: int64 tensor of shape ``(3, runs)`` in host memory,
    addresses and bytes as the device sees them, itself readable by the device until the kernel is
    over. Raises UsageError, before a byte moved, if any of them is no multiple of ``KERNEL_UNIT``:
    the kernel would round."""
    if np.bitwise_or.reduce(table.numpy(), axis=None) % KERNEL_UNIT:
        raise UsageError(f"the kernel moves words of {KERNEL_UNIT} bytes; send other runs by DMA")
    if table.shape[1]:
        _copy_runs[(programs,)](table, table.shape[1], lanes=LANES)
