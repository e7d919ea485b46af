"""The order of eviction: rows of ended sessions, then exact LRU over the rows of a row class,
then retained rows.

In a ``full`` group a chunk is never older than the chunks that follow it in its prefix, because
each use of a prefix stamps all of it, the deepest chunk first. So the deeper chunk is evicted
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.rows.retention import Retention
from kvass.core.rows.row_list import RowList
from kvass.core.rows.row_table import NEVER, READY, RowTable
from kvass.types import I64Array

_SEGMENT: Final = 4096
"""Entries of a segment of the log."""
_LOOK: Final = 512
"""Entries that one numpy call looks at. Most calls of ``oldest`` need few rows."""
_TIDIED: Final = 2
"""How many old segments are compacted when a segment is full. A higher number means a shorter log
and more work."""

_LogSegment = tuple[I64Array, I64Array]
"""Rows, and the stamp of each. Stamps are ascending."""


class UseLog:
    """The uses of a class's rows in order of time. Appending and scanning are vectorised.

    An entry is stale when its row has a newer stamp. When a segment is full, the next ``_TIDIED``
    old segments are compacted: they lose their stale entries and are joined to their neighbours. So
    each call is short, and about half of the entries of the log are not stale.
    """

    def __init__(self, table: RowTable, kept: Retention | None = None) -> None:
        self._table, self._kept = table, kept
        self.passed = RowList(table)
        """Retained rows that ``oldest`` has passed over. The log has them no more."""
        self._releases = 0
        """``Retention.releases`` when ``passed`` was last looked through."""
        self.ended = RowList(table)
        """Rows of sessions that have ended. They are evicted before those of the log."""
        self._segments: list[_LogSegment] = []
        """The full segments; the oldest is first."""
        self._tidied = 0
        """The next segment to be compacted."""
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
                self._segments.append((self._rows, self._stamps))
                self._begin()
                for _ in range(_TIDIED):
                    self._tidy()

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

    def touched_before(self, rows: I64Array, stamps: I64Array) -> None:
        """Record that ``rows`` were used before all others of the log. ``stamps``: their stamps in
        the table, ascending."""
        if self._segments and len(self._segments[0][0]) + len(rows) <= _SEGMENT:
            after = self._segments[0]
            both = np.concatenate([rows, after[0]]), np.concatenate([stamps, after[1]])
            self._segments[0] = both
        else:
            self._segments.insert(0, (rows.copy(), stamps.copy()))
            self._tidied += 1

    @property
    def last_stamp(self) -> int:
        """A number that grows with every use of a row."""
        if self._used:
            return int(self._stamps[self._used - 1])
        return int(self._segments[-1][1][-1]) if self._segments else NEVER

    def newest(self, count: int) -> I64Array:
        """At most ``count`` readable rows; the one that was used last is first."""
        found, missing = [np.empty(0, np.int64)], count
        last = self._rows[: self._used], self._stamps[: self._used]
        for rows, stamps in (last, *reversed(self._segments)):
            live = (self._table.stamp[rows] == stamps) & (self._table.state[rows] >= READY)
            found.append(rows[live][::-1][:missing])
            missing -= len(found[-1])
            if not missing:
                break
        return np.concatenate(found)

    def _tidy(self) -> None:
        """Compact one segment, and join it to the one before if both fit into one."""
        at = self._tidied % len(self._segments)
        rows, stamps = self._segments[at]
        live = self._table.stamp[rows] == stamps
        kept = rows[live], stamps[live]
        if at and len(self._segments[at - 1][0]) + len(kept[0]) <= _SEGMENT:
            before = self._segments[at - 1]
            kept = np.concatenate([before[0], kept[0]]), np.concatenate([before[1], kept[1]])
            self._segments[at - 1 : at + 1] = [kept]
            self._tidied = at
        else:
            self._segments[at] = kept
            self._tidied = at + 1

    def oldest(self, count: int, protect: int) -> I64Array:
        """At most ``count`` evictable rows with a stamp below ``protect``; the oldest is first.
        Retained rows are passed over. They are in ``passed`` then."""
        if self._kept is not None and self._releases != self._kept.releases:
            self._take_back(self._kept)
        table, found, missing = self._table, list[I64Array](), count
        for rows, stamps in self._parts():
            if not missing or stamps[0] >= protect:
                break  # the log is in stamp order
            live = table.stamp[rows] == stamps
            if stamps[-1] >= protect:
                live &= stamps < protect
            if self._kept is not None and self._kept.any:
                self._pass_over(self._kept, rows, stamps, live)
            rows = rows[live]
            found.append(rows[table.evictable(rows)][:missing])
            missing -= len(found[-1])
        if found and not len(found[0]):
            self._drop_stale()
        return np.concatenate(found) if found else np.empty(0, np.int64)

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
        """Put the rows of ``passed`` that are not retained any more back, at the beginning of the
        log: they were used before all that it has."""
        self._releases = kept.releases
        rows = self.passed.take_out(kept.of)
        rows = rows[np.argsort(self._table.stamp[rows])]
        parts = [rows[at : at + _SEGMENT] for at in range(0, len(rows), _SEGMENT)]
        self._segments[:0] = [(part, self._table.stamp[part]) for part in parts]
        self._tidied += len(parts)

    def _parts(self) -> Iterator[_LogSegment]:
        """The log in parts of ``_LOOK`` entries; the oldest is first."""
        last = self._rows[: self._used], self._stamps[: self._used]
        for rows, stamps in (*self._segments, last):
            for begin in range(0, len(rows), _LOOK):
                yield rows[begin : begin + _LOOK], stamps[begin : begin + _LOOK]

    def _drop_stale(self) -> None:
        """Remove the stale entries at the beginning of the log."""
        while self._segments:
            rows, stamps = self._segments[0]
            live = self._table.stamp[rows[:_LOOK]] == stamps[:_LOOK]
            first = int(live.argmax()) if live.any() else len(live)
            self._segments[0] = rows[first:], stamps[first:]
            if first < len(live):
                return
            if first == len(rows):
                del self._segments[0]
