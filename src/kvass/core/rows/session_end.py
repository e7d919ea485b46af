"""The end of a client's session, in slices: its rows join those that are evicted first.

Law of this file: no slice works on more than a few times ``SLICE`` rows. The least recently used
rows of a session join first, and none joins any more when the session goes on.

First all rows are found, in parts that are sorted by their last use. Then each slice takes from all
parts the rows that were used before the next bound. The bounds come from every ``_SAMPLED``-th row
of each part. So a slice has ``SLICE`` rows and at most ``_SAMPLED`` more for each part.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvass.core.rows.row_states import RowStates
from kvass.core.rows.session_tags import SessionTags
from kvass.types import I64Array

SLICE: Final = 4096
"""About so many rows are found, or join, in a step: 1 ms of work."""
_SAMPLED: Final = 64
_END: Final = 1 << 62
"""A stamp after all others."""


class SessionEnd:
    """The end of the session with the tag ``tag``. Only those of its rows join that the tenant with
    the id ``tenant`` pays for. ``asker``: the session and the number of the message that said so.
    """

    def __init__(self, asker: tuple[int, int], tag: int, tenant: int) -> None:
        self.asker, self.tag, self.tenant = asker, tag, tenant
        self.rows = 0
        """How many rows have joined."""
        self._parts: list[tuple[I64Array, I64Array]] = []
        """Rows that have not joined, and the stamp of each when it was found; ascending."""
        self._next = 0
        """The row with which the search goes on."""
        self._bounds: list[int] = []
        """The stamps at which the next slices end; the last slice is first. Empty: the search is
        not over."""

    def go_on(self, rows: RowStates, tags: SessionTags) -> bool:
        """Do the next slice. Returns whether it was the last one."""
        if not tags.has_ended(self.tag, self.tenant):
            return True
        if not self._bounds:
            self._find(rows, tags)
            if len(self._bounds) != 1:
                return False
        self._join(rows)
        return not self._bounds

    def _find(self, rows: RowStates, tags: SessionTags) -> None:
        """Find the rows of a slice."""
        found, self._next = tags.rows_of(self.tag, self._next, SLICE)
        found = found[rows.classes.sets.tenant[rows.table.set_of[found]] == self.tenant]
        stamps = rows.table.stamp[found]
        order = np.argsort(stamps)
        self._parts.append((found[order], stamps[order]))
        if self._next >= len(tags):
            sampled = np.sort(np.concatenate([s[::_SAMPLED] for _, s in self._parts]))
            every = SLICE // _SAMPLED
            self._bounds = [_END, *sampled[every::every].tolist()[::-1]]

    def _join(self, rows: RowStates) -> None:
        """Have the rows of a slice join those that are evicted first, unless they were used or
        freed since they were found."""
        bound, taken = self._bounds.pop(), []
        for i, part in enumerate(self._parts):
            n = int(part[1].searchsorted(bound))
            taken.append((part[0][:n], part[1][:n]))
            self._parts[i] = part[0][n:], part[1][n:]
        found, stamps = map(np.concatenate, zip(*taken, strict=True))
        found = found[rows.table.stamp[found] == stamps]
        self.rows += len(found)
        for row_class, theirs in rows.by_class(found):
            if row_class is not None:
                row_class.order.evict_first(theirs)
