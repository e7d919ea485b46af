"""The last ``ROOM`` rows that left L1, for engines that publish KV events.

Law of this file: memory is bounded. A reader that asks too late learns that it lost entries.

Rows are recorded, and memory is allocated, only while a connection reads. Positions count all
entries of this boot. A connection that reads another namespace than before learns that, too.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from kvass.core.rows.listeners import ClassesGone, Left, Listener
from kvass.core.rows.row_table import READY
from kvass.types import KEY_WORDS, I64Array, U64Array

ROOM: Final = 1 << 16
"""The number of entries: 3 MiB."""
AT_ONCE: Final = 1 << 13
"""The most entries of one answer, and the most keys for which one question asks whether they are
READY."""
_ALL: Final = -1
"""In place of a group: all rows of the namespace left L1."""


class RemovedPart(NamedTuple):
    """An answer: the keys that left L1 by layer group, up to position ``upto``.

    ``lost``: entries are missing, so the reader must forget all that it knew.
    """

    upto: int
    lost: bool
    keys: dict[int, U64Array]


class RemovedRows(Listener):
    """A ring buffer of entries, and the connections that read it."""

    def __init__(self) -> None:
        self.end = 1
        """The position of the next entry."""
        self._begin = 1
        """The first position that was recorded after the first reader came."""
        self._readers: dict[int, int] = {}
        """Connection -> the namespace that it read last."""
        self._clear()

    def _clear(self) -> None:
        self._keys: U64Array = np.zeros((0, KEY_WORDS), np.uint64)
        self._places: I64Array = np.zeros((0, 2), np.int64)
        """Namespace and group of each entry."""

    @property
    def noted(self) -> bool:
        """Whether entries are recorded, because at least one connection reads them."""
        return bool(self._readers)

    def leave(self, connection: int) -> None:
        """A connection ended. After the last reader the memory is freed."""
        if self._readers.pop(connection, None) is not None and not self._readers:
            self._clear()

    def note(self, namespace: int, group: int, keys: U64Array) -> None:
        """Record that the rows with these keys left L1. Call it only if ``noted``."""
        self.end += len(keys)
        keys = keys[-ROOM:]
        at = np.arange(self.end - len(keys), self.end) % ROOM
        self._keys[at], self._places[at] = keys, (namespace, group)

    def left(self, told: Left) -> None:
        if self.noted and told.state >= READY:
            self.note(told.row_class.namespace, told.row_class.spec.group, told.keys)

    def gone(self, told: ClassesGone) -> None:
        for namespace in sorted({c.namespace for c in told.classes}) if self.noted else ():
            self.note(namespace, _ALL, np.zeros((1, KEY_WORDS), np.uint64))

    def read(self, connection: int, namespace: int, since: int) -> RemovedPart:
        """The rows of ``namespace`` that left L1 from position ``since`` on."""
        if not self._readers:
            self._keys = np.zeros((ROOM, KEY_WORDS), np.uint64)
            self._places = np.zeros((ROOM, 2), np.int64)
            self._begin = self.end
        known = self._readers.get(connection) == namespace
        self._readers[connection] = namespace
        if not known or not max(self._begin, self.end - ROOM) <= since <= self.end:
            return RemovedPart(self.end, True, {})
        upto = min(self.end, since + AT_ONCE)
        at = np.arange(since, upto) % ROOM
        at = at[self._places[at, 0] == namespace]
        groups = self._places[at, 1]
        if (groups == _ALL).any():
            return RemovedPart(self.end, True, {})
        return RemovedPart(
            upto, False, {g: self._keys[at[groups == g]] for g in set(groups.tolist())}
        )
