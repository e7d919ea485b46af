"""The tables that all files of this folder share.

Law of this file: it creates them, and knows nothing else of them.
"""

from __future__ import annotations

from typing import Final

from kvass.core.clients.tenants import Tenants
from kvass.core.rows.extents import ExtentMap
from kvass.core.rows.row_table import RowTable
from kvass.core.rows.sets import SetTable
from kvass.core.rows.use_times import UseTimes
from kvass.core.saved.index_file import SavedIndex

TYPICAL_ROW: Final = 1 << 20
ROOM: Final = 9 << 17
"""The most rows for which the row table and an index reserve room at the start: 1.125 TiB of
rows of ``TYPICAL_ROW`` bytes. With a smaller arena they reserve less. Growth takes up to 0.3 s in
one step."""


class CoreTables:
    """The rows and extent sets of an arena of ``arena_bytes``, who pays for them, and the times at
    which rows were used. ``index``: as of ``CacheMachine``."""

    def __init__(self, arena_bytes: int, index: SavedIndex | None = None) -> None:
        self.tenants = Tenants(arena_bytes)
        self.table = RowTable(index)
        if index is None:
            self.table.grow(min(arena_bytes // TYPICAL_ROW, ROOM))
        self.extents = ExtentMap(arena_bytes, 1 << 48 if index is None else index.rows)
        self.sets = SetTable()
        self.uses = UseTimes()
