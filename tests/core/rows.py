"""Rows, their classes and the allocator without a machine, for unit tests."""

from __future__ import annotations

import numpy as np

from kvass.core.rows.row_table import FREE, READY, WRITING, RowTable


def ready_table(rows: int) -> RowTable:
    table = RowTable()
    table.grow(rows)
    every = np.arange(rows)
    table.move(every, FREE, WRITING)
    table.move(every, WRITING, READY)
    return table
