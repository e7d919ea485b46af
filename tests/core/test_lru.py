"""The log of uses: least recently used rows first, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.rows.lru import LeastRecentlyUsed, Listed, UseLog
from kvass.core.rows.retention import Retention
from kvass.core.rows.row_table import READY, RowTable
from tests.core.rows import Rows, ready_table, spec, tables_of


def log_of(table: RowTable, *touches: int) -> UseLog:
    tables = tables_of(table)
    log = LeastRecentlyUsed(tables, Retention(tables, 0.0)).order()
    for row in touches:
        rows = np.array([row])
        log.touched(rows, table.stamp_rows(rows))
    return log


def test_victims_are_the_oldest_evictable_rows() -> None:
    table = ready_table(4)
    log = log_of(table, 0, 1, 2, 3, 0)
    table.pins[2] = 1
    assert log.oldest(2, table.clock).tolist() == [1, 3]
    assert log.oldest(9, table.clock).tolist() == [1, 3, 0]


def test_nothing_at_or_after_protect_is_a_victim() -> None:
    table = ready_table(3)
    log = log_of(table, 0, 1)
    protect = table.clock
    rows = np.array([2])
    log.touched(rows, table.stamp_rows(rows))
    assert log.oldest(3, protect).tolist() == [0, 1]


def test_a_log_of_stale_touches_stays_small_and_right() -> None:
    table = ready_table(8)
    log = log_of(table, *range(8))
    for _ in range(3000):
        rows = np.array([5, 3, 1])
        log.touched(rows, table.stamp_rows(rows))
        assert log.oldest(1, table.clock).tolist() == [0]
    assert log.oldest(9, table.clock).tolist() == [0, 2, 4, 6, 7, 5, 3, 1]
    assert len(log._segments) <= 3


@pytest.mark.parametrize("rows", [0, 5, 4096, 10_000])
def test_a_filled_log_is_as_if_its_rows_had_been_touched(rows: int) -> None:
    table = ready_table(rows + 1)
    order = np.random.default_rng(1).permutation(rows).astype(np.int64)
    log = log_of(table)
    log.fill(order, table.stamp_rows(order))
    last = np.array([rows])
    log.touched(last, table.stamp_rows(last))
    assert log.oldest(rows + 2, table.clock).tolist() == [*order.tolist(), rows]


def test_a_log_of_many_rows_stays_short_and_in_order() -> None:
    table = ready_table(40_000)
    log = log_of(table)
    rng = np.random.default_rng(1)
    for _ in range(300):
        rows = rng.permutation(40_000)[:2000].astype(np.int64)
        log.touched(rows, table.stamp_rows(rows))
    entries = sum(len(rows) for rows, _ in log._segments)
    assert entries < 2.5 * 40_000, "of 600,000 touches"
    oldest_first = np.argsort(table.stamp, kind="stable")
    oldest_first = oldest_first[table.stamp[oldest_first] >= 0]
    assert log.oldest(40_000, table.clock).tolist() == oldest_first.tolist()


def test_rows_that_are_not_retained_any_more_come_back_some_at_a_time() -> None:
    """In the order of their last use, before all that the log has."""
    rows = Rows(20_000, 20_000 // 16)
    row_class, kept = rows.classes.add(spec(), namespace=0), rows.followers.kept
    kept.share = 1.0
    held = rows.store(row_class, *range(1, 10_001))
    last = rows.store(row_class, *range(20_001, 20_006))
    kept.keep(held, 60, now=0.0)
    log, clock = row_class.order, rows.rows.table.clock
    assert log.oldest(20_000, clock).tolist() == last[::-1].tolist()
    kept.drop(held)
    every = [*held[::-1].tolist(), *last[::-1].tolist()]
    seen = 5
    for _ in range(3):
        oldest = log.oldest(20_000, clock).tolist()
        assert seen < len(oldest) <= seen + 8 * 512
        assert oldest == [*every[: len(oldest) - 5], *every[-5:]]
        seen = len(oldest)
    assert seen == len(every)


def test_a_retained_row_stays_while_behind_many_there_is_one_that_is_retained_no_more() -> None:
    """The control: without it a retained row goes, because nothing else can."""
    rows = Rows(12_000, 12_000 // 16)
    row_class, kept = rows.classes.add(spec(), namespace=0), rows.followers.kept
    kept.share = 1.0
    held = rows.store(row_class, *range(1, 12_001))
    kept.keep(held, 60, now=0.0)
    assert len(row_class.order.oldest(1, rows.rows.table.clock)) == 0, "all are passed over"
    kept.drop(held[:1])  # the one that was used last
    assert len(rows.store(row_class, 20_001)) == 1
    assert rows.counters["evicted_kept"] == 0
    kept.keep(np.flatnonzero(rows.rows.table.state == READY), 60, now=0.0)
    assert len(rows.store(row_class, 20_002)) == 1
    assert rows.counters["evicted_kept"] == 1


def test_a_row_is_listed_once_until_it_is_used() -> None:
    table = ready_table(4)
    rows, listed = np.arange(4), Listed(table)
    table.stamp_rows(rows)
    assert listed.new(rows[:3]).tolist() == [0, 1, 2]
    assert listed.new(rows).tolist() == [3]
    table.stamp_rows(rows[1:2])
    assert listed.new(rows).tolist() == [1]
