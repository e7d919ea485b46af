"""Rows are in the index of their class from when they enter until they leave."""

from __future__ import annotations

import numpy as np

from kvass.core.rows.index import ABSENT
from tests.core.rows import Rows, keys, spec


def test_a_row_is_found_from_its_entry_until_it_leaves() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    rows = core.write(row_class, 1, 2)
    assert row_class.index.find(keys(1, 2)).tolist() == rows.tolist()
    core.rows.discard(rows[:1])
    core.rows.publish(rows[1:])
    assert row_class.index.find(keys(1, 2)).tolist() == [ABSENT, rows[1]]
    core.rows.free(rows[1:], "capacity")
    assert not len(row_class.index)


def test_a_row_is_found_by_its_blocks_while_it_is_ready() -> None:
    core = Rows()
    row_class = core.classes.add(spec(chunk_blocks=4), namespace=1)
    assert row_class.blocks is not None
    tail = core.write(row_class, 1)
    row_class.blocks.prints.note(tail, np.array([[5, 6, 0]], np.uint64), tail=2)
    wanted = np.array([5, 6, 7], np.uint64)
    assert row_class.blocks.longest(wanted) == (0, ABSENT)
    core.rows.publish(tail)
    assert row_class.blocks.longest(wanted) == (2, tail[0])
    longer = core.write(row_class, 2)
    row_class.blocks.prints.note(longer, wanted[None], tail=0)
    core.rows.publish(longer)
    assert row_class.blocks.longest(wanted) == (3, longer[0])
    assert core.counters["tails_replaced"] == core.counters["bytes_evicted_replaced"] == 1
    core.rows.free(longer, "capacity")
    assert row_class.blocks.longest(wanted) == (0, ABSENT)
