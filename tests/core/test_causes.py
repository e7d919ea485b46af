"""The causes for which rows leave: each of them, and what it explains."""

from __future__ import annotations

from typing import get_args

import pytest

from kvass.core.rows.causes import CAUSES, Cause
from kvass.core.rows.left import Departure
from tests.core.rows import Rows, keys, spec


@pytest.mark.parametrize("cause", get_args(Cause))
def test_rows_that_left_name_the_cause_if_it_explains_a_miss(cause: Cause) -> None:
    core = Rows()
    row_class = core.classes.add(spec(group=200), namespace=1 << 30)
    core.rows.free(core.store(row_class, 9), cause)
    found = core.followers.left.find(1 << 30, 200, keys(9))
    assert found == (Departure(cause, 0.0, 0) if cause in CAUSES else None)
    assert (found is None) == (cause in ("replaced", "no_room", "unwanted"))


def test_the_list_is_closed() -> None:
    assert CAUSES.keys() - {*get_args(Cause)} == {"quota", "refused"}
