"""A promotion's state: which transitions there are, and what wakes it."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from kvass.core.matching.prefix import Hit
from kvass.core.pending.ledger import Reservation
from kvass.core.pending.promotion import TRANSITIONS, Promotion, PromotionState
from kvass.core.rows.row_table import ClassRows
from kvass.types import SCHEDULER
from tests.core.rig import Engine
from tests.core.tier_rig import TierRig


@pytest.fixture
def rig() -> TierRig:
    return TierRig()


@pytest.fixture
def promotion(rig: TierRig) -> Promotion:
    """One of a lookup whose tier was asked which rows it has."""
    rig.begin(rig.ready(), "a")
    return only(rig)


def only(rig: TierRig) -> Promotion:
    (promotion,) = rig.machine.state.promotions.all.values()
    return promotion


def reservation(number: int) -> Reservation:
    return Reservation(
        id=number, instance="e", request="r", deadline=1.0, parts=(), owing={SCHEDULER}
    )


@pytest.mark.parametrize(("before", "after"), product(PromotionState, PromotionState))
def test_only_transitions_of_the_table_are_made(
    promotion: Promotion, before: PromotionState, after: PromotionState
) -> None:
    promotion.state = before
    if after in TRANSITIONS[before]:
        promotion.move(after)
        assert promotion.state is after
    else:
        with pytest.raises(AssertionError):
            promotion.move(after)
        assert promotion.state is before


def test_no_state_is_entered_before_new_or_left_after_ended() -> None:
    assert set(TRANSITIONS) == set(PromotionState)
    assert not TRANSITIONS[PromotionState.ENDED]
    assert not any(PromotionState.NEW in after for after in TRANSITIONS.values())


def test_the_states_of_a_lookup_that_waits_for_all(rig: TierRig) -> None:
    """It waits for a writer, then for the tiers' epochs, for a probe and for a load."""
    writer = rig.ready("w")
    rig.only_in_tiers(writer, "a", "b")
    grant = writer.begin("a", "b")
    states = []
    rig.begin(writer, "a", "b", writing=True, budget_ms=5000.0)
    promotion = only(rig)
    states.append(promotion.state)
    ns = promotion.namespace
    ns.tier_epochs[0], ns.asked_s[0] = None, -np.inf
    writer.abort(grant.reservation, rank=0)
    states.append(promotion.state)
    while rig.asked:
        rig.answer(rig.asked[0])
        states.append(promotion.state)
    assert states == [
        PromotionState.AWAITING_WRITERS,
        PromotionState.AWAITING_EPOCH,
        PromotionState.PROBING,
        PromotionState.LOADING,
        PromotionState.ENDED,
    ]
    assert [r.chunks for r in rig.replies(writer.scheduler)] == [2]


@pytest.mark.parametrize("state", PromotionState)
def test_the_simulator_sees_a_promotion_in_a_wrong_state(
    rig: TierRig, promotion: Promotion, state: PromotionState
) -> None:
    """Control of ``invariants.validate``, which runs after every event of the simulator."""
    assert promotion.state is PromotionState.PROBING
    promotion.state = state
    if state is PromotionState.PROBING:
        rig.machine.validate()
    else:
        with pytest.raises(AssertionError):
            rig.machine.validate()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("writers", {7}, "writers"),
        ("hit", Hit(1, 0, (ClassRows(0, np.array([0])),), ()), "pins"),
    ],
)
def test_the_simulator_sees_what_does_not_belong_to_a_state(
    rig: TierRig, promotion: Promotion, field: str, value: Any, says: str
) -> None:
    setattr(promotion, field, value)
    with pytest.raises(AssertionError, match=says):
        rig.machine.validate()


def test_writers_that_are_not_awaited_any_more_forget_the_promotion(promotion: Promotion) -> None:
    reservations = {number: reservation(number) for number in (1, 2, 3)}
    promotion.await_writers({1, 2}, reservations)
    del reservations[1]  # it ended
    promotion.await_writers({2, 3}, reservations)
    assert [r.waiters for r in reservations.values()] == [{promotion.id}, {promotion.id}]
    promotion.await_writers(set(), reservations)
    assert [r.waiters for r in reservations.values()] == [set(), set()]


@pytest.mark.parametrize("why", ["asker left", "cleared"])
def test_a_promotion_is_void_when_its_answer_is_of_no_use(promotion: Promotion, why: str) -> None:
    assert not promotion.void
    if why == "asker left":
        promotion.asker_gone = True
    else:
        promotion.namespace.epoch += 1
    assert promotion.void


def test_a_view_of_a_part_of_the_prompt_ends_with_that_part(rig: TierRig) -> None:
    e: Engine = rig.ready()
    rig.only_in_tiers(e, "a", "b")
    rig.begin(e, "a", "b")
    view = only(rig).view(rig.machine.state.rows, 1)
    assert [len(rows) for rows in view.found] == [1]
