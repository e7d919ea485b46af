"""The states of rows: pins, publishing, discarding, freeing, and what each does to their class."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.rows.index import ABSENT
from kvass.core.rows.row_table import (
    FAILED,
    FREE,
    LOADING,
    QUARANTINED,
    READY,
    TRANSIENT,
    WRITING,
)
from kvass.types import I64Array
from tests.core.groups import SHORT, engine
from tests.core.groups import rows as rows_of
from tests.core.rows import Rows, keys, spec


def test_a_written_row_is_found_and_may_be_read_once_it_is_published() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    rows = core.write(row_class, 1, 2)
    found = row_class.index.find(keys(1, 2, 3))
    assert found.tolist() == [*rows.tolist(), ABSENT]
    assert core.rows.there(found).tolist() == [False, False, False]
    assert core.rows.there(found, WRITING).tolist() == [True, True, False]
    core.rows.publish(rows)
    assert core.rows.there(found).tolist() == [True, True, False]
    assert core.counters["l1_in_bytes"] == 2


def test_a_discarded_row_is_not_found_and_its_slot_is_not_given_again_before_it_is_freed() -> None:
    core = Rows(arena_bytes=1, extent_bytes=1)
    row_class = core.classes.add(spec(), namespace=1)
    rows = core.write(row_class, 1)
    core.rows.discard(rows)
    assert core.states(rows) == {QUARANTINED}
    assert row_class.index.find(keys(1)).tolist() == [ABSENT]
    assert not len(core.write(row_class, 2)), "the only slot may still be written"
    core.rows.free(rows)
    assert core.write(row_class, 2).tolist() == rows.tolist()


def test_a_row_keeps_its_slot_until_its_last_unpin() -> None:
    core = Rows(arena_bytes=1, extent_bytes=1)
    row_class = core.classes.add(spec(), namespace=1)
    rows = core.store(row_class, 1)
    core.rows.pin(rows)
    core.rows.pin(rows)
    core.rows.unpin(rows)
    assert core.rows.pinned == 1
    assert not len(core.write(row_class, 2)), "the only row is pinned"
    core.rows.unpin(rows)
    assert core.write(row_class, 2).tolist() == rows.tolist()


def test_a_forgotten_row_is_not_found_and_keeps_its_slot_until_its_last_unpin() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    rows = core.store(row_class, 1, 2, 3)
    core.rows.pin(rows[:1])
    core.rows.forget(rows[:2], "cleared")
    assert row_class.index.find(keys(1, 2, 3)).tolist() == [ABSENT, ABSENT, rows[2]]
    assert core.rows.table.state[rows].tolist() == [FAILED, FREE, READY]
    core.rows.unpin(rows[:1])
    assert core.rows.table.state[rows[0]] == FREE


def load(core: Rows) -> tuple[I64Array, int]:
    """Two LOADING rows of one class, and the first of them, which is pinned twice."""
    row_class = core.classes.add(spec(), namespace=1)
    (rows,), _ = core.allocator.allocate(
        [row_class], keys(1, 2), [np.arange(2)], 0, core.classes.tenants.default, LOADING
    )
    core.rows.pin(rows[:1])
    core.rows.pin(rows[:1])
    return rows, int(rows[0])


def test_a_failed_row_is_freed_when_nobody_waits_for_it() -> None:
    core = Rows()
    rows, pinned = load(core)
    core.rows.fail(rows)
    assert core.rows.table.state[rows].tolist() == [FAILED, FREE]
    core.rows.unpin(rows[:1])
    assert core.rows.table.state[pinned] == FAILED
    core.rows.unpin(rows[:1], ahead=True)
    assert core.rows.table.state[pinned] == FREE


@pytest.mark.parametrize(("ahead", "after"), [(False, FREE), (True, TRANSIENT)])
def test_a_row_that_is_not_retained_leaves_at_its_last_unpin_unless_it_was_prefetched(
    ahead: bool, after: int
) -> None:
    core = Rows()
    rows, pinned = load(core)
    core.rows.publish_loaded(rows, stay=False)
    assert core.states(rows) == {TRANSIENT}
    core.rows.unpin(rows[:1])
    assert core.rows.table.state[pinned] == TRANSIENT
    core.rows.unpin(rows[:1], ahead)
    assert core.rows.table.state[pinned] == after
    assert core.counters["bytes_evicted_not_retained"] == (after == FREE)


def test_rows_of_several_tenants_are_freed_and_touched_each_in_its_own_class() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    core.classes.tenants.divided = True
    tenant = core.classes.tenants._add("a")
    tenant.listed = True
    mine, theirs = core.store(row_class, 1, 2), core.store(row_class, 3, tenant="a")
    core.rows.touch(row_class, np.concatenate([mine[:1], theirs, mine[1:]]))
    other = row_class.of_tenants[tenant.id]
    clock = core.rows.table.clock
    assert row_class.order.oldest(9, clock).tolist() == mine[::-1].tolist()
    assert other.order.oldest(9, clock).tolist() == theirs.tolist()
    before = len(row_class.free), len(other.free)
    core.rows.free(np.concatenate([mine, theirs]), "capacity")
    assert (len(row_class.free), len(other.free)) == (before[0] + 2, before[1] + 1)
    assert row_class.rows[READY] == other.rows[READY] == 0


def test_slots_name_the_extents_that_are_used_and_a_slot_in_each() -> None:
    core = Rows(arena_bytes=12)
    row_class = core.classes.add(spec(), namespace=1)
    rows = core.store(row_class, *range(12))
    bases = [core.classes.extents.sets[i].bases[0] for i in range(3)]
    slots = core.rows.slots(rows[[9, 1, 8]])
    assert slots.extents == ((bases[0],), (bases[2],))
    assert slots.offsets(0, 1).tolist() == [9, 1, 8]
    assert len(core.rows.slots(rows[:0])) == 0


def test_of_one_store_the_shallow_windows_leave_first() -> None:
    e = engine(SHORT, pages=16)  # room for 8 rows
    e.store(*"abcdefgh", groups=1)
    e.store(*"xy")
    assert rows_of(e) == [8]
    assert e.holds(*"abcdefgh") == 8
    assert e.holds("a") == e.holds(*"ab") == 0
