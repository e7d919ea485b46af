"""The tags of rows: of one session or of none, and only its tenant ends it."""

from __future__ import annotations

import numpy as np

from kvass.core.rows.row_table import RowTable
from kvass.core.rows.session_tags import MOST_ENDED, NO_SESSION, SessionTags
from kvass.types import session_tag


def tags_of(rows: int) -> tuple[RowTable, SessionTags]:
    table = RowTable()
    table.grow(rows)
    return table, SessionTags(table)


def test_a_row_has_a_tag_while_one_session_alone_uses_it() -> None:
    _, tags = tags_of(6)
    tags.stored(np.array([0, 1, 2]), 7)
    tags.stored(np.array([3]), 8)
    tags.used(np.array([0, 3]), 7)
    tags.used(np.array([1]), NO_SESSION)
    assert tags.of(np.arange(6)).tolist() == [7, 0, 7, 0, 0, 0]
    assert tags.rows_of(7).tolist() == [0, 2]
    tags.used(np.array([1]), 7)
    assert tags.rows_of(7).tolist() == [0, 2], "a shared row stays shared"
    tags.freed(np.array([0]))
    assert tags.rows_of(7).tolist() == [2]
    assert tags.rows_of(NO_SESSION).tolist() == []


def test_without_sessions_there_is_no_column_and_it_grows_with_the_table() -> None:
    table, tags = tags_of(4)
    tags.stored(np.array([1]), NO_SESSION)
    tags.used(np.array([1]), NO_SESSION)
    assert not tags.any
    tags.stored(np.array([1]), 5)
    table.grow(4000)
    tags.stored(np.array([3999]), 5)
    assert tags.rows_of(5).tolist() == [1, 3999]


def test_only_rows_of_the_tenant_that_ended_a_session_count_as_ended() -> None:
    _, tags = tags_of(4)
    rows, payers = np.arange(4), np.array([0, 0, 3, 3])
    tags.stored(rows, 7)
    assert not tags.ended(rows, payers).any()
    tags.end(7, tenant=3)
    assert tags.ended(rows, payers).tolist() == [False, False, True, True]
    tags.resume(7)
    assert not tags.ended(rows, payers).any()


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
