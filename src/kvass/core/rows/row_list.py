"""Rows in an order of eviction, and the lists of rows that are evicted before all others, or after
them.

Law of this file: an entry names a row until the row is used again or freed. So whoever adds a row
need not remove it. No call looks at all entries, unless it finds no row that may be evicted.

An entry has the stamp that the row had when it was added. Every use, and the end of the row,
changes the row's stamp. The entry is stale then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.rows.row_table import RowTable
from kvass.types import I64Array

LOOK: Final = 512
"""Entries that one numpy call looks at. Most calls of ``oldest`` need few rows."""
_TIDIED: Final = 2
"""How many old segments are compacted when a segment is added. A higher number means a shorter list
and more work."""

Segment = tuple[I64Array, I64Array]
"""Rows, and the stamp of each."""


class Entries:
    """Entries for rows of ``table`` in segments of at most ``segment`` entries.

    When a segment is added, the next ``_TIDIED`` old segments are compacted: they lose their stale
    entries and are joined to their neighbours. So each call is short, and about half of the entries
    are not stale.
    """

    def __init__(self, table: RowTable, segment: int) -> None:
        self._table, self._segment = table, segment
        self._segments: list[Segment] = []
        self._tidied = 0
        """The next segment to be compacted."""

    def oldest(self, count: int, protect: int) -> I64Array:
        """At most ``count`` evictable rows with a stamp below ``protect``; those that are to be
        evicted first are first."""
        table, found, missing = self._table, list[I64Array](), count
        for rows, stamps in self._parts(protect):
            if not missing:
                break
            rows = rows[self._live(rows, stamps, protect)]
            found.append(rows[table.evictable(rows)][:missing])
            missing -= len(found[-1])
        if found and not len(found[0]):
            self._drop_stale()
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _live(self, rows: I64Array, stamps: I64Array, protect: int) -> npt.NDArray[np.bool_]:
        """Which of these entries are not stale and have a stamp below ``protect``."""
        live: npt.NDArray[np.bool_] = (self._table.stamp[rows] == stamps) & (stamps < protect)
        return live

    def _append(self, rows: I64Array, stamps: I64Array) -> None:
        """Add a segment."""
        self._segments.append((rows, stamps))
        for _ in range(_TIDIED):
            self._tidy()

    def _tidy(self) -> None:
        """Compact one segment, and join it to the one before if both fit into one."""
        at = self._tidied % len(self._segments)
        rows, stamps = self._segments[at]
        live = self._table.stamp[rows] == stamps
        kept = rows[live], stamps[live]
        if at and len(self._segments[at - 1][0]) + len(kept[0]) <= self._segment:
            before = self._segments[at - 1]
            kept = np.concatenate([before[0], kept[0]]), np.concatenate([before[1], kept[1]])
            self._segments[at - 1 : at + 1] = [kept]
            self._tidied = at
        else:
            self._segments[at] = kept
            self._tidied = at + 1

    def _parts(self, protect: int) -> Iterator[Segment]:
        """The entries in parts of ``LOOK``, in their order; all that have a stamp below
        ``protect``."""
        return parts_of(self._segments)

    def _drop_stale(self) -> None:
        """Remove the stale entries at the beginning."""
        while self._segments:
            rows, stamps = self._segments[0]
            live = self._table.stamp[rows[:LOOK]] == stamps[:LOOK]
            first = int(live.argmax()) if live.any() else len(live)
            self._segments[0] = rows[first:], stamps[first:]
            if first < len(live):
                return
            if first == len(rows):
                del self._segments[0]


def parts_of(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The entries of ``segments`` in parts of ``LOOK``."""
    for rows, stamps in segments:
        for begin in range(0, len(rows), LOOK):
            yield rows[begin : begin + LOOK], stamps[begin : begin + LOOK]


class RowList(Entries):
    """Rows of ``table`` in the order in which they were added. A row may be added again when its
    entry is stale."""

    def __init__(self, table: RowTable) -> None:
        super().__init__(table, LOOK)

    @property
    def segments(self) -> int:
        """The number of segments."""
        return len(self._segments)

    def rows(self) -> I64Array:
        """All rows of the list."""
        rows = [rows[self._table.stamp[rows] == stamps] for rows, stamps in self._segments]
        return np.concatenate(rows) if rows else np.empty(0, np.int64)

    def add(self, rows: I64Array) -> None:
        """Add ``rows``. The first of them is evicted first."""
        for begin in range(0, len(rows), LOOK):
            part = rows[begin : begin + LOOK].copy()
            self._append(part, self._table.stamp[part])

    def take_out(self, stays: Callable[[I64Array], npt.NDArray[np.bool_]], most: int) -> I64Array:
        """Look at the first ``most`` segments: remove the rows for which ``stays`` is False, and
        return them. The others become the last of the list."""
        gone = [np.empty(0, np.int64)]
        for _ in range(most):
            if not self._segments:
                break
            rows, stamps = self._segments.pop(0)
            rows = rows[self._table.stamp[rows] == stamps]
            stay = stays(rows)
            self.add(rows[stay])
            gone.append(rows[~stay])
        return np.concatenate(gone)
