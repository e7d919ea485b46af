"""The victims that a search names, in the order in which they go."""

from __future__ import annotations

from tests.core.rows import Rows, spec


def test_rows_of_ended_sessions_go_first_and_retained_rows_last() -> None:
    core = Rows(keep_share=1.0)
    row_class = core.classes.add(spec(), namespace=1)
    kept, used, ended = core.store(row_class, 1), core.store(row_class, 2), core.store(row_class, 3)
    core.followers.kept.keep(kept, 60.0, now=0.0)
    row_class.order.evict_first(ended)
    assert row_class.order.first().tolist() == ended.tolist()
    search = row_class.order.search(core.rows.table.clock)
    named = list(search.victims(9))
    rows = [(each.cause, each.rows.tolist()) for each in named]
    assert rows == [("ended", ended.tolist()), ("capacity", [*used.tolist(), *ended.tolist()])]
    core.rows.free(used, "capacity")
    core.rows.free(ended, "ended")
    named = list(search.victims(9))
    assert [each.cause for each in named] == ["ended", "capacity", "kept", "kept"]
    assert [each.rows.tolist() for each in named] == [[], [], kept.tolist(), []]
    assert [each.last for each in named] == [False, False, False, True]


def test_what_is_protected_is_no_victim() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    core.store(row_class, 1)
    for victims in row_class.order.search(protect=0).victims(9):
        assert not len(victims.rows)
