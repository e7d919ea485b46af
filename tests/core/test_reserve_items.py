"""The items of a ``Reserve``: what is refused, and how many of them one step decides."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.handlers import granting, reserve_items
from tests.core.rig import WIDTH, Rig, digests


def test_keys_of_all_items_of_a_message_are_limited() -> None:
    rig = Rig(keys_per_message=3)
    e = rig.engine()
    items = [m.ReserveItem(request="r", digests=digests("a", "b"))] * 2
    assert rig.code(e.scheduler, m.Reserve(seq=3, items=items, width=WIDTH)) == "limit"
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"groups": 0}, "groups: mask 0"),
        ({"groups": -1}, "groups: mask -1"),
        ({"groups": 2}, "groups: mask 2"),
        ({"first": 9}, "first: 9"),
        ({"digests": b"no multiple"}, "digests: 11 bytes"),
        ({"request": ""}, "request: "),
        ({"request": "r" * 513}, "request: "),
    ],
)
def test_an_item_that_makes_no_sense_is_refused_and_the_others_are_granted(
    rig: Rig, wrong: dict[str, object], text: str
) -> None:
    e = rig.engine(ranks=2)
    bad: dict[str, object] = {"request": "bad", "digests": digests("a", "b"), **wrong}
    grants = e.reserve_items(
        m.ReserveItem(request="r", digests=digests("a")),
        m.ReserveItem(**bad),  # type: ignore[arg-type]
        m.ReserveItem(request="s", digests=digests("a", "c")),
    )
    assert [g.chunks for g in grants] == [(0,), (), (1,)]
    assert [bool(g.error) for g in grants] == [False, True, False]
    assert grants[1].error.startswith(text)
    assert (grants[1].reservation, grants[1].later, grants[1].refused) == (0, -1, None)
    assert rig.count("refused_bad_value") == 1
    assert rig.gauge("reservations", "quarantined_bytes") == (2, 0)
    e.hand_over(reservations=(grants[0].reservation, grants[2].reservation))
    for grant in (grants[0], grants[2]):
        assert e.commit(grant.reservation, 0) == e.commit(grant.reservation, 1) == []
    assert (e.holds("a", "c"), e.holds("a", "b")) == (2, 1)


def test_a_reserve_that_would_take_long_is_decided_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserve_items, "COST_A_STEP", 3 * reserve_items.COST_OF_AN_ITEM)
    monkeypatch.setattr(granting, "ROWS_A_STEP", 4)
    rig = Rig(pages=64, extent=4, instance_write_share=1.0)
    e = rig.engine()
    items = [m.ReserveItem(request="r", digests=digests(f"{i}a", f"{i}b")) for i in range(5)]
    grants = e.reserve_items(*items)
    assert [g.chunks for g in grants] == [(0, 1), (0, 1), (), (), ()]
    assert [g.later for g in grants] == [-1, -1, 0, 0, 0]
    grants = e.reserve_items(*items[2:])
    assert [g.chunks for g in grants] == [(0, 1), (0, 1), ()]
    long = m.ReserveItem(request="l", digests=digests(*range(10)), first=1)
    (grant,) = e.reserve_items(long)
    assert (grant.chunks, grant.later) == ((1, 2, 3, 4), 5)
    long.first = grant.later
    (grant,) = e.reserve_items(long)
    assert (grant.chunks, grant.later) == ((5, 6, 7, 8), 9)
