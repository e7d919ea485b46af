"""Writes to the directory of the saved index what changes rarely: namespaces, classes and sets.

Law of this file: a set is noted before a slot of it is given to anybody. If it cannot be noted, it
is not added. A namespace or class for which there is no room is left out: its rows are not adopted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvass.core.rows.extents import ExtentSet
from kvass.core.rows.listeners import ClassesGone, Listener
from kvass.core.saved.directory import Entry, Kind, SavedSet
from kvass.core.saved.index_file import SavedIndex


class Saving(Listener):
    """The writer of an index's directory. Until ``begin``, and without an index, it does
    nothing."""

    def __init__(self) -> None:
        self._index: SavedIndex | None = None

    def begin(self, index: SavedIndex) -> None:
        """From now on write to the directory of ``index``, which has all that there is."""
        self._index = index

    def put(self, entry: Entry) -> bool:
        """Note ``entry``, in place of an older one of its kind and id. False: there is no room."""
        return self._index is None or self._index.directory.put(entry)

    def remove(self, kind: Kind, ids: Iterable[int]) -> None:
        """Note that entries are gone."""
        if self._index is not None:
            self._index.directory.remove(kind, np.array([*ids], np.int64))

    def gone(self, told: ClassesGone) -> None:
        self.remove("class", (row_class.id for row_class in told.classes))


def saved_set(made: ExtentSet, owner: int) -> SavedSet:
    """The entry of a set of the row class ``owner``."""
    return SavedSet(made.id, owner, made.slots, made.first_row, made.bases, made.extent_bytes)
