"""The state of tiers: their order, and how fast each loads."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.pending.tier_state import Queued, Speed, Tiers
from kvass.worth import worth_loading


def test_a_slow_tier_is_tried_again_and_its_speed_stays_a_number() -> None:
    speed = Speed(bytes_s=1.0)
    for _ in range(10_000):
        speed.refused()
    assert speed.bytes_s == 1.0
    assert 0 < speed.seconds(1) < 1e-6


@pytest.mark.parametrize("faster", [1.0, 30.0])
def test_a_trial_shows_whether_a_tier_is_still_slow(faster: float) -> None:
    """It loads 1 MB in a second, and computing that takes 50 ms."""
    speed, loads, now = Speed(bytes_s=1e6), 0, 0.0
    for _ in range(630):
        if worth_loading(speed.seconds(1_000_000), 0.05):
            loads += 1
            speed.trial = speed.easier > 1.0
            speed.begin(1_000_000, now)
            now += 1.0 / faster
            speed.end(1_000_000, 1_000_000, now)
        else:
            speed.refused()
    assert loads == (630 // 63 if faster == 1.0 else 630 - 62), "each time after 62 refusals"
    assert speed.bytes_s == pytest.approx(faster * 1e6), "it is what was measured"


def test_a_speed_is_measured_over_the_time_in_which_a_tier_loads() -> None:
    speed = Speed()
    assert speed.seconds(100) == 0, "nothing is known"
    speed.begin(100, now=10.0)
    speed.begin(100, now=10.0)
    speed.end(100, good=100, now=12.0)
    speed.end(100, good=0, now=13.0)
    assert speed.bytes_s == 50.0, "the second load brought nothing"
    assert speed.seconds(100) == 2.0
    speed.begin(100, now=50.0)
    assert speed.seconds(100) == 4.0, "what is loading comes first"


def test_tiers_are_numbered_once_and_used_in_their_new_order() -> None:
    tiers = Tiers(["a", "b"], b"boot")
    tiers.use([2, 0], ["c", "a"])
    assert [tier.name for tier in tiers.all] == ["a", "b", "c"]
    assert [tier.name for tier in tiers.used] == ["c", "a"]
    assert [tier.place for tier in tiers.all] == [2, 0, 1]
    with pytest.raises(AssertionError, match="another tier"):
        tiers.use([1], ["c"])


def test_fresh_epochs_differ_between_calls_namespaces_and_boots() -> None:
    one, other = Tiers([], b"boot one"), Tiers([], b"boot two")
    epochs = [one.fresh_epoch(b"n"), one.fresh_epoch(b"n"), other.fresh_epoch(b"n")]
    epochs.append(Tiers([], b"boot one").fresh_epoch(b"m"))
    assert len(set(epochs)) == 4


def test_a_tier_that_rests_is_due_only_if_something_is_queued_for_it() -> None:
    tiers = Tiers(["a", "b"], b"boot")
    tiers.all[0].rests_until, tiers.all[1].rests_until = 5.0, 7.0
    assert tiers.next_due is None
    none = np.empty(0, np.int64)
    tiers.all[1].queue.append(Queued(0.0, 1, none, np.empty((0, 4), np.uint64)))
    assert tiers.next_due == 7.0
