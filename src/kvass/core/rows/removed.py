"""Which rows left L1, for the engines that publish KV events: the last ``ROOM`` of all namespaces.

Nothing is noted, and no memory taken, unless a session asks. Positions count what was noted in
this boot. Who asks too late, or in another namespace than before, is told that something was lost.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from kvass.core.rows.row_table import KEY_WORDS
from kvass.types import I64Array, U64Array

ROOM: Final = 1 << 16
"""Rows that are remembered: 3 MiB."""
AT_ONCE: Final = 1 << 13
"""So many notes one answer tells at most, and of so many rows it says whether they are there."""
_ALL: Final = -1
"""In place of a group: all rows of the namespace are gone."""


class RemovedPart(NamedTuple):
    """What an asker is told: keys by group, up to position ``upto``."""

    upto: int
    lost: bool
    keys: dict[int, U64Array]


class RemovedRows:
    """A ring of notes, and the sessions that read it."""

    def __init__(self) -> None:
        self.end = 1
        """The position of the next note."""
        self._begin = 1
        """Nothing before this was noted for those who read now."""
        self._readers: dict[int, int] = {}
        """Session -> the namespace that it asked about last."""
        self._clear()

    def _clear(self) -> None:
        self._keys: U64Array = np.zeros((0, KEY_WORDS), np.uint64)
        self._places: I64Array = np.zeros((0, 2), np.int64)
        """Namespace and group."""

    @property
    def noted(self) -> bool:
        """Whether anybody reads."""
        return bool(self._readers)

    def leave(self, session: int) -> None:
        """A session ended. After the last one the memory is free."""
        if self._readers.pop(session, None) is not None and not self._readers:
            self._clear()

    def note(self, namespace: int, group: int, keys: U64Array) -> None:
        """The rows with these keys left L1. Call only if ``noted``."""
        self.end += len(keys)
        keys = keys[-ROOM:]
        at = np.arange(self.end - len(keys), self.end) % ROOM
        self._keys[at], self._places[at] = keys, (namespace, group)

    def note_all(self, namespace: int) -> None:
        """All rows of a layer group left L1, or the namespace was forgotten."""
        if self.noted:
            self.note(namespace, _ALL, np.zeros((1, KEY_WORDS), np.uint64))

    def read(self, session: int, namespace: int, since: int) -> RemovedPart:
        """What left ``namespace`` from position ``since`` on."""
        if not self._readers:
            self._keys = np.zeros((ROOM, KEY_WORDS), np.uint64)
            self._places = np.zeros((ROOM, 2), np.int64)
            self._begin = self.end
        known = self._readers.get(session) == namespace
        self._readers[session] = namespace
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
