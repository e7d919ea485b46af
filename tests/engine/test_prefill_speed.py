"""How fast an engine computes, from when its steps are planned."""

from __future__ import annotations

import pytest

from kvass.engine.prefill_speed import SAMPLES, PrefillSpeed


def paced(*steps: tuple[int, float]) -> float:
    """The speed after steps of (tokens, seconds until the next is planned)."""
    speed, now = PrefillSpeed(), 100.0
    for tokens, seconds in steps:
        speed.step(tokens, now)
        now += seconds
    return speed.tokens_s


def test_nothing_is_known_of_an_engine_that_only_decodes() -> None:
    assert paced(*[(64, 0.01)] * 50) == 0


def test_a_prefill_in_steps_of_its_own() -> None:
    assert paced((4096, 0.5), (1, 0.01), (1, 0.01)) == pytest.approx(8192)
    assert paced(*[(4096, 0.5)] * 5) == pytest.approx(8192)


def test_a_step_planned_while_another_runs_does_not_make_it_fast() -> None:
    """Asynchronous scheduling: the next step is planned at once, the one after it waits."""
    assert paced((4096, 0.001), (1, 0.5), (1, 0.01)) == pytest.approx(8192)


def test_idle_time_does_not_make_an_engine_slow() -> None:
    assert paced((4096, 0.5), (1, 0.01), (4096, 0.5), (1, 60.0), (1, 0.01)) == pytest.approx(8192)


def test_an_engine_that_has_become_slow_is_believed_in_the_end() -> None:
    fast, slow = [(4096, 0.5)] * 3, [(4096, 1.0)] * (SAMPLES + 3)
    assert paced(*fast, *slow) == pytest.approx(4096)
