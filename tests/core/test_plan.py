"""The plan of a promotion: the longest hit that fits and is worth loading."""

from __future__ import annotations

import pytest

from kvass.core.effects import (
    TierProbe,
)
from kvass.types import PAGE, GroupLayout, RankLayout
from tests.core.rig import LEASE_S, Engine
from tests.core.tier_rig import TierRig


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


def test_a_gap_ends_what_is_loaded(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    rig.shelves[0] = {one for one in rig.shelves[0] if not one[3].startswith(b"b")}
    (found,) = rig.look_up(e, "a", "b", "c")
    assert found.chunks == 1
    assert rig.status["rows"] == 1


def test_loading_takes_half_of_l1_at_most() -> None:
    rig = TierRig(pages=16, extent=1)
    e = rig.ready()
    for start in range(0, 24, 4):
        rig.only_in_tiers(e, *range(start, start + 4))
    rig.begin(e, *range(24))
    rig.answer_all(TierProbe)
    assert rig.status["rows_loading"] == 8
    rig.begin(e, *range(24))
    rig.answer_all(TierProbe)
    assert rig.status["rows_loading"] == 8
    rig.answer_all()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [8, 8]


def test_with_everything_pinned_the_answer_is_what_is_there() -> None:
    rig = TierRig(pages=16, extent=1)
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c", "d")
    for start in range(0, 16, 4):
        e.store(*range(start, start + 4))
        rig.answer_all()
    held = e.lookup(*range(16))
    assert held.chunks == 16
    assert rig.look_up(e, "a", "b")[0].chunks == 0
    e.give_back(held.lease)
    assert rig.look_up(e, "a", "b")[0].chunks == 2


def test_a_promotion_does_not_evict_its_own_prefix() -> None:
    rig = TierRig(pages=8, extent=1)
    e = rig.ready()
    for start in (0, 2, 4, 6, 8, 10):
        rig.only_in_tiers(e, start, start + 1)
    assert rig.look_up(e, 0, 1, 2)[0].chunks == 3
    rig.wait(LEASE_S)
    (found,) = rig.look_up(e, *range(12))
    assert found.chunks == 7  # three were there, four may be LOADING
    rig.wait(LEASE_S)
    (found,) = rig.look_up(e, *range(12))
    assert found.chunks == 8


def test_windows_of_a_shorter_hit_are_loaded_if_all_does_not_fit() -> None:
    """What does not fit at the end of a prompt moves the window that a hit needs."""
    groups = RankLayout(
        (
            GroupLayout("full", 16, ("a",), (PAGE,)),
            GroupLayout("sliding_window", 16, ("b",), (PAGE,), window_tokens=17),
        )
    )
    rig = TierRig(pages=32, extent=1, core={"retain_promoted": True})
    e = rig.ready(layout=groups)
    for start in range(0, 12, 2):
        rig.only_in_tiers(e, start, start + 1, groups=3)
    small = TierRig(pages=16, extent=1)
    small.shelves, small.notes = rig.shelves, rig.notes
    e = small.ready(layout=groups)
    (found,) = small.look_up(e, *range(12))
    assert found.chunks == 7
    assert [len(slots) for slots in found.slots] == [7, 1]


def measured(weigh: bool) -> tuple[TierRig, Engine]:
    """A tier that loads 4 KiB in 50 ms has ``a`` and ``b``."""
    rig = TierRig(core={"weigh_loads": weigh})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a")
    rig.answer_all(TierProbe)
    rig.now += 0.05
    rig.answer_all()
    rig.wait(LEASE_S)
    rig.forget_l1()
    return rig, e


@pytest.mark.parametrize("weigh", [True, False])
def test_what_is_sooner_computed_is_not_loaded(weigh: bool) -> None:
    rig, e = measured(weigh)
    found = rig.look_up(e, "a", "b", prefill_tokens_s=1_000_000.0)[0]
    assert (found.chunks, rig.count("promotions_not_worth_it")) == ((0, 1) if weigh else (2, 0))
    assert rig.look_up(e, "a", "b", prefill_tokens_s=100.0)[0].chunks == 2


@pytest.mark.parametrize("speed", [float("inf"), float("nan"), -1.0, 1e300])
def test_no_speed_that_an_engine_tells_breaks_anything(speed: float) -> None:
    rig, e = measured(weigh=True)
    assert rig.look_up(e, "a", "b", prefill_tokens_s=speed)[0].chunks in (0, 2)
