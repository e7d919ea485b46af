"""Law 6: room is made at allocation time, and any namespace can get it."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.rows.use_times import STEP_S
from kvass.types import PAGE
from tests.core.groups import FULL, SHORT, engine
from tests.core.groups import rows as rows_of
from tests.core.rig import RESERVE_S, Engine, Rig, digests, layout

ALL = {"instance_write_share": 1.0}


def filled(rig: Rig, rows: int, prefix: str = "k") -> Engine:
    e = rig.engine()
    for i in range(rows):
        e.store(f"{prefix}{i}")
    return e


def test_a_class_grows_over_the_whole_arena_before_it_evicts() -> None:
    rig = Rig(pages=16, extent=4)
    e = filled(rig, 16)
    assert [e.holds(f"k{i}") for i in range(16)] == [1] * 16
    assert rig.gauge("l1_used_bytes") == (16 * PAGE,)


def test_the_least_recently_used_row_leaves_first() -> None:
    rig = Rig(pages=8, extent=8)
    e = filled(rig, 8)
    e.holds("k0")
    e.store("new")
    assert (e.holds("k1"), e.holds("k0"), e.holds("k2")) == (0, 1, 1)
    assert rig.count("evicted_capacity") == 1


def test_the_deeper_chunk_leaves_first() -> None:
    rig = Rig(pages=8, extent=8, **ALL)
    e = rig.engine()
    e.store(*"abcdefgh")
    e.store("new")
    e.store("more")
    assert e.holds(*"abcdefgh") == 6


def test_a_lookup_touches_the_prefix_it_does_not_pin() -> None:
    rig = Rig(pages=8, extent=8, **ALL)
    e = rig.engine()
    e.store("a", "b", "c", "d")
    e.store("w", "x", "y", "z")
    e.give_back(e.lookup("a", "b", "c", "d", first=3).lease)
    e.store("1", "2", "3", "4")
    assert e.holds("a", "b", "c", "d") == 4


def test_a_reserve_touches_its_prefix_and_never_evicts_it() -> None:
    rig = Rig(pages=8, extent=8, **ALL)
    e = rig.engine()
    e.store(*"abcdef")
    e.store("x", "y")
    grant = e.reserve(*"abcdef", "g", "h", "i", first=6)
    assert grant.chunks == (6, 7)
    assert rig.gauge("rows") == (6,)
    e.commit(grant.reservation)
    assert e.holds(*"abcdefgh") == 8


def test_new_chunks_are_older_than_their_prefix() -> None:
    rig = Rig(pages=8, extent=8, **ALL)
    e = rig.engine()
    e.store("a", "b")
    e.store(*"abcdef")
    e.store("x", "y")
    e.store("z")
    assert e.holds(*"abcdef") == 5


def test_a_prefix_that_two_items_of_a_message_store_is_newer_than_what_either_adds() -> None:
    rig = Rig(pages=8, extent=8, **ALL)
    e = rig.engine()
    items = [m.ReserveItem(request="r", digests=digests("a", last)) for last in "bc"]
    for grant in e.reserve_items(*items):
        e.hand_over(reservations=(grant.reservation,))
        e.commit(grant.reservation)
    for name in range(7):  # five fill L1, two need room
        e.store(name)
    assert (e.holds("a", "b"), e.holds("a", "c")) == (1, 1)


def test_a_pinned_row_is_never_evicted() -> None:
    rig = Rig(pages=8, extent=4, **ALL)
    e = filled(rig, 8)
    found = e.lookup("k0")
    for i in range(20):
        grant = e.store(f"n{i}")
        assert grant.slots[0].offsets(0, PAGE) != found.slots[0].offsets(0, PAGE)
    assert e.holds("k0") == 1


def test_when_all_is_pinned_nothing_is_granted_and_nothing_changes() -> None:
    rig = Rig(pages=4, extent=4, **ALL)
    e = filled(rig, 4)
    leases = [e.lookup(f"k{i}").lease for i in range(4)]
    assert e.reserve("x").chunks == ()
    assert rig.engine("o", identity={"model": "o"}).reserve("x").chunks == ()
    e.release(leases[2])
    assert e.reserve("x").chunks == (0,)
    assert [e.holds(f"k{i}") for i in range(4)] == [1, 1, 0, 1]


def test_what_does_not_fit_in_every_group_is_taken_back() -> None:
    rig = Rig(pages=8, extent=2, **ALL)
    e = rig.engine(layout=layout(1, 2))
    grant = e.reserve(*"abcdef", groups=3)
    chunks = len(grant.chunks)
    assert 0 < chunks < 6
    assert rig.status["namespaces"][0]["groups"][0]["rows_writing"] == chunks
    e.abort(grant.reservation)
    assert rig.gauge("l1_used_bytes") == (0,)


# ---------------------------------------------------------------- several layouts


def test_fill_with_layout_a_then_store_layout_b() -> None:
    rig = Rig(pages=32, extent=4)
    a = filled(rig, 32)
    b = rig.engine("b", layout=layout(3))
    for i in range(8):
        b.store(f"b{i}")
    assert [b.holds(f"b{i}") for i in range(8)] == [1] * 8
    assert 0 < sum(a.holds(f"k{i}") for i in range(32)) < 32
    assert rig.count("evicted_handed_over") > 0


def test_and_a_gets_its_room_back() -> None:
    rig = Rig(pages=32, extent=4)
    a, b = filled(rig, 32), rig.engine("b", layout=layout(3))
    for i in range(20):
        b.store(f"b{i}")
    for i in range(32):
        a.store(f"n{i}")
    assert [a.holds(f"n{i}") for i in range(32)][-4:] == [1] * 4


@pytest.mark.parametrize("why", ["used", "pinned"])
def test_the_set_that_was_used_longest_ago_is_handed_over(why: str) -> None:
    """Unless one of its rows is pinned."""
    rig = Rig(pages=8, extent=4)
    a = filled(rig, 8)
    for i in range(4 if why == "used" else 0):
        a.holds(f"k{i}")
    if why == "pinned":
        a.lookup("k0")
    rig.engine("b", layout=layout(2)).store("b")
    assert [a.holds(f"k{i}") for i in range(8)] == [1, 1, 1, 1, 0, 0, 0, 0]


def test_a_set_with_a_quarantined_slot_stays() -> None:
    rig = Rig(pages=8, extent=4)
    a = rig.engine()
    late = a.begin("late")
    for i in range(7):
        a.store(f"k{i}")
    rig.wait(RESERVE_S)
    b = rig.engine("b", layout=layout(2))
    taken = b.store("b").slots[0].offsets(0, 2 * PAGE)
    assert not set(taken) & set(late.slots[0].offsets(0, PAGE))
    assert rig.gauge("quarantined_bytes") == (PAGE,)
    a.commit(late.reservation)
    assert rig.gauge("quarantined_bytes") == (0,)


def test_neighbouring_sets_go_together_for_a_larger_row() -> None:
    rig = Rig(pages=16, extent=1)
    filled(rig, 16)
    b = rig.engine("b", layout=layout(4))
    b.store("b")
    assert b.holds("b") == 1
    assert rig.gauge("rows") == (13,)


def test_each_shard_gets_an_extent_of_its_own() -> None:
    rig = Rig(pages=128, extent=4)
    e = rig.engine(ranks=4)
    grant = e.store("a", "b")
    places = [grant.slots[0].offsets(s, PAGE).tolist() for s in range(4)]
    assert all(two - one in (PAGE, -PAGE) for one, two in places)
    assert len({x for pair in places for x in pair}) == 8


def test_half_a_chunk_is_completed_by_what_it_lacks() -> None:
    rig = Rig()
    e = rig.engine(layout=layout(1, 1))
    e.store("a", groups=1)
    assert e.holds("a") == 0
    grant = e.store("a", "b", groups=3)
    assert (grant.chunks, grant.which) == ((0, 1), ((1,), (0, 1)))
    assert list(map(len, grant.slots)) == [1, 2]
    assert e.holds("a", "b") == 2
    assert rig.gauge("rows") == (4,)


def test_half_a_chunk_being_written_leaves_the_other_half_to_write() -> None:
    e = Rig().engine(layout=layout(1, 1))
    half = e.reserve("a", groups=1)
    other = e.reserve("a", groups=3)
    assert (other.chunks, other.which) == ((0,), ((), (0,)))
    e.commit(other.reservation)
    assert e.holds("a") == 0
    e.commit(half.reservation)
    assert e.holds("a") == 1


def test_a_set_of_many_shards_leaves_room_for_others() -> None:
    """A pinned chunk of each of ten models of 32 shards, in an arena of 16 times one extent each.

    With a whole extent for each shard the third model would be granted nothing.
    """
    rig = Rig(pages=1024, extent=16)
    engines = [rig.engine(f"e{i}", ranks=32, identity={"model": str(i)}) for i in range(10)]
    for one in engines:
        one.store("a")
        assert one.lookup("a").chunks == 1
    assert rig.gauge("rows") == (10,)


def test_many_stores_into_a_full_arena_are_never_dropped() -> None:
    rig = Rig(pages=64, extent=4)
    e = rig.engine()
    for i in range(500):
        e.store(f"k{i}")
    assert rig.gauge("rows") == (64,)
    assert rig.count("chunks_granted") == 500


def test_a_reserve_evicts_no_row_that_it_names() -> None:
    rig = Rig(pages=16, extent=4)
    e = filled(rig, 4, "p")
    for i in range(12):
        e.store(f"q{i}")
    prompt = [f"p{i}" for i in range(8)]
    assert e.reserve(*prompt).chunks == (4, 5, 6, 7), "first is 0, yet p0..p3 are named"
    assert e.holds(*prompt) == 4


def test_one_item_evicts_nothing_that_another_names() -> None:
    rig = Rig(pages=16, extent=4)
    e = filled(rig, 4, "p")
    for i in range(12):
        e.store(f"q{i}")
    prompt = [f"p{i}" for i in range(5)]
    items = [
        m.ReserveItem(request="x", digests=digests("x0", "x1", "x2")),
        m.ReserveItem(request="p", digests=digests(*prompt), first=4),
    ]
    assert [g.chunks for g in e.reserve_items(*items)] == [(0, 1, 2), (4,)]
    assert e.holds(*prompt) == 4


def test_a_cleared_layout_leaves_its_sets_to_others() -> None:
    rig = Rig(pages=16, extent=4)
    a = filled(rig, 16)
    b = rig.engine("b", layout=layout(2))
    b.store("b0")
    a.clear()
    for i in range(1, 8):
        b.store(f"b{i}")
    assert [b.holds(f"b{i}") for i in range(8)] == [1] * 8, "none of b's own rows had to go"


def test_evicted_bytes_and_those_that_nobody_read() -> None:
    """Room for 4: of the 3 rows that give way, the oldest two, one was read."""
    rig = Rig(pages=4, extent=1, instance_write_share=1.0)
    e = rig.engine()
    for name in "abcd":
        e.store(name)
    e.give_back(e.lookup("a").lease)
    e.release(e.lookup("a").lease)  # now "b" is the oldest
    rig.wait(20.0)
    for name in "xyz":
        e.store(name)
    counts = rig.status["counters"]
    assert counts["l1_in_bytes"] == 7 * PAGE
    assert counts["bytes_evicted_capacity"] == counts["unread_bytes_evicted"] == 3 * PAGE
    e.store("w")  # takes the place of "a"
    counts = rig.status["counters"]
    assert counts["bytes_evicted_capacity"] == 4 * PAGE
    assert counts["unread_bytes_evicted"] == 3 * PAGE
    assert counts["l1_lent_bytes"] == PAGE
    ages = rig.status["histograms"]["age_at_eviction_seconds"]
    assert sum(ages["counts"]) == 4
    assert 4 * 20.0 <= ages["sum"] <= 4 * (20.0 + STEP_S)
    for number in range(4):
        e.store(number)
    assert rig.count("unread_bytes_evicted") == 7 * PAGE  # "w" was not read, as "a" was
    e.clear()
    assert rig.count("bytes_evicted_cleared") == 4 * PAGE


def one_set_a_step() -> Rig:
    return Rig(pages=64, extent=4, core={"slice_slots": 1}, **ALL)


def test_what_was_cleared_matches_nothing_before_it_is_given_back() -> None:
    rig = one_set_a_step()
    e = rig.engine()
    e.store(*range(64))
    assert e.clear() == 64
    assert e.holds(*range(64)) == 0
    assert rig.gauge("rows") == (0,)
    assert rig.status["l1_cleared_bytes"] > 50 * PAGE
    assert rig.finish() == 15, "one slice was done at once"
    assert rig.gauge("l1_cleared_bytes", "l1_used_bytes") == (0, 0)


def test_what_was_cleared_makes_room_before_anything_else_does() -> None:
    rig = one_set_a_step()
    e, other = rig.engine(), rig.engine("o", layout=layout(2))
    e.store(*range(56))
    other.store("kept")
    e.clear()
    grant = e.store(*range(56))
    assert len(grant.chunks) == 56
    assert other.holds("kept") == 1
    assert e.holds(*range(56)) == 56
    rig.finish()
    assert rig.gauge("l1_cleared_bytes") == (0,)


def test_a_cleared_row_that_is_read_keeps_its_place() -> None:
    rig = one_set_a_step()
    e = rig.engine()
    e.store(*range(64))
    found = e.lookup(0)
    place = {*found.slots[0].offsets(0, PAGE).tolist()}
    e.clear()
    rig.finish()
    for i in range(3):
        written = e.store(*range(100 * i, 100 * i + 60)).slots[0].offsets(0, PAGE).tolist()
        assert not place & {*written}
    e.release(found.lease)
    rig.finish()
    assert rig.gauge("l1_cleared_bytes") == (0,)


def test_a_cleared_row_that_is_written_keeps_its_place_and_is_never_published() -> None:
    rig = one_set_a_step()
    e = rig.engine()
    grant = e.reserve("late")
    place = {*grant.slots[0].offsets(0, PAGE).tolist()}
    e.hand_over(reservations=(grant.reservation,))
    e.clear()
    rig.finish()
    assert not place & {*e.store(*range(60)).slots[0].offsets(0, PAGE).tolist()}
    e.commit(grant.reservation)
    rig.finish()
    assert e.holds("late") == 0
    assert rig.gauge("l1_cleared_bytes", "quarantined_bytes") == (0, 0)


def test_a_full_row_takes_its_windows_and_states_along() -> None:
    """Room for 24 chunks of 4 + 2 pages; the oldest prompt's rows leave together."""
    e = engine(FULL, SHORT, pages=144)
    for i in range(60):
        e.store(f"k{i}", groups=3)
    assert e.rig.count("evicted_orphaned") > 0
    full, short = rows_of(e)
    assert short <= full
    assert sum(e.holds(f"k{i}") for i in range(60)) == short
