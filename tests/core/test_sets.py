"""The table of extent sets, and the free slots of a row class."""

from __future__ import annotations

import numpy as np

from kvass.core.rows.extents import STAYS, ExtentSet
from kvass.core.rows.row_table import NEVER, NOBODY
from kvass.core.rows.sets import CLEARED, FreeSlots, SetTable


def a_set(number: int, first_row: int = 0, slots: int = 4) -> ExtentSet:
    return ExtentSet(number, slots, first_row, (0, 100), (10 * slots, slots))


def test_the_table_grows_and_numbers_without_a_set_are_nobodys() -> None:
    sets = SetTable()
    sets.add(a_set(0), owner=3, tenant=1)
    sets.add(a_set(2), owner=5, tenant=0)
    assert sets.owner[:3].tolist() == [3, NOBODY, 5]
    assert set(sets.owner[3:].tolist()) <= {NOBODY}
    assert sets.newest[[0, 2]].tolist() == [NEVER, NEVER]
    assert sets.bytes[[0, 2]].tolist() == [44, 44]
    assert sets.tenant[[0, 2]].tolist() == [1, 0]


def test_rows_of_several_sets_come_set_by_set() -> None:
    sets = SetTable()
    sets.add(a_set(0, first_row=7, slots=2), 1, 0)
    sets.add(a_set(1, first_row=0, slots=3), 1, 0)
    assert sets.rows_of(np.array([0, 1])).tolist() == [7, 8, 0, 1, 2]
    assert sets.rows_of(np.array([], np.int64)).tolist() == []


def test_a_cleared_set_counts_until_it_is_given_back_and_is_idle_when_nobody_holds_it() -> None:
    sets = SetTable()
    for number in range(3):
        sets.add(a_set(number), 1, 0)
    assert sets.cleared_bytes == 0
    sets.owner[:2], sets.cleared = CLEARED, 2
    sets.held[0] = 1
    assert sets.cleared_bytes == 88
    assert sets.idle_cleared().tolist() == [1]


def test_the_last_use_of_a_class_is_its_newest_and_in_use_is_later_than_all() -> None:
    sets = SetTable()
    for number, owner in enumerate((1, 1, 2, 4)):
        sets.add(a_set(number), owner, 0)
    sets.newest[:4], sets.held[2] = (30, 20, 10, 40), 1
    sets.owner[3] = CLEARED
    assert sets.last_uses() == {1: 30, 2: STAYS}


def test_the_slot_that_was_freed_last_is_given_next_and_new_ones_last() -> None:
    free = FreeSlots()
    free.give_back(np.array([1, 2]))
    free.give_new(np.array([10, 11]))
    free.give_back(np.array([5]))
    assert free.listed().tolist() == [5, 1, 2, 10, 11]
    assert free.take(2).tolist() == [5, 1]
    assert free.take(9).tolist() == [2, 10, 11]
    assert (len(free), free.take(1).tolist()) == (0, [])


def test_slots_of_a_set_that_is_given_away_are_forgotten_and_the_others_keep_their_order() -> None:
    free = FreeSlots()
    free.give_back(np.arange(200))
    gone = np.zeros(200, np.bool_)
    gone[50:150] = True
    free.drop(gone)
    assert free.take(100).tolist() == [*range(50), *range(150, 200)]
    assert len(free) == 0
