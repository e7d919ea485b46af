"""Follow-ups: those of one kind are taken at once, and the kinds in the order that is given."""

from __future__ import annotations

import numpy as np

from kvass.core.effects import TierStore
from kvass.core.rows.row_table import ClassRows
from tests.core.tier_rig import TierRig

PART = ClassRows(0, np.arange(2))


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
