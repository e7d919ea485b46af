"""Flushing: rows are pinned while a tier stores them, and a tier that is down gets them later."""

from __future__ import annotations

from typing import Any

import pytest

from kvass.core.effects import (
    TierStore,
)
from kvass.core.tiers import epochs
from tests.core.tier_rig import TierRig


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


def test_what_waits_for_a_dead_tiers_epoch_costs_little(rig: TierRig) -> None:
    """However much is queued, a step looks at a little; all of it goes once the tier tells."""
    big = TierRig(pages=4096)
    e = big.engine()
    for i in range(250):
        e.store(i)
    looked = 0
    usable = epochs.usable

    def counted(*args: Any) -> list[int]:
        nonlocal looked
        looked += 1
        return usable(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs, "usable", counted)
        e.store("one more")
    assert looked < 50
    big.answer_all()
    assert len(big.shelves[0]) == 251


def test_the_queue_of_a_dead_tier_stays_in_proportion_to_l1() -> None:
    """Rows that left L1 leave the queue, a few at a time; what is still there is flushed later."""
    rig = TierRig(pages=256, extent=4, instance_write_share=1.0)
    e = rig.ready()
    rig.down = True
    for first in range(0, 3_000, 10):
        e.store(*range(first, first + 10))
        rig.answer_all(TierStore)
        assert rig.status["tiers"][0]["flush_queue_rows"] <= 3 * 256 + 256
    rig.down = False
    rig.wait(300)
    rig.answer_all()
    assert len(rig.shelves[0]) == 256
