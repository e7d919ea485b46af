"""Probing: which tier is asked for which chunks of a prompt, and when."""

from __future__ import annotations

import pytest

from kvass.core.effects import (
    TierLoad,
    TierProbe,
)
from tests.core.tier_rig import TierRig


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


def test_only_what_l1_lacks_is_asked_for_and_loaded(rig: TierRig) -> None:
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    e.store("a")
    rig.answer_all()
    rig.begin(e, "a", "b", "c")
    (probe,) = rig.open_ops(TierProbe)
    assert [len(batch.keys) for batch in probe.batches] == [2]
    rig.answer(probe)
    (load,) = rig.open_ops(TierLoad)
    assert len(load.records.keys) == 2
    rig.answer_all()
    assert rig.replies(e.scheduler)[0].chunks == 3


def test_tiers_are_asked_in_order_for_what_those_before_have_not() -> None:
    rig = TierRig(tiers=2)
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    rig.shelves[0] = {one for one in rig.shelves[0] if one[3].startswith(b"a")}
    rig.begin(e, "a", "b", "c")
    (probe,) = rig.open_ops(TierProbe)
    assert (probe.tier, len(probe.batches[0].keys)) == (0, 3)
    rig.answer(probe)
    (probe,) = rig.open_ops(TierProbe)
    assert (probe.tier, len(probe.batches[0].keys)) == (1, 2)
    rig.answer(probe)
    assert sorted((load.tier, len(load.records.keys)) for load in rig.open_ops(TierLoad)) == [
        (0, 1),
        (1, 2),
    ]
    rig.answer_all()
    assert rig.replies(e.scheduler)[0].chunks == 3
    assert len(rig.shelves[0]) == 3  # the first one has been given what it lacked


def test_a_long_prompt_nobody_knows_costs_a_short_probe(rig: TierRig) -> None:
    e = rig.ready()
    rig.begin(e, *range(500))
    (probe,) = rig.open_ops(TierProbe)
    assert len(probe.batches[0].keys) == 16
    rig.answer(probe)
    assert not rig.asked
    assert [r.chunks for r in rig.replies(e.scheduler)] == [0]


def test_a_long_prompt_is_probed_in_few_steps() -> None:
    rig = TierRig(pages=2048, tiers=2)
    e = rig.ready()
    rig.only_in_tiers(e, *range(500))
    rig.begin(e, *range(500))
    sizes = []
    while probes := rig.open_ops(TierProbe):
        sizes.append((probes[0].tier, len(probes[0].batches[0].keys)))
        rig.answer(probes[0])
    assert sizes == [(0, 16), (0, 48), (0, 192), (0, 244)]
    rig.answer_all()
    assert rig.replies(e.scheduler)[0].chunks == 500


def test_what_leaves_while_the_tiers_are_asked_for_the_rest_is_asked_for_too() -> None:
    """A lookup pins nothing while tiers are probed, and L1 may not keep what others promoted."""
    rig = TierRig(core={"retain_promoted": False})
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b", "c")
    (first,) = rig.look_up(e, "a", "b")
    e.hand_over(leases=(first.lease,))
    rig.begin(e, "a", "b", "c", "d")
    (probe,) = rig.open_ops(TierProbe)
    assert [len(batch.keys) for batch in probe.batches] == [2]
    e.release(first.lease)
    assert rig.status["rows"] == 0
    rig.answer(probe)
    (again,) = rig.open_ops(TierProbe)
    assert [len(batch.keys) for batch in again.batches] == [3], "the one that is in none, too"
    rig.answer_all()
    assert [r.chunks for r in rig.replies(e.scheduler)] == [3]
