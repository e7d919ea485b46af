"""The index of blocks: finds the row whose first blocks a prompt shares, for hits inside a chunk.

An engine's block hash depends on all tokens up to the end of the block. So rows whose chunks begin
with the same tokens have the same hashes up to the first block that differs, and none after it. A
*tail* is a row of which only the first ``BlockPrints.tail`` blocks were written.

A row keeps a *print* of each block, except the last block of a whole chunk. A print is 64 bits that
are computed from the block's hash and secret numbers. Two random hashes have the same print with a
probability of 2**-63. (A client that invents hashes can construct two with the same print. But such
a client could as well store anything under a hash that others use.)

A row is indexed once, under its first block that no other row in the index has. So the prints of a
prompt find the row that shares the most blocks with it. When a row leaves, the blocks that other
rows share with it are not found until another chunk with these blocks is stored.
"""

from __future__ import annotations

import mmap
from typing import Final

import numpy as np
import numpy.ma  # see ``index``
import numpy.typing as npt

from kvass.core.rows.index import ABSENT, KeyIndex, advise, repeated
from kvass.core.rows.row_table import NOTED, UNKNOWN, RowTable
from kvass.types import I64Array, U64Array

MOST_ALIKE: Final = 16
"""The most rows of one ``add`` that are indexed although another row has their first block. A
prompt has one such row, so no engine needs more. Further ones are not indexed."""


class BlockPrints:
    """The prints of all rows whose chunks have ``width + 1`` blocks: uint64, ``of[row, block]``.

    ``tail``: how many first blocks a tail has; 0: the row is a whole chunk. The values of a row
    that is ``UNKNOWN`` are meaningless.
    """

    def __init__(self, table: RowTable, width: int) -> None:
        self.table, self.width = table, width
        self.of: U64Array = np.zeros((0, width), np.uint64)
        self.tail: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def keys_of(self, rows: I64Array) -> U64Array:
        """The prints under which ``rows`` are indexed, as keys of one word."""
        keys: U64Array = self.of[rows, self.table.entry[rows]][:, None]
        return keys

    def note(self, rows: I64Array, prints: U64Array, tail: int) -> None:
        """Record the prints of the blocks of WRITING ``rows``: uint64, shape ``(len(rows),
        chunk_blocks - 1)``. They leave out the last block of a chunk.

        ``tail``: how many first blocks of the last row will be written; 0: all of them. No tier is
        offered a tail, because a record always takes the size of a whole row.
        """
        if len(self.of) < len(self.table):
            self.of, old = self._memory(len(self.table)), self.of
            self.of[: len(old)] = old
            self.tail = np.concatenate(
                [self.tail, np.zeros(len(self.of) - len(self.tail), np.uint8)]
            )
        self.of[rows], self.tail[rows] = prints, 0
        self.tail[rows[-1:]] = tail
        self.table.offered[rows[-1:]] = tail > 0
        self.table.entry[rows] = NOTED

    def tails(self, rows: I64Array) -> npt.NDArray[np.bool_]:
        """Which of ``rows`` are tails. A row whose blocks are not known is not a tail."""
        known = self.table.entry[rows] != UNKNOWN
        found = np.zeros(len(rows), np.bool_)
        found[known] = self.tail[rows[known]] > 0
        return found

    def _memory(self, rows: int) -> U64Array:
        """Zeroed memory in small pages, because the first touch of a huge page takes long
        (``KeyIndex``)."""
        memory = mmap.mmap(-1, rows * self.width * 8, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advise(memory, mmap.MADV_NOHUGEPAGE)
        return np.frombuffer(memory, np.uint64).reshape(rows, self.width)


class BlockIndex:
    """The READY rows of a row class by their blocks."""

    def __init__(self, prints: BlockPrints, index: KeyIndex) -> None:
        self.prints, self.index = prints, index
        self._table = prints.table

    def longest(self, wanted: U64Array) -> tuple[int, int]:
        """The row that shares the most first blocks with a chunk. ``wanted``: the prints of the
        chunk's blocks.

        Returns how many blocks it shares, and the row; 0 and ``ABSENT`` if there is none.
        """
        found = self.index.find(wanted[:, None])
        rows = found[found != ABSENT]
        if not len(rows):
            return 0, ABSENT
        if len(rows) == 1:  # the usual hit, and three times as fast
            row = int(rows[0])
            alike = self.prints.of[row, : len(wanted)] == wanted
            return len(wanted) if alike.all() else int(alike.argmin()), row
        rows = np.unique(rows)
        agree = self._agree(rows, wanted)
        best = int(agree.argmax())
        return int(agree[best]), int(rows[best])

    def _agree(self, rows: I64Array, wanted: U64Array) -> I64Array:
        """How many first blocks each of ``rows`` shares with ``wanted``."""
        alike = self.prints.of[rows, : len(wanted)] == wanted
        ends = np.concatenate([alike, np.zeros((len(rows), 1), np.bool_)], axis=1)
        agreeing: I64Array = ends.argmin(axis=1)
        return agreeing

    def add(self, rows: I64Array) -> I64Array:
        """Index those of ``rows``, which just became READY, whose blocks are known. Returns the
        tails that are redundant now, because another row has all their blocks."""
        rows = rows[self._table.entry[rows] == NOTED]
        if not len(rows):
            return rows
        first = self.prints.of[rows, :1]
        alone = self.index.find(first) == ABSENT
        alone[repeated(first)] = False
        self._put(rows[alone], 0)
        others = rows[~alone]
        alike, left = others[:MOST_ALIKE], others[MOST_ALIKE:]
        needless = [self._add_alike(row) for row in alike.tolist()]
        self._table.entry[left] = UNKNOWN
        found: I64Array = np.concatenate([left[self.prints.tail[left] > 0], *needless])
        return found

    def _put(self, rows: I64Array, entry: int) -> None:
        self._table.entry[rows] = entry
        self.index.add(rows)

    def _add_alike(self, row: int) -> I64Array:
        """Index a row that shares its first block with another row; returns redundant tails."""
        one = np.array([row])
        self._table.entry[row] = UNKNOWN
        mine = self.prints.of[row, : int(self.prints.tail[row]) or self.prints.width]
        found = self.index.find(mine[:, None])
        others = np.unique(found[found != ABSENT])
        tails = self.prints.tail[others]
        needless: I64Array = others[(tails > 0) & (tails <= self._agree(others, mine))]
        self.remove(needless)
        reach, found = self.longest(mine)[0], self.index.find(mine[:, None])
        new = reach + np.flatnonzero(found[reach:] == ABSENT)
        if len(new):
            self._put(one, int(new[0]))
        elif self.prints.tail[row]:
            needless = np.concatenate([needless, one])
        return needless

    def remove(self, rows: I64Array) -> None:
        rows = rows[self._table.entry[rows] < NOTED]
        if len(rows):
            self.index.remove(rows)
            self._table.entry[rows] = UNKNOWN
