"""Lists of rows beside the log of uses: those that are evicted before all others, or after them.

Law of this file: an entry names a row until the row is used again or freed. So whoever adds a row
need not remove it.

An entry has the stamp that the row had when it was added. Every use, and the end of the row,
changes the row's stamp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.rows.row_table import RowTable
from kvass.types import I64Array

_PART: Final = 512
"""Entries that one numpy call looks at."""
_SLACK: Final = 4096
"""How many more than twice its valid entries a list may have."""
_NO_ROWS: Final = np.empty(0, np.int64)


class RowList:
    """Rows of ``table`` in the order in which they were added."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._parts: list[tuple[I64Array, I64Array]] = []
        """Rows, and the stamp of each at that time."""
        self._size, self._most = 0, _SLACK

    def add(self, rows: I64Array) -> None:
        """Add ``rows``. The first of them is evicted first."""
        for begin in range(0, len(rows), _PART):
            part = rows[begin : begin + _PART].copy()
            self._parts.append((part, self._table.stamp[part]))
        self._size += len(rows)
        if self._size > self._most:
            self._compact()

    def oldest(self, count: int, protect: int) -> I64Array:
        """At most ``count`` evictable rows with a stamp below ``protect``; those that were added
        first are first."""
        table, found, missing, stale = self._table, [_NO_ROWS], count, 0
        for rows, stamps in self._parts:
            if missing <= 0:
                break
            valid = table.stamp[rows] == stamps
            if not valid.any() and stale + 1 == len(found):
                stale += 1  # all parts before it are stale, too
            rows = rows[valid & (stamps < protect)]
            found.append(rows[table.evictable(rows)][:missing])
            missing -= len(found[-1])
        self._size -= sum(len(rows) for rows, _ in self._parts[:stale])
        del self._parts[:stale]
        return _once(np.concatenate(found)) if len(found) > 1 else _NO_ROWS

    def take_out(self, stays: Callable[[I64Array], npt.NDArray[np.bool_]]) -> I64Array:
        """Remove the rows for which ``stays`` is False, and return them."""
        self._compact()
        rows = np.concatenate([_NO_ROWS, *[rows for rows, _ in self._parts]])
        stay = stays(rows)
        self._parts, self._size = [], 0
        self.add(rows[stay])
        gone: I64Array = rows[~stay]
        return gone

    def _compact(self) -> None:
        """Drop the entries that are not valid."""
        rows = np.concatenate([_NO_ROWS, *[rows for rows, _ in self._parts]])
        stamps = np.concatenate([_NO_ROWS, *[stamps for _, stamps in self._parts]])
        valid = self._table.stamp[rows] == stamps
        rows = _once(rows[valid])
        self._parts, self._size, self._most = [], 0, 2 * len(rows) + _SLACK
        self.add(rows)


def _once(rows: I64Array) -> I64Array:
    """``rows`` in their order, each once: a row may be added again while its entry is valid."""
    return rows[np.sort(np.unique(rows, return_index=True)[1])]
