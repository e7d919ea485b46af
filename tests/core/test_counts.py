"""Bytes that come into L1 leave it once, whatever the cause."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from kvass.core.rows.causes import Cause
from kvass.core.rows.counts import EVICTED, LET_GO
from tests.core.rows import Rows, spec


@pytest.mark.parametrize("cause", get_args(Cause))
def test_each_byte_leaves_for_one_cause(cause: Cause) -> None:
    core = Rows()
    row_class = core.classes.add(spec(row_bytes=2), namespace=1)
    core.rows.free(core.store(row_class, 1, 2), cause)
    name = cause if cause in EVICTED | LET_GO else "cleared"
    left = {k: n for k, n in core.counters.items() if k.startswith("bytes_evicted_")}
    assert (
        left
        == {f"bytes_evicted_{name}": core.counters["l1_in_bytes"]}
        == {f"bytes_evicted_{name}": 4}
    )
    assert core.counters[f"evicted_{cause}"] == 2 * (cause in EVICTED)
    assert row_class.tenant.evicted_bytes == 4 * (cause in EVICTED)


def test_what_was_read_and_what_went_with_another_row_is_counted_apart() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    rows = core.store(row_class, 1, 2, 3)
    core.rows.table.read[rows[:2]] = True
    core.rows.free(rows, "capacity", orphaned=True)
    assert core.counters["evicted_orphaned"] == core.counters["bytes_evicted_orphaned"] == 3
    assert core.counters["evicted_capacity"] == row_class.tenant.evicted_bytes == 0
    assert core.counters["unread_bytes_evicted"] == 1


def test_what_never_was_readable_is_not_counted() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    rows = core.write(row_class, 1, 2)
    core.rows.discard(rows)
    core.rows.free(rows)
    assert not any(core.counters.values())
    assert np.array_equal(core.write(row_class, 3, 4), rows)
