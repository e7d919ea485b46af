"""The free slots of a row class, in the order in which they are given.

Law of this file: a slot is listed once. The slot that was freed last is given next, so that no more
extents are in use than are needed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvass.types import I64Array

_SMALLEST = 64


class FreeSlots:
    """A stack of row ids; what is at the end of the array is given first."""

    def __init__(self) -> None:
        self._rows: I64Array = np.empty(_SMALLEST, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def listed(self) -> I64Array:
        """All of them, the next one first."""
        return self._rows[: self._count][::-1]

    def give_back(self, rows: I64Array) -> None:
        """``rows`` are free; the first of them is the next that is given."""
        self._fit(len(rows))
        self._rows[self._count : self._count + len(rows)] = rows[::-1]
        self._count += len(rows)

    def give_new(self, rows: I64Array) -> None:
        """``rows``, of a new set, are free; they are given after all that are listed already."""
        self._fit(len(rows))
        self._rows[len(rows) : self._count + len(rows)] = self._rows[: self._count].copy()
        self._rows[: len(rows)] = rows[::-1]
        self._count += len(rows)

    def take(self, count: int) -> I64Array:
        """The next ``count``, or as many as there are."""
        count = min(count, self._count)
        self._count -= count
        return self._rows[self._count : self._count + count][::-1].copy()

    def drop(self, gone: npt.NDArray[np.bool_]) -> None:
        """Forget the slots whose row id is marked in ``gone``: their sets are given away."""
        rows = self._rows[: self._count]
        rows = rows[~gone[rows]]
        self._count = len(rows)
        self._rows[: self._count] = rows

    def _fit(self, more: int) -> None:
        if self._count + more > len(self._rows):
            rows = np.empty(2 * (self._count + more), np.int64)
            rows[: self._count] = self._rows[: self._count]
            self._rows = rows
