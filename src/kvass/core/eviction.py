"""Which rows leave when room is needed.

Law of this file: a policy ranks, it never acts. It reads the row table and changes nothing in it.

``Lru`` evicts the least recently used row, the deeper chunk first: whoever uses a prefix touches
all of it, deepest chunk first, so an ancestor is never older than its descendant and leaves after
it (as under an optimal policy: an ancestor's next use is never later).
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from kvass.core.rows import RowTable
from kvass.types import I64Array


class EvictionPolicy(Protocol):
    """One per (namespace, group).

    Guaranteed by the caller: a row that is freed gets another stamp (``NEVER``), so what a policy
    remembers of it goes stale by itself.
    """

    def touched(self, rows: I64Array, stamps: I64Array) -> None:
        """``rows`` were used; ``stamps`` (ascending) are what the table now says of them."""
        ...

    def victims(self, count: int, protect: int) -> I64Array:
        """At most ``count`` evictable rows stamped before ``protect``, the least valuable first."""
        ...


_WINDOW: Final = 2048
"""How much of the log is looked at in one numpy call."""
_SMALLEST: Final = 4096
"""A log shorter than this is not worth compacting."""


class Lru:
    """Exact LRU as a log of touches: appending and scanning are vectorised, nothing is sorted.

    An entry is stale once its row has another stamp. Compaction drops stale entries when the log is
    full and doubles it only if most are live: amortised O(1) per touch, 24 bytes a row and more.
    """

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._rows: I64Array = np.empty(_SMALLEST, np.int64)
        self._stamps: I64Array = np.empty(_SMALLEST, np.int64)
        self._head = 0
        self._tail = 0

    def touched(self, rows: I64Array, stamps: I64Array) -> None:
        n = len(rows)
        if self._tail + n > len(self._rows):
            self._compact(n)
        self._rows[self._tail : self._tail + n] = rows
        self._stamps[self._tail : self._tail + n] = stamps
        self._tail += n

    def victims(self, count: int, protect: int) -> I64Array:
        table, found, missing = self._table, [], count
        at, only_stale = self._head, True
        while missing > 0 and at < self._tail:
            end = min(at + _WINDOW, self._tail)
            rows, stamps = self._rows[at:end], self._stamps[at:end]
            if stamps[0] >= protect:
                break  # the log is in stamp order
            live = table.stamp[rows] == stamps
            if only_stale:  # the head moves over leading stale entries only
                first = int(live.argmax()) if live.any() else end - at
                self._head = at + first
                only_stale = first == end - at
            chosen = rows[live & table.evictable(rows) & (stamps < protect)][:missing]
            found.append(chosen)
            missing -= len(chosen)
            at = end
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _compact(self, room: int) -> None:
        rows, stamps = self._rows[self._head : self._tail], self._stamps[self._head : self._tail]
        live = self._table.stamp[rows] == stamps
        rows, stamps = rows[live], stamps[live]
        size = max(_SMALLEST, 4 * len(rows), 2 * (len(rows) + room))
        self._rows, self._stamps = np.empty(size, np.int64), np.empty(size, np.int64)
        self._rows[: len(rows)], self._stamps[: len(rows)] = rows, stamps
        self._head, self._tail = 0, len(rows)
