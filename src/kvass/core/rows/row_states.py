"""The states of rows: who may read, write or free a row.

Law of this file: every change of a row's state goes through ``RowStates.move``, which also updates
the counts of its extent set and its row class.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_classes import RowClass, RowClasses
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
from kvass.core.rows.use_times import UseTimes
from kvass.types import I64Array, Slots, U64Array

_IN_TRANSIT: Final = (WRITING, LOADING, QUARANTINED)
_LEAVING: Final = (FAILED, TRANSIENT)
"""States whose rows are freed at their last unpin."""
_INDEXED: Final = ~np.isin(range(len(STATE_NAMES)), (FREE, QUARANTINED, FAILED))
"""By state, whether a row of a class is in the index of the class."""


class RowStates:
    """The states, pins and uses of the rows of all ``classes``."""

    def __init__(self, classes: RowClasses, counters: dict[str, int]) -> None:
        self.classes, self.table = classes, classes.table
        self.uses = UseTimes()
        self.pinned = 0
        """The number of pins on all rows. A pin that names a row twice counts twice."""
        self._sets, self._counters = classes.sets, counters
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
        if len(rows):
            oldest_first = row_class.spec.layout.rules.oldest_first(rows)
            stamps = self.table.stamp_rows(oldest_first)
            if row_class.undivided:
                row_class.log.touched(oldest_first, stamps)
            else:
                self._touch_each(oldest_first, stamps)
            self._sets.newest[self.table.set_of[rows]] = self.table.clock - 1
            if session is None:
                return
            self.classes.kept.used(rows, self.uses.now)
            if self.classes.tags.any:
                self.classes.tags.used(rows, session)
                if self.classes.tags.has_ended(session):
                    self.evict_first(rows[self.of_ended(rows)])

    def _touch_each(self, rows: I64Array, stamps: I64Array) -> None:
        """Record the use of ``rows`` of several tenants in the log of each tenant's class."""
        owners = self._sets.owner[self.table.set_of[rows]]
        order = np.argsort(owners, kind="stable")
        owners, rows, stamps = owners[order], rows[order], stamps[order]
        cuts = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), len(rows)]
        for begin, end in pairwise(cuts):
            log = self.classes.by_id[int(owners[begin])].log
            log.touched(rows[begin:end], stamps[begin:end])

    # ------------------------------------------------------------ ended sessions

    def of_ended(self, rows: I64Array) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` belong to sessions that have ended."""
        return self.classes.tags.ended(rows, self.payers(rows))

    def payers(self, rows: I64Array) -> I64Array:
        """The id of the tenant that pays for each of ``rows``."""
        payers: I64Array = self._sets.tenant[self.table.set_of[rows]]
        return payers

    def evict_first(self, rows: I64Array) -> None:
        """Have ``rows``, each named once, evicted before all others of their classes, the least
        recently used first."""
        rows = self.classes.tags.list_new(rows)
        self.classes.kept.drop(rows)
        owners = self._sets.owner[self.table.set_of[rows]]
        for owner in np.unique(owners).tolist():
            if (row_class := self.classes.by_id.get(owner)) is not None:
                theirs = rows[owners == owner]
                row_class.log.ended.add(theirs[np.argsort(self.table.stamp[theirs])])

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
        leavers = np.unique(rows[leaving])
        if (owner := self.class_of(leavers)) is not None:
            transient = leavers[table.state[leavers] == TRANSIENT]
            self._note_left(owner, transient, "not_retained")
            left = len(transient) * owner.spec.row_bytes
            self._counters["bytes_evicted_not_retained"] += left
        self.free(leavers)

    # ------------------------------------------------------------ states

    def note_blocks(self, row_class: RowClass, rows: I64Array, prints: U64Array, tail: int) -> None:
        """Record the prints of the blocks of WRITING ``rows``: uint64, shape ``(len(rows),
        chunk_blocks - 1)``. They leave out the last block of a chunk.

        ``tail``: how many first blocks of the last row will be written; 0: all of them.
        """
        assert row_class.blocks is not None, "blocks of a class whose hits end with a chunk"
        row_class.blocks.prints.note(rows, prints, tail)
        if tail:
            self.table.offered[rows[-1]] = True

    def publish(self, rows: I64Array) -> I64Array:
        """Make WRITING ``rows`` readable, because every shard of them is written.

        Returns those that may be flushed to tiers: all but tails, because a record always takes the
        size of a whole row.
        """
        owner = self.class_of(rows)
        if owner is None or owner.blocks is None:
            self.move(rows, WRITING, READY)
            return rows
        tails = owner.blocks.prints.tails(rows)
        self.move(rows, WRITING, READY, tails)
        whole = rows[~tails]
        for row in owner.blocks.add(rows).tolist():
            self._counters["tails_replaced"] += 1
            if self.table.pins[row] > 0:
                self.move(np.array([row]), READY, TRANSIENT)
            else:
                self._counters["bytes_evicted_replaced"] += owner.spec.row_bytes
                self.free(np.array([row]))
        return whole

    def publish_loaded(self, rows: I64Array, retain: bool) -> None:
        """Make LOADING ``rows`` readable, because a tier has filled them. ``retain``: they stay in
        L1 after their last unpin."""
        self.move(rows, LOADING, READY if retain else TRANSIENT)
        self.table.offered[rows] = True

    def fail(self, rows: I64Array) -> None:
        """Fail LOADING ``rows``, which their tier could not fill. No lookup finds them from now on.
        They are freed when no lookup waits for them."""
        self._note_left(self.class_of(rows), rows, "load_failed")
        self._unindex(rows)
        self.move(rows, LOADING, FAILED)
        self.free(rows[self.table.pins[rows] == 0])

    def forget(self, rows: I64Array) -> None:
        """Forget readable ``rows`` of one class. No lookup finds them from now on. Those that are
        pinned are freed at their last unpin."""
        pinned = self.table.pins[rows] > 0
        self.classes.kept.drop(rows)
        self.free(rows[~pinned])
        kept = rows[pinned]
        self._note_removed(kept)
        self._unindex(kept)
        for state in (READY, TRANSIENT):
            self.move(kept[self.table.state[kept] == state], state, FAILED)

    def discard(self, rows: I64Array, cause: str = "unfinished") -> None:
        """Quarantine WRITING ``rows``: they will not become readable, but ranks may still write.
        ``cause``: of ``left.CAUSES``."""
        self._note_left(self.class_of(rows), rows, cause)
        self._unindex(rows)
        self.move(rows, WRITING, QUARANTINED)

    def free(self, rows: I64Array) -> None:
        """Free ``rows``, which nobody reads or writes. All are of one namespace and group."""
        if not len(rows):
            return
        if self.classes.tenants.divided:
            owners = self._sets.owner[self.table.set_of[rows]]
            if (owners != owners[0]).any():
                for owner in np.unique(owners):
                    self.free(rows[owners == owner])
                return
        owner, states = self.class_of(rows), self.table.state[rows]
        if self.classes.removed.noted:
            self._note_removed(rows[states >= READY])
        self._unindex(rows)
        for before in np.bincount(states).nonzero()[0].tolist():
            self.move(rows[states == before], before, FREE)
        if owner is not None:
            owner.free.give_back(rows)

    def _note_left(self, owner: RowClass | None, rows: I64Array, cause: str) -> None:
        """Record that ``rows`` of the class ``owner`` leave L1, or were not stored."""
        if owner is not None:
            where = owner.namespace, owner.spec.group
            self.classes.left.note(*where, self.table.keys_of(rows), cause, self.uses.now)

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
            self.classes.tags.freed(rows)
            self.classes.kept.drop(rows)
        self._leaving += len(rows) * ((after in _LEAVING) - (before in _LEAVING))
        owner = self.class_of(rows)
        if owner is not None:
            owner.rows[before] -= len(rows)
            owner.rows[after] += len(rows)
            if after >= READY > before:
                self._counters["l1_in_bytes"] += len(rows) * owner.spec.row_bytes

    def class_of(self, rows: I64Array) -> RowClass | None:
        """The class of ``rows``, which are all of one class; ``None`` if there are no rows, or if
        their class was removed."""
        if not len(rows):
            return None
        return self.classes.by_id.get(int(self._sets.owner[self.table.set_of[rows[0]]]))

    def _note_removed(self, rows: I64Array) -> None:
        """Record that readable ``rows`` leave L1, if a session wants to know that."""
        owner = self.class_of(rows)
        if owner is not None and self.classes.removed.noted:
            keys = self.table.keys_of(rows)
            self.classes.removed.note(owner.namespace, owner.spec.group, keys)

    def _sets_of(self, rows: I64Array) -> I64Array:
        """The extent sets of ``rows`` as int64, with which ``np.add.at`` is twice as fast."""
        return self.table.set_of[rows].astype(np.int64)

    def _unindex(self, rows: I64Array) -> None:
        """Remove ``rows`` from the indexes in which they are."""
        owner = self.class_of(rows)
        if owner is not None:
            known = rows[_INDEXED[self.table.state[rows]]]
            self.classes.segments.left(owner.namespace, self.table.keys_of(known))
            owner.index.remove(known)
            if owner.blocks is not None:
                owner.blocks.remove(rows)
