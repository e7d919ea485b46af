"""The longest hit of a prompt, where windows, local chunks and states need less than all of it."""

from __future__ import annotations

from kvass import messages as m
from kvass.core.matching.prefix import PrefixView
from kvass.core.rows.row_classes import Namespace
from tests.core.groups import FULL, LONG, SHORT, STATE, engine, fit
from tests.core.rig import digests
from tests.core.rows import Rows, keys, spec


def test_only_what_the_match_needs_is_pinned() -> None:
    e = engine(FULL, SHORT, LONG, STATE)
    e.store(*"abcdef", groups=15)
    found = e.lookup(*"abcdef")
    assert fit(found) == (6, [6, 1, 3, 1])
    assert e.rig.gauge("pins") == (11,)
    e.release(found.lease)
    assert e.rig.gauge("pins", "leases") == (0, 0)


def test_from_inside_the_prompt_only_the_rest_is_pinned() -> None:
    e = engine(FULL, SHORT, LONG, STATE)
    e.store(*"abcdef", groups=15)
    assert fit(e.lookup(*"abcdef", first=4)) == (6, [2, 1, 2, 1])
    assert fit(e.lookup(*"abcdef", first=6)) == (6, [])


def test_a_hit_ends_where_every_group_reaches() -> None:
    e = engine(FULL, STATE)
    e.store(*"abcdef", groups=1)
    assert e.holds(*"abcdef") == 0
    for chunks, name in ((2, "b"), (5, "e")):
        item = m.ReserveItem(
            request="r", digests=digests(*"abcdef"[:chunks]), first=chunks - 1, groups=2
        )
        (grant,) = e.reserve_items(item)
        assert grant.chunks == (chunks - 1,), name
        e.commit(grant.reservation)
        assert e.holds(*"abcdef") == chunks
    assert e.holds(*"abcd") == 2, "the state at 5 chunks is no use to a prompt of 4"


def test_a_window_with_a_hole_reaches_past_it_once_it_is_long_enough() -> None:
    e = engine(FULL, LONG)
    e.store(*"abcdefgh", groups=1)
    e.store("a", groups=2)  # then chunk b lacks its window
    item = m.ReserveItem(request="r", digests=digests(*"abcdefgh"), first=2, groups=2)
    (grant,) = e.reserve_items(item)
    assert e.holds(*"abcdefgh") == 1, "not yet committed"
    e.commit(grant.reservation)
    assert e.holds(*"abcd") == 1, "chunks c, d and b are needed"
    assert e.holds(*"abcde") == 5
    assert e.holds(*"abcdefgh") == 8


def test_a_match_leaves_chunks_spare() -> None:
    """What is left spare is neither given nor pinned; the windows and the state are those of the
    shorter hit."""
    e = engine(FULL, SHORT, LONG, STATE)
    e.store(*"abcdef", groups=15)
    found = e.lookup(*"abcdef", spare=1)
    assert (fit(found), found.spare) == ((5, [5, 1, 3, 1]), 1)
    assert e.rig.gauge("pins") == (10,)
    assert fit(e.lookup(*"abcxyz", spare=1)) == (2, [2, 1, 2, 1])
    assert fit(e.lookup(*"abcdef", first=4, spare=1)) == (5, [1, 1, 1, 1])
    assert fit(e.lookup(*"abcdef", first=5, spare=1)) == (5, [])
    assert fit(e.lookup(*"abcdef", spare=6)) == (0, [])
    assert fit(e.lookup(*"abcdef", spare=1 << 40)) == (0, [])
    assert fit(e.lookup(*"abcdef", spare=0)) == (6, [6, 1, 3, 1])


def test_a_state_before_what_is_spare_is_enough() -> None:
    """As vLLM leaves it: the last state a chunk before the last full one."""
    e = engine(FULL, STATE)
    e.store(*"abcdef", groups=1)
    e.store(*"abcde", first=4, groups=2)
    assert fit(e.lookup(*"abcdef", spare=1)) == (5, [5, 1])
    assert fit(e.lookup(*"abcdex", spare=1)) == (0, []), "the next tokens are others"


def test_windows_alone_need_no_full_rows() -> None:
    e = engine(SHORT, LONG)
    e.store(*"abcdef", groups=3)
    assert fit(e.lookup(*"abcdef")) == (6, [1, 3])


def test_a_lookup_keeps_young_what_a_hit_needs() -> None:
    e = engine(SHORT, pages=16)
    e.store(*"abcdefgh", groups=1)
    assert e.holds(*"abc") == 3
    e.store(*[f"x{i}" for i in range(7)])
    assert e.holds(*"abc") == 3
    assert e.holds(*"abcdefgh") == 3


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
    oldest = row_class.log.oldest(9, core.rows.table.clock)
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
