"""Which rows left L1: what is remembered, and for how long."""

from __future__ import annotations

from typing import get_args

import pytest

from kvass.core.rows import left
from kvass.core.rows.causes import ClearCause
from kvass.core.rows.left import Departure, LeftRows
from kvass.core.rows.tables import CoreTables
from tests.core.rows import Rows, keys, spec


def test_a_key_is_found_in_its_group_and_namespace_only() -> None:
    rows = LeftRows(b"seed", CoreTables(0))
    assert rows.find(0, 0, keys(1)) is None
    rows.note(3, 1, keys(1, 2), "capacity", 5.0)
    assert rows.find(3, 1, keys(7, 2, 1)) == Departure("capacity", 5.0, 1)
    assert rows.find(3, 0, keys(1)) is None
    assert rows.find(0, 1, keys(1)) is None
    assert rows.find(3, 1, keys()) is None
    rows.note(3, 1, keys(), "quota", 6.0)
    rows.note(3, 1, keys(1), "quota", 7.0)
    assert rows.find(3, 1, keys(1)) == Departure("quota", 7.0, 0), "the last time counts"


@pytest.mark.parametrize("cause", get_args(ClearCause))
def test_rows_of_a_class_that_is_gone_name_the_cause_when_their_room_is_given_back(
    cause: ClearCause,
) -> None:
    core = Rows()
    row_class = core.classes.add(spec(group=200), namespace=1 << 30)
    core.store(row_class, 9)
    core.classes.remove([1 << 30], [row_class], cause)
    assert core.followers.left.find(1 << 30, 200, keys(9)) is None
    core.allocator.reclaim()
    assert core.followers.left.find(1 << 30, 200, keys(9)) == Departure(cause, 0.0, 0)


def test_memory_is_bounded_and_most_of_the_newest_entries_are_kept() -> None:
    rows = LeftRows(b"seed", CoreTables(0))
    for begin in range(0, 4 * left.ROOM, 4096):
        rows.note(0, 0, keys(*range(begin, begin + 4096)), "capacity", 1.0)
    assert len(rows._marks) == left.ROOM
    newest = range(4 * left.ROOM - 8192, 4 * left.ROOM)
    kept = sum(rows.find(0, 0, keys(one)) is not None for one in newest)
    assert kept > 0.95 * len(newest)
    oldest = sum(rows.find(0, 0, keys(one)) is not None for one in range(2048))
    assert oldest < 0.1 * 2048


def test_seeds_differ() -> None:
    ours, theirs = (LeftRows(seed, CoreTables(0)) for seed in (b"a", b"b"))
    places = [rows._hashed(0, 0, keys(*range(64)))[1] for rows in (ours, theirs)]
    assert (places[0] != places[1]).any()
