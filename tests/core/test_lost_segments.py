"""The segment index forgets chunks that neither L1 nor a tier has."""

from __future__ import annotations

from kvass.core.effects import TierReport
from tests.core.rig import digests
from tests.core.test_segments import evicted, found


def test_a_chunk_that_no_tier_has_any_more_is_found_no_more() -> None:
    rig, engine = evicted()
    rig.shelves[0].clear()
    assert found(engine, "old") == digests("old")
    assert rig.look_up(engine, "old")[-1].chunks == 0
    assert found(engine, "old") == b""


def test_a_tier_that_is_down_takes_no_entry_along() -> None:
    rig, engine = evicted()
    rig.step(TierReport(0, {"up": False}))
    rig.down = True
    rig.look_up(engine, "old")
    assert found(engine, "old") == digests("old")
