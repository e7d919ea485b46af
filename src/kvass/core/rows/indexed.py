"""Keeps the indexes of each class.

Laws of this file:

- An entry of the index of keys names a row that is WRITING, LOADING, READY or TRANSIENT.
- An entry of the index of blocks names a READY row.
"""

from __future__ import annotations

from kvass.core.rows.listeners import Entered, Left, Listener, Readable
from kvass.types import I64Array


class IndexedKeys(Listener):
    """Has lookups find rows by key from when they enter until they leave."""

    def entered(self, told: Entered) -> None:
        told.row_class.index.add(told.rows)

    def left(self, told: Left) -> None:
        told.row_class.index.remove(told.rows)


class IndexedBlocks(Listener):
    """Keeps the indexes of blocks of all classes that have one."""

    def __init__(self, counters: dict[str, int]) -> None:
        self._counters = counters

    def readable(self, told: Readable) -> I64Array | None:
        """Index the rows whose blocks are known. Returns the tails that are redundant now."""
        if told.row_class.blocks is None:
            return None
        replaced = told.row_class.blocks.add(told.rows)
        self._counters["tails_replaced"] += len(replaced)
        return replaced

    def left(self, told: Left) -> None:
        if told.row_class.blocks is not None:
            told.row_class.blocks.remove(told.rows)
