"""The order of eviction: rows of ended sessions, then exact LRU over the rows of a row class,
then retained rows.

In a ``full`` group a chunk is never older than the chunks that follow it in its prefix, because
each use of a prefix stamps all of it, the deepest chunk first. So the deeper chunk is evicted
first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import takewhile
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.rows.retention import Retention
from kvass.core.rows.row_list import Entries, RowList, Segment, parts_of
from kvass.core.rows.row_table import NEVER, RowTable
from kvass.types import I64Array

_SEGMENT: Final = 4096
"""Entries of a segment of the log."""
_TAKEN_BACK: Final = 8
"""How many segments of ``passed`` one call of ``oldest`` looks through for rows that are not
retained any more: 0.3 ms of work."""


class UseLog(Entries):
    """The uses of a class's rows in order of time. Appending and scanning are vectorised. Stamps
    are ascending.
    """

    def __init__(self, table: RowTable, kept: Retention | None = None) -> None:
        super().__init__(table, _SEGMENT)
        self._kept = kept
        self.passed = RowList(table)
        """Retained rows that ``oldest`` has passed over. The log has them no more."""
        self._releases = 0
        """``Retention.releases`` when a look through ``passed`` last began."""
        self._unseen = 0
        """How many segments of ``passed`` are still to be looked through."""
        self.ended = RowList(table)
        """Rows of sessions that have ended. They are evicted before those of the log."""
        self._begin(0)

    def _begin(self, size: int = _SEGMENT) -> None:
        self._rows: I64Array = np.empty(size, np.int64)
        self._stamps: I64Array = np.empty(size, np.int64)
        self._used = 0

    def touched(self, rows: I64Array, stamps: I64Array) -> None:
        """Record that ``rows`` were used. ``stamps``: their new stamps in the table, ascending."""
        if not len(self._rows):  # allocated late: most classes that a clear creates are never used
            self._begin()
        while len(rows):
            n = min(len(rows), _SEGMENT - self._used)
            self._rows[self._used : self._used + n] = rows[:n]
            self._stamps[self._used : self._used + n] = stamps[:n]
            self._used += n
            rows, stamps = rows[n:], stamps[n:]
            if self._used == _SEGMENT:
                full = self._rows, self._stamps
                self._begin()
                self._append(*full)

    def fill(self, rows: I64Array, stamps: I64Array) -> None:
        """As ``touched``, of an empty log, with entries that are not stale: nothing is
        compacted."""
        assert self._used == len(self._segments) == 0, "the log has entries"
        whole = len(rows) // _SEGMENT * _SEGMENT
        self._segments = [
            (rows[at : at + _SEGMENT].copy(), stamps[at : at + _SEGMENT].copy())
            for at in range(0, whole, _SEGMENT)
        ]
        self.touched(rows[whole:], stamps[whole:])

    @property
    def unseen(self) -> bool:
        """Whether ``oldest`` may find more if it is called again: it has not looked through all
        rows that it passed over."""
        return self._unseen > 0

    def oldest(self, count: int, protect: int) -> I64Array:
        """At most ``count`` evictable rows with a stamp below ``protect``; the oldest is first.
        Retained rows are passed over. They are in ``passed`` then."""
        if self._kept is not None and self._releases != self._kept.releases:
            self._releases, self._unseen = self._kept.releases, self.passed.segments
        if self._kept is not None and self._unseen:
            self._take_back(self._kept)
        return super().oldest(count, protect)

    def _live(self, rows: I64Array, stamps: I64Array, protect: int) -> npt.NDArray[np.bool_]:
        live = super()._live(rows, stamps, protect)
        if self._kept is not None and self._kept.any:
            self._pass_over(self._kept, rows, stamps, live)
        return live

    def _pass_over(
        self,
        kept: Retention,
        rows: I64Array,
        stamps: I64Array,
        live: npt.NDArray[np.bool_],
    ) -> None:
        """Move the retained rows among the ``live`` entries from this part of the log to
        ``passed``."""
        at = np.flatnonzero(live)
        at = at[kept.of(rows[at])]
        if len(at):
            self.passed.add(rows[at])
            stamps[at] -= 1  # it stays ascending, and no row of it has this stamp: stale
            live[at] = False

    def _take_back(self, kept: Retention) -> None:
        """Put rows of ``passed`` that are not retained any more back where they would be in the
        log. The next calls go on with it."""
        rows = self.passed.take_out(kept.of, _TAKEN_BACK)
        self._unseen = max(0, self._unseen - _TAKEN_BACK)
        if not len(rows):
            return
        stamps = self._table.stamp[rows]
        order = np.argsort(stamps)
        rows, stamps = rows[order], stamps[order]
        at = bisect_left(
            self._segments, stamps[0], key=lambda each: each[1][0] if len(each[1]) else NEVER
        )
        self._segments.insert(at, (rows, stamps))
        self._tidied += at <= self._tidied

    def _parts(self, protect: int) -> Iterator[Segment]:
        last = self._rows[: self._used], self._stamps[: self._used]
        every = parts_of((*self._segments, last))
        return takewhile(lambda part: part[1][0] < protect, every)
