"""Lists of rows beside the log: an entry ends with the next use of its row, or with the row."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.rows.row_list import LOOK, RowList
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
    assert not listed.segments


def test_rows_behind_many_stale_ones_are_found_and_memory_is_bounded() -> None:
    table = used(2000)
    listed = RowList(table)
    listed.add(np.array([0]))
    for _ in range(60):
        listed.add(np.arange(1, 2000))
        table.stamp_rows(np.arange(1, 2000))
    assert listed.segments <= 12, "of 240"
    listed.add(np.array([7]))
    assert listed.oldest(9_999, table.clock).tolist() == [0, 7]


def test_no_call_compacts_more_than_two_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the list is: the one that would have compacted all of it."""
    table, tidied = used(100_000), list[int]()
    listed = RowList(table)
    tidy = listed._tidy

    def counted() -> None:
        tidied.append(1)
        tidy()

    monkeypatch.setattr(listed, "_tidy", counted)
    for begin in range(0, 100_000, LOOK):
        listed.add(np.arange(begin, min(begin + LOOK, 100_000)))
        assert len(tidied) <= 2
        tidied.clear()


def test_what_is_taken_out_is_looked_for_in_few_segments_at_a_time() -> None:
    table = used(20 * LOOK)
    listed = RowList(table)
    listed.add(np.arange(20 * LOOK))
    gone = [
        listed.take_out(lambda rows: rows % 2 == 0, most=8),
        listed.take_out(lambda rows: rows % 2 == 0, most=12),
    ]
    assert [len(rows) for rows in gone] == [8 * LOOK // 2, 12 * LOOK // 2]
    assert sorted(np.concatenate(gone).tolist()) == [*range(1, 20 * LOOK, 2)]
    assert listed.rows().tolist() == [*range(0, 20 * LOOK, 2)], "in their order again"
