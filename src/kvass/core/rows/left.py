"""Which rows left L1 or were not stored, when and for which cause. ``explain.py`` asks for it.

Law of this file: memory is bounded, and finding a key takes constant time.

The table has ``ROOM`` places. A key of a group of a namespace belongs to one place, which follows
from a hash with a secret seed. A new entry replaces the entry in its place. So an entry is lost
when a later one gets its place: half of the entries are lost after 90,000 later ones.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvass.core.rows.causes import CAUSES
from kvass.core.rows.index import odd_numbers
from kvass.core.rows.listeners import ClassesGone, Left, Listener
from kvass.core.rows.row_table import READY
from kvass.core.rows.tables import CoreTables
from kvass.types import I64Array, U64Array

ROOM: Final = 1 << 17
"""The number of places: 2.1 MiB, which are allocated when the first row leaves."""
_NAMES: Final = tuple(CAUSES)
_NUMBERS: Final = {name: number for number, name in enumerate(_NAMES)}
_HALF, _ONE, _PLACE = np.uint64(32), np.uint64(1), np.uint64(64 - (ROOM - 1).bit_length())
_WORD: Final = (1 << 64) - 1


class Departure(NamedTuple):
    """What is known of a key that left: the ``cause``, and ``when`` it left. ``which``: the number
    of the key."""

    cause: str
    when: float
    which: int


class LeftRows(Listener):
    """The table. ``seed``: as ``RowClasses``."""

    def __init__(self, seed: bytes, tables: CoreTables) -> None:
        self._table, self._sets, self._uses = tables.table, tables.sets, tables.uses
        self._origins: I64Array = np.empty(0, np.int64)
        """Of each extent set whose class was removed: its namespace, group and cause, in one
        number. The rows of such sets are recorded when their slots become free."""
        self._odd = odd_numbers(seed + b"left")
        self._marks: U64Array = np.empty(0, np.uint64)
        self._times: npt.NDArray[np.float64] = np.empty(0)
        self._causes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def note(self, namespace: int, group: int, keys: U64Array, cause: str, now: float) -> None:
        """Rows with these keys left L1 at ``now``, or were not stored."""
        if not len(keys):
            return
        if not len(self._marks):
            self._marks, self._times = np.zeros(ROOM, np.uint64), np.zeros(ROOM)
            self._causes = np.zeros(ROOM, np.uint8)
        marks, places = self._hashed(namespace, group, keys)
        self._marks[places], self._times[places] = marks, now
        self._causes[places] = _NUMBERS[cause]

    def left(self, told: Left) -> None:
        cause, where = "quota" if told.own else told.cause, told.row_class
        if cause in CAUSES:
            self.note(where.namespace, where.spec.group, told.keys, cause, told.now)

    def gone(self, told: ClassesGone) -> None:
        if len(told.sets):
            grown = np.zeros(len(self._sets.owner), np.int64)
            grown[: len(self._origins)] = self._origins
            every = sorted(told.classes, key=lambda row_class: row_class.id)
            ids, cause = np.array([c.id for c in every]), _NUMBERS[told.cause]
            origins = np.array([c.namespace << 16 | c.spec.group << 8 | cause for c in every])
            grown[told.sets] = origins[ids.searchsorted(self._sets.owner[told.sets])]
            self._origins = grown

    def reclaimed(self, rows: I64Array) -> None:
        rows = rows[self._table.state[rows] >= READY]
        origins = self._origins[self._table.set_of[rows]]
        for origin in np.unique(origins).tolist():
            keys, cause = self._table.keys_of(rows[origins == origin]), _NAMES[origin & 0xFF]
            self.note(origin >> 16, origin >> 8 & 0xFF, keys, cause, self._uses.now)

    def find(self, namespace: int, group: int, keys: U64Array) -> Departure | None:
        """The first of ``keys`` that is known to have left. ``None``: none is."""
        if not len(self._marks) or not len(keys):
            return None
        marks, places = self._hashed(namespace, group, keys)
        known = self._marks[places] == marks
        which = int(known.argmax())
        if not known[which]:
            return None
        place = int(places[which])
        return Departure(_NAMES[self._causes[place]], float(self._times[place]), which)

    def _hashed(self, namespace: int, group: int, keys: U64Array) -> tuple[U64Array, I64Array]:
        """The mark of each key, which is never 0, and its place."""
        odd = self._odd
        where = np.uint64((namespace * int(odd[1]) + group * int(odd[2])) & _WORD)
        mixed = keys.dot(odd) + where
        mixed = (mixed ^ (mixed >> _HALF)) * odd[0]
        return mixed | _ONE, (mixed >> _PLACE).astype(np.int64)
