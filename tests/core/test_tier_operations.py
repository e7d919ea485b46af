"""Operations of tiers: each ends once, as the kind that was begun (law 3)."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.effects import Loaded, Probed, TierLoad, TierProbe
from kvass.core.pending.tier_operations import Emptying, Loading, Probing
from kvass.core.pending.tier_state import Tiers
from tests.core.tier_rig import TierRig


def test_an_operation_ends_once() -> None:
    tiers = Tiers(["disk"], b"boot")
    probing = Probing(tier=0, promotion=1, wanted=[])
    number = tiers.begin(probing)
    assert tiers.end(number, Probing) is probing
    with pytest.raises(KeyError):
        tiers.end(number, Probing)


def test_an_operation_ends_as_the_kind_that_it_is() -> None:
    tiers = Tiers(["disk"], b"boot")
    number = tiers.begin(Probing(tier=0, promotion=1, wanted=[]))
    with pytest.raises(AssertionError, match="another kind"):
        tiers.end(number, Emptying)


def test_no_number_is_given_twice() -> None:
    tiers = Tiers(["disk"], b"boot")
    probing = Probing(tier=0, promotion=1, wanted=[])
    numbers = []
    for _ in range(3):
        numbers.append(tiers.begin(probing))
        tiers.end(numbers[-1], Probing)
    assert len(set(numbers)) == 3


def test_a_load_names_the_rows_that_the_tier_may_write() -> None:
    """From the step that asks the tier for them to the step in which it is done."""
    rig = TierRig()
    e = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    (probe,) = rig.open_ops(TierProbe)
    rig.step(Probed(probe.op, np.array([True, True])))
    (load,) = rig.open_ops(TierLoad)
    operation = rig.machine.state.tiers.ops[load.op]
    assert isinstance(operation, Loading)
    assert len(operation.part.rows) == rig.status["rows_loading"] == 2
    rig.step(Loaded(load.op, np.array([True, True])))
    assert not rig.machine.state.tiers.ops
