"""When a backend may be asked, and when it is tried again."""

from __future__ import annotations

from kvass.daemon.tier_process.health import Health, HealthState

FIRST_S, LONGEST_S = 0.25, 30.0


def state_of(health: Health) -> HealthState:
    return health.state


def attempt(health: Health, ok: bool, now: float) -> None:
    """One request alone, begun and ended now."""
    begun = health.begin(now)
    assert begun is not None
    assert health.end(begun, ok, now)


def test_a_backend_that_is_up_is_asked_by_many_at_once() -> None:
    health = Health(FIRST_S, LONGEST_S)
    begun = [health.begin(0.0) for _ in range(3)]
    assert state_of(health) is HealthState.UP
    for number in begun:
        assert number is not None
        assert not health.end(number, True, 1.0), "nothing new"


def test_pauses_double_up_to_the_longest_and_begin_anew_when_it_was_steady() -> None:
    health = Health(FIRST_S, LONGEST_S)
    now = 0.0
    attempt(health, False, now)
    for pause in (0.25, 0.5, 1, 2, 4, 8, 16, 30, 30):
        assert (health.state, health.pause_s) == (HealthState.DOWN, pause)
        assert not health.accepts(now + pause - 0.01)
        now += pause
        assert health.accepts(now)
        begun = health.begin(now)
        assert begun is not None
        assert state_of(health) is HealthState.RETRYING
        assert health.begin(now) is None, "one at a time"
        assert health.end(begun, False, now)
    for up_for, pause in ((1, 30), (31, 0.25)):
        now += health.pause_s
        attempt(health, True, now)
        assert state_of(health) is HealthState.UP
        now += up_for
        attempt(health, False, now)
        assert health.pause_s == pause


def test_it_may_have_to_be_steady_for_longer_than_the_last_pause() -> None:
    health = Health(1.0, 60.0, steady_s=60.0, state=HealthState.RETRYING)
    now = 0.0
    for up_for, pause in ((59, 1), (59, 2), (60, 1)):
        health.succeeded(now)
        now += up_for
        health.failed(now)
        assert health.pause_s == pause
        assert [health.accepts(now + pause - part) for part in (0.1, 0)] == [False, True]
        health.retry()
        assert state_of(health) is HealthState.RETRYING


def test_requests_from_before_say_nothing_new() -> None:
    health = Health(FIRST_S, LONGEST_S)
    first, second, third = (health.begin(0.0) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert health.end(first, False, 0.0)
    assert not health.end(second, True, 0.1), "that it once served does not make it up"
    assert not health.end(third, False, 0.1), "that others failed too lengthens no pause"
    assert not health.accepts(FIRST_S - 0.01)
    assert health.accepts(FIRST_S)
