"""The table of extent sets, and the stack of free slots of each row class.

Law of this file: both are updated with each change of a row, so that the allocator can choose among
16,384 sets without looking at rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.rows.extents import STAYS, ExtentSet
from kvass.core.rows.row_table import NEVER, NOBODY
from kvass.types import I64Array

CLEARED: Final = -2
"""The owner of a set whose class was removed. No lookup finds its rows."""
_SMALLEST: Final = 64


class SetTable:
    """The extent sets by number, in columns of int64. It grows and never shrinks.

    ``owner``: the id of its row class, ``CLEARED``, or ``NOBODY`` for a number without a set, whose
    other columns mean nothing. ``newest``: the stamp of its last use; ``NEVER`` if all its rows are
    FREE or it is cleared. ``held``: the pins on its rows plus its rows that are WRITING, LOADING or
    QUARANTINED. A set whose ``held`` is 0 may be given back. ``used``: its rows that are not FREE.
    ``first``, ``slots``: its first row and the number of its rows. ``tenant``: the id of the tenant
    that pays for it. ``bytes``: its size in the arena.
    """

    def __init__(self) -> None:
        self._view(np.empty((8, 0), np.int64))
        self.cleared = 0
        """The number of ``CLEARED`` sets."""

    def _view(self, columns: I64Array) -> None:
        self._columns = columns
        self.owner, self.newest, self.held, self.used, *rest = columns
        self.first, self.slots, self.tenant, self.bytes = rest

    def add(self, made: ExtentSet, owner: int, tenant: int) -> None:
        """Enter a new extent set of a row class and a tenant."""
        if made.id >= (known := len(self.owner)):
            columns = np.zeros((8, 2 * made.id + 1), np.int64)
            columns[:, :known] = self._columns
            self._view(columns)
            self.owner[known:], self.newest[known:] = NOBODY, NEVER
        self.owner[made.id], self.newest[made.id] = owner, NEVER
        self.first[made.id], self.slots[made.id] = made.first_row, made.slots
        self.tenant[made.id], self.bytes[made.id] = tenant, sum(made.extent_bytes)

    def rows_of(self, sets: I64Array) -> I64Array:
        """The rows of ``sets``, set by set."""
        slots = self.slots[sets]
        before = np.cumsum(slots) - slots
        rows: I64Array = np.repeat(self.first[sets] - before, slots)
        return rows + np.arange(len(rows))

    def idle_cleared(self) -> I64Array:
        """The cleared sets that nobody reads or writes."""
        return np.flatnonzero((self.owner == CLEARED) & (self.held == 0))

    @property
    def cleared_bytes(self) -> int:
        """The size of all cleared sets in the arena."""
        return int(self.bytes[self.owner == CLEARED].sum()) if self.cleared else 0

    def last_uses(self) -> dict[int, int]:
        """The stamp of the last use of each class that has sets, by its id; ``STAYS`` if any of its
        rows is in use now."""
        sets = np.flatnonzero(self.owner >= 0)
        used = np.where(self.held[sets] > 0, STAYS, self.newest[sets])
        classes, which = np.unique(self.owner[sets], return_inverse=True)
        last = np.full(len(classes), NEVER)
        np.maximum.at(last, which, used)
        return dict(zip(classes.tolist(), last.tolist(), strict=True))


class FreeSlots:
    """The free slots of a row class: a stack of rows, each of which is in it once.

    The slot that was freed last is allocated next, so that as few extents as possible are in use.
    """

    def __init__(self) -> None:
        self._rows: I64Array = np.empty(_SMALLEST, np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def listed(self) -> I64Array:
        """All free slots; the next to be allocated is first."""
        return self._rows[: self._count][::-1]

    def give_back(self, rows: I64Array) -> None:
        """Add freed ``rows``. The first of them is allocated next."""
        self._fit(len(rows))
        self._rows[self._count : self._count + len(rows)] = rows[::-1]
        self._count += len(rows)

    def give_new(self, rows: I64Array) -> None:
        """Add ``rows`` of a new set. They are allocated after all slots that are free already."""
        self._fit(len(rows))
        self._rows[len(rows) : self._count + len(rows)] = self._rows[: self._count].copy()
        self._rows[: len(rows)] = rows[::-1]
        self._count += len(rows)

    def take(self, count: int) -> I64Array:
        """Allocate the next ``count`` slots, or as many as there are."""
        count = min(count, self._count)
        self._count -= count
        return self._rows[self._count : self._count + count][::-1].copy()

    def drop(self, gone: npt.NDArray[np.bool_]) -> None:
        """Remove the slots that are marked in ``gone`` (by row), because their sets are given
        back."""
        rows = self._rows[: self._count]
        rows = rows[~gone[rows]]
        self._count = len(rows)
        self._rows[: self._count] = rows

    def _fit(self, more: int) -> None:
        if self._count + more > len(self._rows):
            rows = np.empty(2 * (self._count + more), np.int64)
            rows[: self._count] = self._rows[: self._count]
            self._rows = rows
