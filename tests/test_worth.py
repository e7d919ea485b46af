"""The rule that decides whether cached KV is loaded or computed."""

from __future__ import annotations

import math

import pytest

from kvass.core.pending.tier_state import Speed
from kvass.worth import EASIER, UNKNOWN_S, compute_s, worth_loading


def test_a_load_that_takes_no_longer_than_computing_is_worth_it() -> None:
    assert worth_loading(0.5, 1.0)
    assert worth_loading(1.0, 1.0), "it delays nobody else"
    assert not worth_loading(1.001, 1.0)


def test_what_is_not_known_prevents_no_load() -> None:
    assert compute_s(1000, 0.0) == UNKNOWN_S
    assert worth_loading(1e9, compute_s(1000, 0.0))
    assert worth_loading(Speed().seconds(1 << 40), compute_s(1000, 1e9))
    assert compute_s(1000, 4000.0) == 0.25


@pytest.mark.parametrize(("times", "refusals"), [(1.5, 9), (20.0, 62)])
def test_a_tier_that_seems_too_slow_is_tried_again(times: float, refusals: int) -> None:
    speed, refused = Speed(bytes_s=1e6), 0
    while not worth_loading(speed.seconds(1_000_000), 1.0 / times):
        speed.refused()
        refused += 1
    assert refused == refusals == math.ceil(math.log(times) / math.log(EASIER))
