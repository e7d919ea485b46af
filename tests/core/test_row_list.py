"""Lists of rows beside the log: an entry ends with the next use of its row, or with the row."""

from __future__ import annotations

import numpy as np

from kvass.core.rows.row_list import RowList
from kvass.core.rows.row_table import FREE, READY, RowTable
from tests.core.rows import ready_table


def used(rows: int) -> RowTable:
    table = ready_table(rows)
    table.stamp_rows(np.arange(rows))
    return table


def test_the_first_added_is_first_and_pinned_and_protected_rows_stay() -> None:
    table = used(6)
    listed = RowList(table)
    listed.add(np.array([4, 2]))
    listed.add(np.array([5, 1]))
    table.pins[2] = 1
    assert listed.oldest(2, table.clock).tolist() == [4, 5]
    assert listed.oldest(9, 5).tolist() == [4, 1]
    table.pins[2] = 0
    assert listed.oldest(9, table.clock).tolist() == [4, 2, 5, 1], "nothing was lost"


def test_a_row_that_is_used_or_freed_leaves() -> None:
    table = used(4)
    listed = RowList(table)
    listed.add(np.arange(4))
    table.stamp_rows(np.array([1]))
    table.move(np.array([2]), READY, FREE)
    assert listed.oldest(9, table.clock).tolist() == [0, 3]
    table.stamp_rows(np.array([0, 3]))
    assert listed.oldest(9, table.clock).tolist() == []
    assert not listed._parts


def test_rows_behind_many_stale_ones_are_found_and_memory_is_bounded() -> None:
    table = used(2000)
    listed = RowList(table)
    for _ in range(30):
        listed.add(np.arange(2000))
        table.stamp_rows(np.arange(1, 2000))
    assert sum(len(rows) for rows, _ in listed._parts) <= 2 * 4096
    listed.add(np.array([7, 0]))
    assert listed.oldest(9_999, table.clock).tolist() == [0, 7], "each row once"
