"""The policy of eviction: rows of sessions that ended or come back late go first, then those that
were used least recently, then retained rows.

Law of this file: the order of a class is exact. Sets are compared with rows, and with one another,
by their last use.

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

from kvass.core.rows.extents import STAYS
from kvass.core.rows.order import Order, Victims
from kvass.core.rows.policy import Policy
from kvass.core.rows.retention import Retention
from kvass.core.rows.row_list import Entries, RowList, Segment, parts_of
from kvass.core.rows.row_table import NEVER, RowTable
from kvass.core.rows.tables import CoreTables
from kvass.core.rows.use_times import UseTimes
from kvass.types import I64Array

_SEGMENT: Final = 4096
"""Entries of a segment of the log."""
_MOST_LOOKS: Final = 16
"""How often one search looks for rows that are not retained any more: 5 ms of work."""
_TAKEN_BACK: Final = 8
"""How many segments of ``passed`` one call of ``oldest`` looks through for rows that are not
retained any more: 0.3 ms of work."""


class Listed:
    """Which rows of ``table`` are among those that are evicted first. The column takes 8 bytes a
    row, from the first of them on."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._stamps: I64Array = np.empty(0, np.int64)
        """The stamp that a row had when it was listed."""

    def new(self, rows: I64Array) -> I64Array:
        """List ``rows``, each named once. Returns those that were not listed: a row leaves when it
        is used or freed."""
        if len(self._stamps) < len(self._table):
            grown = np.full(len(self._table), NEVER)
            grown[: len(self._stamps)] = self._stamps
            self._stamps = grown
        stamps = self._table.stamp[rows]
        new: I64Array = rows[self._stamps[rows] != stamps]
        self._stamps[rows] = stamps
        return new


class UseLog(Entries, Order):
    """The uses of a class's rows in order of time. Appending and scanning are vectorised. Stamps
    are ascending.
    """

    def __init__(self, table: RowTable, listed: Listed, kept: Retention, uses: UseTimes) -> None:
        super().__init__(table, _SEGMENT)
        self._listed, self._kept, self.uses = listed, kept, uses
        self.passed = RowList(table)
        """Retained rows that ``oldest`` has passed over. The log has them no more."""
        self._releases = 0
        """``Retention.releases`` when a look through ``passed`` last began."""
        self._unseen = 0
        """How many segments of ``passed`` are still to be looked through."""
        self.ended = RowList(table)
        """Rows of sessions that have ended or are away. They are evicted before those of the log,
        however late they were used, but not in the step that uses them."""
        self._begin(0)

    def _begin(self, size: int = _SEGMENT) -> None:
        self._rows: I64Array = np.empty(size, np.int64)
        self._stamps: I64Array = np.empty(size, np.int64)
        self._used = 0

    def touched(self, rows: I64Array, stamps: I64Array) -> None:
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

    def evict_first(self, rows: I64Array) -> None:
        rows = self._listed.new(rows)
        self._kept.drop(rows)
        self.ended.add(rows[np.argsort(self._table.stamp[rows])])

    def first(self) -> I64Array:
        return self.ended.rows()

    def search(self, protect: int) -> LruSearch:
        return LruSearch(self._table, self, protect)

    @property
    def unseen(self) -> bool:
        """Whether ``oldest`` may find more if it is called again: it has not looked through all
        rows that it passed over."""
        return self._unseen > 0

    def oldest(self, count: int, protect: int) -> I64Array:
        """At most ``count`` evictable rows with a stamp below ``protect``; the oldest is first.
        Retained rows are passed over. They are in ``passed`` then."""
        if self._releases != self._kept.releases:
            self._releases, self._unseen = self._kept.releases, self.passed.segments
        if self._unseen:
            self._take_back()
        return super().oldest(count, protect)

    def _live(self, rows: I64Array, stamps: I64Array, protect: int) -> npt.NDArray[np.bool_]:
        live = super()._live(rows, stamps, protect)
        if self._kept.any:
            self._pass_over(rows, stamps, live)
        return live

    def _pass_over(self, rows: I64Array, stamps: I64Array, live: npt.NDArray[np.bool_]) -> None:
        """Move the retained rows among the ``live`` entries from this part of the log to
        ``passed``."""
        at = np.flatnonzero(live)
        at = at[self._kept.of(rows[at])]
        if len(at):
            self.passed.add(rows[at])
            stamps[at] -= 1  # it stays ascending, and no row of it has this stamp: stale
            live[at] = False

    def _take_back(self) -> None:
        """Put rows of ``passed`` that are not retained any more back where they would be in the
        log. The next calls go on with it."""
        rows = self.passed.take_out(self._kept.of, _TAKEN_BACK)
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


class LruSearch:
    """A search in ``log``. A search that finds many rows that may not be retained any more ends
    early; the next one goes on."""

    def __init__(self, table: RowTable, log: UseLog, protect: int) -> None:
        self._table, self._log, self._protect = table, log, protect
        self._looks = _MOST_LOOKS

    def victims(self, count: int) -> Iterator[Victims]:
        log, protect = self._log, self._protect
        yield Victims(log.ended.oldest(count, max(protect, log.uses.begun)), "ended")
        while not len(rows := log.oldest(count, protect)) and log.unseen:
            if not self._looks:
                return
            self._looks -= 1
        if len(rows):
            yield Victims(rows, "capacity", int(self._table.stamp[rows[0]]))
            return
        yield Victims(rows, "capacity", protect)
        yield Victims(log.passed.oldest(count, protect), "kept")
        yield Victims(rows, "kept", protect, last=True)


class LeastRecentlyUsed(Policy):
    """The policy over the rows of ``tables``. ``kept``: the retained rows."""

    def __init__(self, tables: CoreTables, kept: Retention) -> None:
        self._table, self._sets, self._kept = tables.table, tables.sets, kept
        self._uses = tables.uses
        self._listed = Listed(tables.table)

    def order(self) -> UseLog:
        return UseLog(self._table, self._listed, self._kept, self._uses)

    def begin(self, now: float) -> None:
        self._kept.sweep(now)

    def ranks(self, last: bool) -> I64Array:
        """The stamp of the last use of each set. A set of which half the rows are retained goes
        last."""
        may_go = self._sets.held == 0
        if not last:
            may_go &= 2 * self._kept.in_sets() < np.maximum(self._sets.slots, 1)
        ranks: I64Array = np.where(may_go, self._sets.newest, STAYS)
        return ranks
