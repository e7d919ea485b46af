"""Counts the bytes that came into L1 and left it.

Law of this file: L1 has the bytes that came in and did not leave. Each byte leaves for one cause.
"""

from __future__ import annotations

from typing import Final

from kvass.core.histogram import Histogram
from kvass.core.rows.causes import Cause
from kvass.core.rows.listeners import ClassesGone, Left, Listener, Readable
from kvass.core.rows.row_table import READY, RowTable
from kvass.core.rows.use_times import UseTimes

EVICTED: Final[frozenset[Cause]] = frozenset({"capacity", "handed_over", "ended", "kept"})
LET_GO: Final[frozenset[Cause]] = frozenset({"not_retained", "replaced"})


class Counts(Listener):
    """Adds to ``counters``, to what tenants lost, and to ``ages``, the ages at eviction."""

    def __init__(
        self, counters: dict[str, int], ages: Histogram, table: RowTable, uses: UseTimes
    ) -> None:
        self._counters, self._ages, self._table, self._uses = counters, ages, table, uses

    def readable(self, told: Readable) -> None:
        self._counters["l1_in_bytes"] += len(told.rows) * told.row_class.spec.row_bytes

    def left(self, told: Left) -> None:
        if told.state < READY:
            return
        size = len(told.rows) * told.row_class.spec.row_bytes
        if told.cause in EVICTED:
            self._evicted(told, size)
        else:
            name = told.cause if told.cause in LET_GO else "cleared"
            self._counters[f"bytes_evicted_{name}"] += size

    def gone(self, told: ClassesGone) -> None:
        for row_class in told.classes:
            held = sum(row_class.rows[READY:]) * row_class.spec.row_bytes
            self._counters["bytes_evicted_cleared"] += held

    def _evicted(self, told: Left, size: int) -> None:
        """Count an eviction. All rows count with the age of the first one, because their ages are
        about the same."""
        if not told.orphaned:
            told.row_class.tenant.evicted_bytes += size
        name, row_bytes = "orphaned" if told.orphaned else told.cause, told.row_class.spec.row_bytes
        self._counters[f"evicted_{name}"] += len(told.rows)
        self._counters[f"bytes_evicted_{name}"] += size
        unread = int((~self._table.read[told.rows]).sum())
        self._counters["unread_bytes_evicted"] += unread * row_bytes
        age = self._uses.age(int(self._table.stamp[told.rows[0]]))
        self._ages.observe(age, len(told.rows))
