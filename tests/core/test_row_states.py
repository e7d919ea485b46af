"""The states of rows: pins, publishing, discarding, freeing, and what each does to their class."""

from __future__ import annotations

from tests.core.groups import SHORT, engine, rows


def test_of_one_store_the_shallow_windows_leave_first() -> None:
    e = engine(SHORT, pages=16)  # room for 8 rows
    e.store(*"abcdefgh", groups=1)
    e.store(*"xy")
    assert rows(e) == [8]
    assert e.holds(*"abcdefgh") == 8
    assert e.holds("a") == e.holds(*"ab") == 0
