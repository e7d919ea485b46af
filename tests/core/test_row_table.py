"""The row table: its transitions, and how it grows."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.rows.row_table import FREE, NEVER, READY, WRITING, RowTable
from kvass.types import KEY_WORDS
from tests.core.rows import ready_table


def test_only_known_transitions_are_made() -> None:
    table = RowTable()
    table.grow(2)
    with pytest.raises(AssertionError, match="free"):
        table.move(np.arange(2), FREE, READY)
    with pytest.raises(AssertionError, match="thought"):
        table.move(np.arange(2), WRITING, READY)


def test_a_pinned_row_is_not_freed() -> None:
    table = ready_table(1)
    table.pins[0] = 1
    with pytest.raises(AssertionError, match="pinned"):
        table.move(np.arange(1), READY, FREE)


def test_the_table_grows_and_keeps_what_it_had() -> None:
    table = ready_table(3)
    table.key[0] = 7
    table.grow(2)
    assert len(table) == 3
    table.grow(4)
    assert len(table) >= 4
    assert table.key[0].tolist() == [7] * KEY_WORDS
    assert (table.state[0], table.stamp[3]) == (READY, NEVER)
