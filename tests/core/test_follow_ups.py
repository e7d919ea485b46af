"""Follow-ups: each kind is done after those before it in the table of ``CacheMachine``."""

from __future__ import annotations

from kvass.core.effects import TierStore
from tests.core.tier_rig import TierRig


def test_rows_are_queued_for_tiers_before_lookups_that_waited_for_them_are_answered() -> None:
    rig = TierRig()
    e = rig.ready()
    grant = e.begin("a", "b")
    rig.begin(e, "a", "b", writing=True)
    e.commit(grant.reservation)
    assert [type(each).__name__ for each in rig.last] == ["TierStore", "Send"]
    assert len(rig.open_ops(TierStore)) == 1
    (matched,) = rig.replies(e.scheduler)
    assert matched.chunks == 2
