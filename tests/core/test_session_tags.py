"""The tags of rows: of one session or of none, and only its tenant ends it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvass.core.rows.extents import ExtentSet
from kvass.core.rows.listeners import Entered, Used
from kvass.core.rows.row_table import RowTable
from kvass.core.rows.session_tags import LOOK, MOST_ENDED, NO_SESSION, SessionTags
from kvass.types import I64Array, session_tag
from tests.core.rows import tables_of

NO_CLASS: Final[Any] = None
"""Tags do not look at the class of a row, unless its session has ended."""


def tags_of(rows: int) -> tuple[RowTable, SessionTags]:
    table = RowTable()
    table.grow(rows)
    tables = tables_of(table)
    return table, SessionTags(tables)


def stored(tags: SessionTags, rows: I64Array, session: int) -> None:
    tags.entered(Entered(NO_CLASS, rows, session))


def used(tags: SessionTags, rows: I64Array, session: int) -> None:
    tags.used(Used(NO_CLASS, rows, rows, session, 0.0))


def rows_of(tags: SessionTags, session: int) -> list[int]:
    rows, end = tags.rows_of(session, 0, len(tags) + 1)
    assert end == len(tags)
    return [int(row) for row in rows]


def test_a_row_has_a_tag_while_one_session_alone_uses_it() -> None:
    _, tags = tags_of(6)
    stored(tags, np.array([0, 1, 2]), 7)
    stored(tags, np.array([3]), 8)
    used(tags, np.array([0, 3]), 7)
    used(tags, np.array([1]), NO_SESSION)
    assert tags.of(np.arange(6)).tolist() == [7, 0, 7, 0, 0, 0]
    assert rows_of(tags, 7) == [0, 2]
    used(tags, np.array([1]), 7)
    assert rows_of(tags, 7) == [0, 2], "a shared row stays shared"
    tags.reclaimed(np.array([0]))
    assert rows_of(tags, 7) == [2]


def test_without_sessions_there_is_no_column_and_it_grows_with_the_table() -> None:
    table, tags = tags_of(4)
    stored(tags, np.array([1]), NO_SESSION)
    used(tags, np.array([1]), NO_SESSION)
    assert not tags.any
    stored(tags, np.array([1]), 5)
    table.grow(4000)
    stored(tags, np.array([3999]), 5)
    assert rows_of(tags, 5) == [1, 3999]


def test_only_rows_of_the_tenant_that_ended_a_session_count_as_ended() -> None:
    table, tags = tags_of(4)
    rows = np.arange(4)
    for number, tenant in enumerate((0, 3)):
        of_set = ExtentSet(number, 2, 2 * number, (0,), (2,))
        tags._sets.add(of_set, owner=number, tenant=tenant)
        table.set_of[of_set.first_row : of_set.end_row] = number
    stored(tags, rows, 7)
    assert not tags.ended(rows).any()
    tags.end(7, tenant=3)
    assert tags.ended(rows).tolist() == [False, False, True, True]
    tags.resume(7)
    assert not tags.ended(rows).any()


def test_the_rows_of_a_session_are_found_in_parts() -> None:
    _, tags = tags_of(5 * LOOK)
    stored(tags, np.arange(1, 5 * LOOK, 2), 7)
    rows, end = tags.rows_of(7, LOOK, LOOK)
    assert rows.tolist() == [*range(LOOK + 1, 3 * LOOK, 2)]
    assert end == 3 * LOOK
    rows, end = tags.rows_of(7, end, LOOK * 9)
    assert (len(rows), end) == (LOOK, len(tags))


def test_few_ended_sessions_are_remembered() -> None:
    _, tags = tags_of(1)
    for session in range(1, MOST_ENDED + 3):
        tags.end(session, tenant=0)
    assert not tags.has_ended(2)
    assert tags.has_ended(3)
    assert tags.has_ended(MOST_ENDED + 2)


def test_the_tags_of_two_tenants_and_two_sessions_differ() -> None:
    named = {session_tag(s, t) for s in ("a", "b") for t in ("", "x")}
    named.add(session_tag("a", "", "request"))
    assert len(named - {0}) == 5
    assert max(named) < 1 << 32
    assert session_tag("a", "") == session_tag("a", "default")
