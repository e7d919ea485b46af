"""The states of rows: who may read, write or free a row.

Law of this file: every change of a row's state goes through ``RowStates.move``, which also updates
the counts of its extent set and its row class. What becomes of rows is told to ``listeners``. No
feature is named here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.rows.causes import Cause
from kvass.core.rows.index import ABSENT
from kvass.core.rows.listeners import Entered, Left, Readable, Used
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_classes import RowClasses
from kvass.core.rows.row_table import (
    FAILED,
    FREE,
    LOADING,
    NEVER,
    QUARANTINED,
    READY,
    STATE_NAMES,
    TRANSIENT,
    WRITING,
)
from kvass.types import I64Array, Slots, U64Array

_IN_TRANSIT: Final = (WRITING, LOADING, QUARANTINED)
_LEAVING: Final = (FAILED, TRANSIENT)
"""States whose rows are freed at their last unpin."""
_LISTED: Final = ~np.isin(range(len(STATE_NAMES)), (FREE, QUARANTINED, FAILED))
"""By state, whether a row has entered and has not left (``listeners.py``)."""


class RowStates:
    def __init__(self, classes: RowClasses) -> None:
        self.classes, self.table, self.uses = classes, classes.table, classes.uses
        self.pinned = 0
        """The number of pins on all rows. A pin that names a row twice counts twice."""
        self._sets, self._told = classes.sets, classes.listeners
        self._leaving = 0
        """How many rows are in the states ``_LEAVING``. While there are none, ``unpin`` is
        faster."""

    # ------------------------------------------------------------ finding

    def there(self, found: I64Array, least: int = READY) -> npt.NDArray[np.bool_]:
        """Which of ``found`` (row ids, or ``ABSENT``) are in state ``least`` or above."""
        there: npt.NDArray[np.bool_] = found != ABSENT
        if there.all():
            there = self.table.state[found] >= least
        else:
            there[there] = self.table.state[found[there]] >= least
        return there

    def touch(self, row_class: RowClass, rows: I64Array, session: int | None = None) -> None:
        """Record a use of ``rows``, which are in chunk order.

        ``session``: the tag of the client's session (``session_tags.py``) that uses them; 0: it is
        not known. None: no request uses them.

        Of a ``full`` group the deepest chunk becomes the oldest of them, because it is useless
        without the chunks before it. Of other groups the deepest becomes the newest, because a hit
        needs only the rows at its end.
        """
        if not len(rows):
            return
        oldest_first = row_class.spec.layout.rules.oldest_first(rows)
        stamps = self.table.stamp_rows(oldest_first)
        self._sets.newest[self.table.set_of[rows]] = self.table.clock - 1
        parts = [(row_class, oldest_first, stamps)]
        if not row_class.undivided:
            parts = self._of_tenants(oldest_first, stamps)
        for owner, used, theirs in parts:
            told = Used(owner, used, theirs, session, self.uses.now)
            for hook in self._told.used:
                hook(told)

    def _of_tenants(
        self, rows: I64Array, stamps: I64Array
    ) -> list[tuple[RowClass, I64Array, I64Array]]:
        """``rows`` of several tenants, and their stamps, by the class of each tenant."""
        owners = self._sets.owner[self.table.set_of[rows]]
        order = np.argsort(owners, kind="stable")
        owners, rows, stamps = owners[order], rows[order], stamps[order]
        cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(rows)]
        by_id = self.classes.by_id
        return [
            (by_id[int(owners[begin])], rows[begin:end], stamps[begin:end])
            for begin, end in pairwise(cuts)
        ]

    def slots(self, rows: I64Array) -> Slots:
        """Where the bytes of ``rows`` are in the arena."""
        if not len(rows):
            return Slots()
        sets = self.table.set_of[rows]
        used = sets.copy()
        used.sort()
        new = np.empty(len(used), np.bool_)
        new[0], new[1:] = True, used[1:] != used[:-1]
        used = used[new]
        return Slots(
            extents=tuple([self.classes.extents.sets[i].bases for i in used.tolist()]),
            set_=used.searchsorted(sets).astype("<u2").tobytes(),
            slot=self.table.slot[rows].tobytes(),
        )

    def pin(self, rows: I64Array) -> None:
        """Add a pin to each of ``rows``. A row that is named twice gets one pin."""
        self.table.pins[rows] += 1
        np.add.at(self._sets.held, self._sets_of(rows), 1)
        self.pinned += len(rows)

    def adopt_pins(self, rows: I64Array) -> None:
        """Count the one pin that each of ``rows`` has from a former life."""
        np.add.at(self._sets.held, self._sets_of(rows), 1)
        self.pinned += len(rows)
        self._leaving += int((self.table.state[rows] == FAILED).sum())

    def bytes_of(self, rows: I64Array) -> int:
        """The size of ``rows``, which may be of cleared sets."""
        sets = self.table.set_of[rows]
        return int((self._sets.bytes[sets] // self._sets.slots[sets]).sum())

    def unpin(self, rows: I64Array, ahead: bool = False) -> None:
        """Undo one ``pin`` of the same ``rows``. Rows in the states ``_LEAVING`` are freed when
        their last pin is gone.

        ``ahead``: a prefetch pinned the rows for a later reader, so TRANSIENT rows stay.
        """
        table = self.table
        table.pins[rows] -= 1
        np.subtract.at(self._sets.held, self._sets_of(rows), 1)
        self.pinned -= len(rows)
        if not self._leaving:
            return
        states = table.state[rows]
        leaving = states == FAILED if ahead else np.isin(states, _LEAVING)
        leaving &= table.pins[rows] == 0
        self.free(np.unique(rows[leaving]), "not_retained")

    # ------------------------------------------------------------ states

    def enter(
        self, row_class: RowClass, rows: I64Array, keys: U64Array, state: int, session: int
    ) -> None:
        """Have FREE ``rows`` of ``row_class`` enter L1 in ``state``, WRITING or LOADING. No row of
        its namespace and group has one of the ``keys``. ``session``: as of ``touch``."""
        if len(rows):
            self.move(rows, FREE, state)
            self.table.key[rows] = keys
            told = Entered(row_class, rows, session)
            for hook in self._told.entered:
                hook(told)

    def publish(self, rows: I64Array) -> I64Array:
        """Make WRITING ``rows`` readable, because every shard of them is written.

        Returns those that may be flushed to tiers: all but tails.
        """
        tails = self.table.offered[rows]
        self.move(rows, WRITING, READY, tails)
        self._tell_readable(rows)
        return rows[~tails]

    def publish_loaded(self, rows: I64Array, stay: bool) -> None:
        """Make LOADING ``rows`` readable, because a tier has filled them. ``stay``: they stay in
        L1 after their last unpin."""
        self.move(rows, LOADING, READY if stay else TRANSIENT)
        self.table.offered[rows] = True
        self._tell_readable(rows)

    def _tell_readable(self, rows: I64Array) -> None:
        """Tell that ``rows`` may be read, and let those go that they replace."""
        if (owner := self.class_of(rows)) is None:
            return
        told = Readable(owner, rows)
        for replaced in [hook(told) for hook in self._told.readable]:
            if replaced is not None and len(replaced):
                pinned = self.table.pins[replaced] > 0
                for _, theirs in self._parts(replaced[pinned]):
                    self.move(theirs, READY, TRANSIENT)
                self.free(replaced[~pinned], "replaced")

    def fail(self, rows: I64Array) -> None:
        """Fail LOADING ``rows``, which their tier could not fill. No lookup finds them from now on.
        They are freed when no lookup waits for them."""
        self._leave(rows, LOADING, FAILED, "load_failed")
        self.free(rows[self.table.pins[rows] == 0])

    def forget(self, rows: I64Array, cause: Cause) -> None:
        """Forget readable ``rows`` of one class. No lookup finds them from now on. Those that are
        pinned are freed at their last unpin."""
        pinned = self.table.pins[rows] > 0
        self.free(rows[~pinned], cause)
        rows = rows[pinned]
        for state in (READY, TRANSIENT):
            self._leave(rows[self.table.state[rows] == state], state, FAILED, cause)

    def discard(self, rows: I64Array, cause: Cause = "unfinished") -> None:
        """Quarantine WRITING ``rows``: they will not become readable, but ranks may still write."""
        self._leave(rows, WRITING, QUARANTINED, cause)

    def free(
        self,
        rows: I64Array,
        cause: Cause | None = None,
        own: bool = False,
        orphaned: bool = False,
    ) -> None:
        """Free ``rows``, which nobody reads or writes. All are of one namespace and group.

        ``cause``, ``own``, ``orphaned``: why those leave that have not left yet, as of ``Left``.
        """
        for owner, mine in self._parts(rows):
            states = self.table.state[mine]
            if owner is None:
                for hook in self._told.reclaimed:
                    hook(mine)
            for before in np.bincount(states).nonzero()[0].tolist():
                some = mine[states == before]
                if owner is not None and _LISTED[before]:
                    assert cause is not None, "rows leave without a cause"
                    self._tell_left(owner, some, before, cause, own, orphaned)
                self.move(some, before, FREE)
            if owner is not None:
                owner.free.give_back(mine)

    def _leave(self, rows: I64Array, before: int, after: int, cause: Cause) -> None:
        """Have ``rows`` of one class, all in state ``before``, leave L1 before they are freed."""
        if (owner := self.class_of(rows)) is not None:
            self._tell_left(owner, rows, before, cause)
        self.move(rows, before, after)

    def _tell_left(
        self,
        owner: RowClass,
        rows: I64Array,
        state: int,
        cause: Cause,
        own: bool = False,
        orphaned: bool = False,
    ) -> None:
        keys, now = self.table.keys_of(rows), self.uses.now
        told = Left(owner, rows, keys, state, cause, now, own, orphaned)
        for hook in self._told.left:
            hook(told)

    def move(
        self,
        rows: I64Array,
        before: int,
        after: int,
        tails: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Change the state of ``rows`` and update all counts. The rows are of one class, and all
        are in state ``before``. ``tails``: as for ``RowTable.move``."""
        if not len(rows):
            return
        self.table.move(rows, before, after, tails)
        sets = self._sets_of(rows)
        if held := (after in _IN_TRANSIT) - (before in _IN_TRANSIT):
            np.add.at(self._sets.held, sets, held)
        if used := (before == FREE) - (after == FREE):
            np.add.at(self._sets.used, sets, used)
        if after == FREE:
            self._sets.newest[sets[self._sets.used[sets] == 0]] = NEVER
        self._leaving += len(rows) * ((after in _LEAVING) - (before in _LEAVING))
        owner = self.class_of(rows)
        if owner is not None:
            owner.rows[before] -= len(rows)
            owner.rows[after] += len(rows)

    # ------------------------------------------------------------ classes

    def class_of(self, rows: I64Array) -> RowClass | None:
        """The class of ``rows``, which are all of one class; ``None`` if there are no rows, or if
        their class was removed."""
        if not len(rows):
            return None
        return self.classes.by_id.get(int(self._sets.owner[self.table.set_of[rows[0]]]))

    def by_class(self, rows: I64Array) -> Iterator[tuple[RowClass | None, I64Array]]:
        """``rows`` by their class; ``None``: it was removed."""
        owners = self._sets.owner[self.table.set_of[rows]]
        for owner in np.unique(owners).tolist():
            yield self.classes.by_id.get(owner), rows[owners == owner]

    def _parts(self, rows: I64Array) -> Iterable[tuple[RowClass | None, I64Array]]:
        """As ``by_class``, and faster, of rows of one namespace and group."""
        if not len(rows):
            return ()
        if self.classes.tenants.divided:
            return self.by_class(rows)
        return ((self.class_of(rows), rows),)

    def _sets_of(self, rows: I64Array) -> I64Array:
        """The extent sets of ``rows`` as int64, with which ``np.add.at`` is twice as fast."""
        return self.table.set_of[rows].astype(np.int64)
