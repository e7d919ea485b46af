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
    ("wrong", "code"),
    [
        ({"groups": 0}, "bad_value"),
        ({"groups": -1}, "bad_value"),
        ({"groups": 2}, "bad_value"),
        ({"first": 9}, "bad_value"),
        ({"request": ""}, "bad_value"),
    ],
)
def test_a_reserve_that_makes_no_sense_is_refused_whole(
    rig: Rig, wrong: dict[str, object], code: str
) -> None:
    e = rig.engine(ranks=2)
    good = {"request": "r", "digests": digests("a")}
    items = [m.ReserveItem(**good), m.ReserveItem(**{**good, **wrong})]  # type: ignore[arg-type]
    assert rig.code(e.scheduler, m.Reserve(seq=3, items=items, width=WIDTH)) == code
    assert rig.gauge("reservations", "quarantined_bytes") == (0, 0)


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
