"""The longest hit of a prompt, where windows, local chunks and states need less than all of it."""

from __future__ import annotations

from kvass import messages as m
from kvass.core.matching.prefix import PrefixView
from kvass.core.rows.row_classes import Namespace
from tests.core.rows import Rows, keys, spec

# ---------------------------------------------------------------- a view by itself


def view_of(core: Rows, *numbers: int, first: int = 0, spare: int = 0) -> PrefixView:
    """A view of a prompt's chunks in a namespace with one ``full`` group."""
    (row_class,) = core.classes.by_id.values()
    ns = Namespace(1, b"", [row_class], 16, m.Register("e", {}, 16))
    return PrefixView(core.rows, ns, keys(*numbers), first, spare)


def test_writers_are_those_whose_rows_would_make_the_hit_longer() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    core.store(row_class, 1)
    core.rows.table.loader[core.write(row_class, 2)] = 7
    core.rows.table.loader[core.write(row_class, 4)] = 8
    assert view_of(core, 1, 2, 3, 4).writers() == {7}, "chunk 3 is missing before the other"
    assert view_of(core, 1, 3, 2).writers() == set()


def test_what_a_hit_uses_begins_at_first_and_ends_with_the_spare_chunks() -> None:
    core = Rows()
    core.store(core.classes.add(spec(), namespace=1), 1, 2, 3, 4)
    view = view_of(core, 1, 2, 3, 4, first=1, spare=1)
    assert view.longest(view.there()) == 3
    assert view.needs(3) == [(1, 4)]
    assert view.needs(1) == [(1, 1)], "a hit of nothing uses nothing"
    hit = view.use(3)
    assert [len(part.rows) for part in (*hit.parts, *hit.spares)] == [2, 1]


def test_a_hit_keeps_the_chunks_young_that_the_engine_has_itself() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    core.store(row_class, 1, 2)
    other = core.store(row_class, 3)
    view = view_of(core, 1, 2, first=1)
    view.use(view.longest(view.there()))
    oldest = row_class.order.oldest(9, core.rows.table.clock)
    assert oldest.tolist()[0] == other[0]


def test_the_age_of_a_hit_is_that_of_its_last_chunk() -> None:
    core = Rows()
    row_class = core.classes.add(spec(), namespace=1)
    core.store(row_class, 1, 2)
    core.rows.uses.mark(core.rows.table.clock, now=10.0)
    core.rows.touch(row_class, row_class.index.find(keys(1)))
    core.rows.uses.mark(core.rows.table.clock, now=30.0)
    assert view_of(core, 1, 2).last_used_s(2) == 30.0
    assert view_of(core, 1, 2).last_used_s(1) == 20.0
    assert view_of(core, 9).last_used_s(1) == 0.0
