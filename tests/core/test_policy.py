"""A policy is one file: here is another one, with which the same core evicts other rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvass.core.rows import followers
from kvass.core.rows.extents import STAYS
from kvass.core.rows.index import ABSENT
from kvass.core.rows.order import Order, Victims
from kvass.core.rows.policy import Policy
from kvass.core.rows.retention import Retention
from kvass.core.rows.tables import CoreTables
from kvass.types import I64Array
from tests.core.rows import Rows, keys, spec


class LastUsed(Order):
    """The row that was used last goes first."""

    def __init__(self, tables: CoreTables) -> None:
        self.table, self.rows, self.protect = tables.table, np.empty(0, np.int64), 0

    def fill(self, rows: I64Array, stamps: I64Array) -> None:
        self.touched(rows, stamps)

    def touched(self, rows: I64Array, stamps: I64Array) -> None:
        self.rows = np.union1d(self.rows, rows)

    def evict_first(self, rows: I64Array) -> None:
        """No row goes before others."""

    def first(self) -> I64Array:
        return self.rows[:0]

    def oldest(self, count: int, protect: int) -> I64Array:
        may = self.rows[self.table.evictable(self.rows) & (self.table.stamp[self.rows] < protect)]
        found: I64Array = may[np.argsort(-self.table.stamp[may])][:count]
        return found

    def search(self, protect: int) -> LastUsed:
        self.protect = protect
        return self

    def victims(self, count: int) -> Iterator[Victims]:
        yield Victims(self.oldest(count, self.protect), "capacity", self.protect)


class MostRecentlyUsed(Policy):
    def __init__(self, tables: CoreTables, kept: Retention) -> None:
        self.tables = tables

    def order(self) -> LastUsed:
        return LastUsed(self.tables)

    def begin(self, now: float) -> None:
        """Nothing is due."""

    def ranks(self, last: bool) -> I64Array:
        sets = self.tables.sets
        ranks: I64Array = np.where(sets.held == 0, -sets.newest, STAYS)
        return ranks


@pytest.mark.parametrize(("policy", "left"), [(None, 0), (MostRecentlyUsed, 3)])
def test_the_policy_says_which_row_goes(
    policy: type[Policy] | None, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if policy is not None:
        monkeypatch.setattr(followers, "LeastRecentlyUsed", policy)
    core = Rows(arena_bytes=4)
    row_class = core.classes.add(spec(), namespace=1)
    for number in range(4):
        core.store(row_class, number + 1)
    core.store(row_class, 9)
    found = row_class.index.find(keys(1, 2, 3, 4))
    assert np.flatnonzero(found == ABSENT).tolist() == [left]
    assert core.counters["evicted_capacity"] == 1


def test_sets_of_another_class_go_by_their_rank() -> None:
    core = Rows(arena_bytes=8)
    one, other = (core.classes.add(spec(), namespace=n) for n in range(2))
    core.store(one, 1)
    core.store(other, *range(1, 5))
    assert len(core.write(other, 9)) == 1
    assert one.index.find(keys(1)).tolist() == [ABSENT]
    assert core.counters["evicted_handed_over"] == 1
