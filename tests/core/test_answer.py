"""The answer of a promotion: what could not be loaded makes it shorter."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import (
    TierLoad,
    TierProbe,
)
from tests.core.rig import WIDTH, digests
from tests.core.tier_rig import TierRig


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


def test_a_row_that_failed_shrinks_every_match_that_waits_for_it(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    for _ in range(2):
        message = m.Lookup(seq=7, request="r", digests=digests("a", "b", "c"), width=WIDTH)
        rig.say(e.scheduler, message)
    rig.answer_all(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    rig.answer(load, True, False, True)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1, 1]
    e.quit()
    assert rig.quiet()
    assert rig.status["rows"] == 2  # the third is there, and of no use yet


def test_a_spare_chunk_that_failed_shrinks_the_match_too(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    rig.begin(e, "a", "b", "c", spare=1)
    rig.answer_all(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    rig.answer(load, True, True, False)
    assert [r.chunks for r in rig.replies(e.scheduler)] == [1]
    e.quit()
    assert rig.quiet()


def test_a_rank_that_left_meanwhile_makes_it_a_miss(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.begin(e, "a")
    rig.answer_all(TierProbe)
    rig.lose(e.workers[0])
    rig.answer_all()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]
    assert rig.quiet()


@pytest.mark.parametrize("end", ["late", "failed"])
def test_what_is_not_retained_is_there_for_a_shorter_match_too(end: str) -> None:
    rig = TierRig(core={"retain_promoted": False})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.answer_all(TierProbe)
    rig.begin(e, "a", "b", "c")
    rig.answer_all(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    if end == "failed":
        rig.answer(load, True, False)
        assert [r.chunks for r in rig.replies(e.scheduler)] == [1, 1]
    else:
        rig.answer(load)
        assert [r.chunks for r in rig.replies(e.scheduler)] == [2, 2]
    e.quit()
    assert rig.gauge("rows", "pins") == (0, 0)
