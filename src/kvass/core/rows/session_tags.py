"""Which session of a client stored each row, and which sessions have ended.

Laws of this file:

- A row has the tag of a session only while that session alone has stored, loaded and used it.
- Only the tenant that pays for a row can end its session.
- Nothing here survives a restart, and nothing here says what a lookup finds.

A *session* is a client's conversation. Engines name it by a tag of 32 bits (``types.session_tag``).
Two sessions with one tag count as one. The column takes 4 bytes a row, from the first tag of a boot
on.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.rows.listeners import Entered, Left, Listener, Used
from kvass.core.rows.tables import CoreTables
from kvass.types import I64Array

NO_SESSION: Final = 0
"""The tag of a row that no session or several sessions have used."""
MOST_ENDED: Final = 4096
"""How many ended sessions are remembered."""
LOOK: Final = 8192
"""How many tags ``rows_of`` compares at a time."""


class SessionTags(Listener):
    """The tag of each row of ``tables``."""

    def __init__(self, tables: CoreTables) -> None:
        self._table, self._sets = tables.table, tables.sets
        self._tags: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self._ended: dict[int, int] = {}
        """The sessions that have ended, with the id of the tenant that ended each. The oldest is
        first."""

    @property
    def any(self) -> bool:
        """Whether any row may have a tag."""
        return len(self._tags) > 0

    def __len__(self) -> int:
        """The number of rows that may have a tag."""
        return len(self._tags)

    def entered(self, told: Entered) -> None:
        """A request of the session stores new rows."""
        if told.session or self.any:
            self._fit()
            self._tags[told.rows] = told.session

    def used(self, told: Used) -> None:
        """A request of a session uses rows. Those of other sessions lose their tag. What no request
        uses stays among those that are evicted first."""
        if not self.any:
            return
        if told.session is not None:
            self._tags[told.rows[self.of(told.rows) != told.session]] = NO_SESSION
        if told.session is None or self.has_ended(told.session):
            over = np.unique(told.rows[self.ended(told.rows)])
            told.row_class.order.evict_first(over)

    def left(self, told: Left) -> None:
        self.reclaimed(told.rows)

    def reclaimed(self, rows: I64Array) -> None:
        if self.any:
            self._fit()
            self._tags[rows] = NO_SESSION

    def of(self, rows: I64Array) -> npt.NDArray[np.uint32]:
        """The tag of each of ``rows``."""
        if not self.any:
            return np.zeros(len(rows), np.uint32)
        self._fit()
        return self._tags[rows]

    def rows_of(self, session: int, begin: int, most: int) -> tuple[I64Array, int]:
        """Rows with the tag of ``session`` from the row ``begin`` on: all, or ``most`` and fewer
        than ``LOOK`` more. Returns them and the row with which to go on, at the end ``len(self)``.

        It compares the tag of each row: 0.3 ms for a million.
        """
        found, size = list[I64Array](), len(self)
        while begin < size and most > 0:
            found.append(begin + np.flatnonzero(self._tags[begin : begin + LOOK] == session))
            begin, most = min(begin + LOOK, size), most - len(found[-1])
        return np.concatenate(found) if found else np.empty(0, np.int64), begin

    # ------------------------------------------------------------ ends

    def end(self, session: int, tenant: int, joining: Container[int] = ()) -> None:
        """``session`` ended: the tenant with this id said so. ``joining``: the sessions that may
        not be forgotten yet, because their rows are joining those that are evicted first. If that
        is so of all, this one is forgotten."""
        self._ended.pop(session, None)
        self._ended[session] = tenant
        if len(self._ended) > MOST_ENDED:
            del self._ended[next((each for each in self._ended if each not in joining), session)]

    def resume(self, session: int) -> None:
        """A request of ``session`` begins, so the session has not ended."""
        self._ended.pop(session, None)

    def ended(self, rows: I64Array) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` belong to sessions that have ended."""
        over = np.zeros(len(rows), np.bool_)
        if self._ended and self.any:
            tags, tenants = self.of(rows), self._sets.tenant[self._table.set_of[rows]]
            for tag in self._ended.keys() & np.unique(tags).tolist():
                over |= (tags == tag) & (tenants == self._ended[tag])
        return over

    def has_ended(self, session: int, tenant: int | None = None) -> bool:
        """Whether ``session`` has ended; with ``tenant``: whether this tenant said so."""
        ended = self._ended.get(session)
        return ended is not None and tenant in (None, ended)

    def _fit(self) -> None:
        """Have a tag for each row of the table, which may have grown."""
        if len(self._tags) < len(self._table):
            tags = np.zeros(len(self._table), np.uint32)
            tags[: len(self._tags)] = self._tags
            self._tags = tags
