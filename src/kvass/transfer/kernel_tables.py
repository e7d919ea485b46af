"""The tables that tell the kernel its runs: pinned memory, allocated once.

Law of this file: after ``Tables`` was made nothing is allocated for a launch (to allocate pinned
memory stops the whole device, and the engine with it), and a table is written anew only when
whoever was given it has let go of it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from kvass.transfer.runtime import MAX_DESCRIPTORS, Batch
from kvass.types import I64Array

TABLES: Final = 32
"""3 MiB. Of full batches no more than four fly."""
TABLE_WORDS: Final = 3 * MAX_DESCRIPTORS


class Table:
    """``rows``: targets, sources and bytes. It is free again when nobody holds it."""

    def __init__(self, number: int, rows: I64Array, free: deque[int]) -> None:
        self.rows = rows
        self._number, self._free = number, free

    def __del__(self) -> None:
        self._free.append(self._number)


class Tables:
    """Cut out of ``words``, of shape ``(any, TABLE_WORDS)``, readable by the device. Taken on any
    thread, let go of on any."""

    def __init__(self, words: I64Array) -> None:
        self._words = words
        self._free = deque(range(len(words)))

    def __len__(self) -> int:
        return len(self._words)

    @property
    def free(self) -> int:
        """How many there are to be taken."""
        return len(self._free)

    def take(self, batch: Batch) -> Table | None:
        """A table of the batch's runs; None if all are in use."""
        try:
            number = self._free.popleft()
        except IndexError:
            return None
        rows = self._words[number, : 3 * len(batch.bytes)].reshape(3, -1)
        for row, column in zip(rows, (batch.target, batch.source, batch.bytes), strict=True):
            row[:] = column.view(np.int64)
        return Table(number, rows, self._free)
