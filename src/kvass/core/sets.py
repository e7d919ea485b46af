"""The table of extent sets: whose each is, whether it may be given away, and when it was last used.

It is kept up to date as rows change, so that choosing among 16,384 sets looks at no rows.
``row_store`` alone changes it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.core.extents import ExtentSet
from kvass.core.rows import NEVER, NOBODY
from kvass.types import I64Array

CLEARED: Final = -2
"""The owner of sets whose class was cleared or removed: nobody finds their rows any more."""


class SetTable:
    """Columns of int64; grows, never shrinks. Of a number without a set only ``owner`` counts."""

    def __init__(self) -> None:
        none = np.empty(0, np.int64)
        self.owner: I64Array = none
        """Its class, ``CLEARED``, or ``NOBODY``."""
        self.newest: I64Array = none
        """When any row of it was last used; ``NEVER`` if all are FREE, or it is cleared."""
        self.held: I64Array = none
        """Pins on its rows, and rows that are WRITING, LOADING or QUARANTINED: it may go at 0."""
        self.used: I64Array = none
        """Its rows that are not FREE."""
        self.first: I64Array = none
        self.slots: I64Array = none
        """Its first row, and how many it has."""
        self.cleared = 0
        """How many sets are ``CLEARED``."""

    def add(self, made: ExtentSet, owner: int) -> None:
        """A new set, all of its rows FREE."""
        if made.id >= len(self.owner):
            more = max(made.id + 1, 2 * len(self.owner)) - len(self.owner)
            nothing = np.zeros(more, np.int64)
            self.owner = np.concatenate([self.owner, np.full(more, NOBODY)])
            self.newest = np.concatenate([self.newest, np.full(more, NEVER)])
            self.held = np.concatenate([self.held, nothing])
            self.used = np.concatenate([self.used, nothing])
            self.first = np.concatenate([self.first, nothing])
            self.slots = np.concatenate([self.slots, nothing])
        self.owner[made.id], self.newest[made.id] = owner, NEVER
        self.first[made.id], self.slots[made.id] = made.first_row, made.slots

    def rows_of(self, sets: I64Array) -> I64Array:
        """All rows of ``sets``, in their order."""
        slots = self.slots[sets]
        before = np.cumsum(slots) - slots
        rows: I64Array = np.repeat(self.first[sets] - before, slots)
        return rows + np.arange(len(rows))
