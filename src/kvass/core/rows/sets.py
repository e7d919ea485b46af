"""The table of extent sets, and the free slots of each row class. ``row_allocator`` changes them.

Both are kept up to date as rows change, so that choosing among 16,384 sets looks at no rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.rows.extents import STAYS, ExtentSet
from kvass.core.rows.row_table import NEVER, NOBODY
from kvass.types import I64Array

CLEARED: Final = -2
"""The owner of sets whose class was cleared or removed: nobody finds their rows any more."""
_SMALLEST: Final = 64


class SetTable:
    """Columns of int64; grows, never shrinks. Of a number without a set only ``owner`` counts.

    ``owner``: its class, ``CLEARED``, or ``NOBODY``. ``newest``: when any row of it was last used;
    ``NEVER`` if all are FREE, or it is cleared. ``held``: pins on its rows, and rows that are
    WRITING, LOADING or QUARANTINED: it may go at 0. ``used``: its rows that are not FREE.
    ``first``, ``slots``: its first row, and how many it has. ``tenant``: the id of who pays for it.
    ``bytes``: what it takes of the arena.
    """

    def __init__(self) -> None:
        self._view(np.empty((8, 0), np.int64))
        self.cleared = 0
        """How many sets are ``CLEARED``."""

    def _view(self, columns: I64Array) -> None:
        self._columns = columns
        self.owner, self.newest, self.held, self.used, *rest = columns
        self.first, self.slots, self.tenant, self.bytes = rest

    def add(self, made: ExtentSet, owner: int, tenant: int) -> None:
        if made.id >= (known := len(self.owner)):
            columns = np.zeros((8, 2 * made.id + 1), np.int64)
            columns[:, :known] = self._columns
            self._view(columns)
            self.owner[known:], self.newest[known:] = NOBODY, NEVER
        self.owner[made.id], self.newest[made.id] = owner, NEVER
        self.first[made.id], self.slots[made.id] = made.first_row, made.slots
        self.tenant[made.id], self.bytes[made.id] = tenant, sum(made.extent_bytes)

    def rows_of(self, sets: I64Array) -> I64Array:
        slots = self.slots[sets]
        before = np.cumsum(slots) - slots
        rows: I64Array = np.repeat(self.first[sets] - before, slots)
        return rows + np.arange(len(rows))

    def idle_cleared(self) -> I64Array:
        """Those cleared ones in which nobody reads or writes."""
        return np.flatnonzero((self.owner == CLEARED) & (self.held == 0))

    @property
    def cleared_bytes(self) -> int:
        """What cleared sets still take of the arena."""
        return int(self.bytes[self.owner == CLEARED].sum()) if self.cleared else 0

    def last_uses(self) -> dict[int, int]:
        """When a row of each class that has sets was last used; ``STAYS`` while any is in use."""
        sets = np.flatnonzero(self.owner >= 0)
        used = np.where(self.held[sets] > 0, STAYS, self.newest[sets])
        classes, which = np.unique(self.owner[sets], return_inverse=True)
        last = np.full(len(classes), NEVER)
        np.maximum.at(last, which, used)
        return dict(zip(classes.tolist(), last.tolist(), strict=True))


class FreeSlots:
    """The free slots of a class: a stack of row ids, each listed once.

    The slot that was freed last is given next, so that no more extents are in use than are needed.
    """

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
