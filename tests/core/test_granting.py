"""Grants of a ``Reserve``: which rows are written, within an instance's share (law 12)."""

from __future__ import annotations

from kvass import messages as m
from kvass.types import PAGE
from tests.core.rig import RESERVE_S, Rig, digests, layout


def test_slots_come_in_the_order_of_the_groups_in_the_mask(rig: Rig) -> None:
    e = rig.engine(layout=layout(1, 2, 3))
    grant = e.reserve("a", groups=0b110)
    (second, third) = (s.offsets(0, n * PAGE)[0] for s, n in zip(grant.slots, (2, 3), strict=True))
    assert second != third
    e.hand_over(reservations=(grant.reservation,))
    e.commit(grant.reservation)
    used = [g["used_bytes"] for g in rig.status["namespaces"][0]["groups"]]
    assert used == [0, 2 * PAGE, 3 * PAGE]


def test_a_key_being_written_is_not_granted_again(rig: Rig) -> None:
    one, two = rig.engine("one"), rig.engine("two")
    assert one.reserve("a").chunks == (0,)
    assert two.reserve("a", "b").chunks == (1,)
    grant = two.reserve("a")
    assert (grant.reservation, grant.chunks, grant.slots) == (0, (), ())


def test_a_key_named_twice_is_granted_once(rig: Rig) -> None:
    e = rig.engine()
    assert e.reserve("a", "a").chunks == (0,)
    item = m.ReserveItem(request="r", digests=digests("b"))
    assert [g.chunks for g in e.reserve_items(item, item)] == [(0,), ()]


def test_a_discarded_key_may_be_granted_anew_elsewhere(rig: Rig) -> None:
    e = rig.engine()
    late = e.begin("a")
    rig.wait(RESERVE_S)
    anew = e.reserve("a")
    assert anew.slots[0].offsets(0, PAGE) != late.slots[0].offsets(0, PAGE)
    e.commit(anew.reservation)
    e.commit(late.reservation)
    assert e.holds("a") == 1


def test_one_instance_writes_at_most_its_share(rig: Rig) -> None:
    e, other = rig.engine(), rig.engine("other")
    names = [f"k{i}" for i in range(40)]
    assert e.reserve(*names).chunks == tuple(range(16))
    assert e.reserve("x").chunks == ()
    assert other.reserve("x").chunks == (0,)


def test_open_reservations_are_limited() -> None:
    rig = Rig(reservations_per_instance=2)
    e = rig.engine()
    assert e.reserve("a").reservation
    assert e.reserve("b").reservation
    assert not e.reserve("c").reservation


def test_a_grant_names_what_it_refused_and_nothing_that_exists(rig: Rig) -> None:
    e = rig.engine()
    e.store("k0", "k2")
    grant = e.reserve(*[f"k{i}" for i in range(40)])
    assert grant.chunks == (1, *range(3, 18))
    assert grant.refused == tuple(range(18, 40)), "they exceed the share"
    assert e.reserve("k0", "k1", "x").refused == (2,)
    assert rig.engine("other").reserve("k0", "k1", "x").refused == ()


def test_a_grant_names_what_there_was_no_room_for(rig: Rig) -> None:
    engines = [rig.engine(f"e{i}") for i in range(5)]
    for number, e in enumerate(engines[:4]):
        e.begin(*[f"{number} {i}" for i in range(15)])
    grant = engines[4].reserve(*"abcdefgh")
    assert (grant.chunks, grant.refused) == ((0, 1, 2, 3), (4, 5, 6, 7))
    engines[4].begin(*"abcd")
    assert engines[3].reserve("x").refused == (0,)
