"""Seals of rows."""

from __future__ import annotations

import numpy as np

from kvass.core.saved.seals import VOID, seals
from tests.core.rows import keys


def test_a_seal_depends_on_all_that_it_covers() -> None:
    key, row, serial = keys(1), np.array([5]), np.array([3], np.uint64)
    mine = seals(key, row, serial)
    assert mine == seals(key, row, serial)
    assert mine[0] != VOID
    for word in range(4):
        other = key.copy()
        other[0, word] += np.uint64(1)
        assert mine != seals(other, row, serial)
    assert mine != seals(key, row + 1, serial)
    assert mine != seals(key, row, serial + np.uint64(1))


def test_no_two_of_many_rows_have_one_seal() -> None:
    rows = np.arange(100_000)
    zeros = np.zeros((len(rows), 4), np.uint64)
    assert len(np.unique(seals(zeros, rows, np.zeros(len(rows), np.uint64)))) == len(rows)
