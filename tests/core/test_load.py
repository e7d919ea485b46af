"""Loads: lookups share them, and their rows belong to whoever is left to use them."""

from __future__ import annotations

import pytest

from kvass import messages as m
from kvass.core.effects import (
    TierLoad,
    TierProbe,
)
from tests.core.rig import WIDTH, digests
from tests.core.tier_rig import TierRig, prefetch


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


def test_concurrent_lookups_share_one_load(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    for _ in range(32):
        message = m.Lookup(seq=7, request="r", digests=digests("a", "b"), width=WIDTH)
        rig.say(e.scheduler, message)
    rig.answer_all(TierProbe)
    assert len(rig.open_ops(TierLoad)) == 1
    rig.answer_all()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [2] * 32
    assert rig.gauge("leases", "pins") == (32, 64)
    e.quit()
    assert rig.quiet()


def test_rows_that_are_not_retained_leave_at_the_last_release() -> None:
    rig = TierRig(core={"retain_promoted": False})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.begin(e, "a", "b")
    rig.answer_all()
    rig.begin(e, "a", "b")  # while they are read, they match
    one, two = list(rig.machine.state.leases.all)[:2]
    (three,) = rig.replies(e.scheduler)
    for lease in (one, two):
        e.give_back(lease)
        assert rig.status["rows"] == 2
    e.give_back(three.lease)
    assert rig.gauge("rows", "pins") == (0, 0)


def test_what_was_prefetched_stays_for_its_first_reader() -> None:
    rig = TierRig(core={"retain_promoted": False})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.say(rig.open(), prefetch(e, "a", "b"))
    rig.answer_all()
    assert rig.gauge("rows", "pins") == (2, 0)
    (found,) = rig.look_up(e, "a", "b")
    e.give_back(found.lease)
    assert rig.gauge("rows", "pins") == (0, 0)


def test_what_is_loaded_for_a_namespace_that_was_cleared_and_forgotten_is_nobodys() -> None:
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a")
    rig.begin(e, "a")
    rig.answer_all(TierProbe)
    (load,) = rig.open_ops(TierLoad)
    rig.say(e.scheduler, m.Clear(seq=11))
    e.quit()
    rig.engine("other", chunk_tokens=32)
    rig.answer(load, True)
    rig.wait(0)
    assert rig.gauge("rows", "rows_loading", "l1_used_bytes") == (0, 0, 0)
