"""How long an engine's steps take, from when they are planned and when they end."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvass.engine.step_times import OPEN, SAMPLES, StepTimes


def timed(*events: tuple[float, int | None]) -> StepTimes:
    """The times after events of (seconds, tokens of the step that is planned; None: one ends)."""
    now = iter([second for second, _ in events])
    times = StepTimes(lambda: next(now))
    for _, tokens in events:
        if tokens is None:
            times.ended()
        else:
            times.planned(tokens, {"r"} if tokens else set())
    return times


def paced(*steps: tuple[int, float]) -> StepTimes:
    """The times after steps of (tokens, seconds), each planned at the end of the one before."""

    def events() -> Iterable[tuple[float, int | None]]:
        now = 100.0
        for tokens, seconds in steps:
            yield now, tokens
            now += seconds
            yield now, None

    return timed(*events())


def line(tokens: int) -> tuple[int, float]:
    """A step of an engine whose time is a line over its tokens."""
    return tokens, 0.004 + tokens / 20_000


def test_nothing_is_known_of_an_engine_that_has_computed_nothing() -> None:
    times = paced((0, 1.0))
    assert (times.tokens_s, times.seconds(64)) == (0, 0)


def test_the_speed_is_that_of_large_steps() -> None:
    assert paced(*[(64, 0.01)] * 50).tokens_s == 0
    assert paced((4096, 0.5), (1, 0.01)).tokens_s == pytest.approx(8192)


def test_asynchronous_scheduling_plans_a_step_while_another_runs() -> None:
    times = timed((100.0, 512), (100.001, 1), (100.064, None), (100.065, 1), (100.068, None))
    assert times.seconds(512) == pytest.approx(0.064)
    assert times.seconds(1) == pytest.approx(0.004)


def test_idle_time_belongs_to_no_step() -> None:
    times = timed((100.0, 512), (100.064, None), (100.07, 0), (170.0, None), (200.0, 512))
    times.clock = lambda: 200.064
    times.ended()
    assert times.seconds(512) == pytest.approx(0.064)
    assert times.names == {"r"}, "of the last step that computed"


def test_steps_of_other_sizes_lie_between_those_that_were_made() -> None:
    times = paced(*map(line, [1, 3, 100, 1000]))
    for tokens in (1, 2, 50, 100, 600, 1000):
        assert times.seconds(tokens) == pytest.approx(line(tokens)[1])
    assert times.seconds(4000) == pytest.approx(4 * line(1000)[1]), "several steps"
    assert paced(line(24), line(100)).seconds(3) == pytest.approx(line(24)[1])


def test_a_step_that_took_long_by_chance_does_not_count() -> None:
    """Neither the first one of its size, if larger ones are known, nor some among many."""
    steps = [line(1), (40, 2.0), line(100), *[line(1000), (1000, 3.0)] * 4]
    times = paced(*steps)
    assert times.seconds(40) == pytest.approx(line(100)[1])
    assert times.seconds(1000) == pytest.approx(line(1000)[1])


def test_a_step_whose_predecessor_was_seen_late_does_not_make_the_engine_fast() -> None:
    """The process stood still while two steps ran: the second one seems to take nothing. And then
    no large step comes for a long time."""
    steps = [(2048, 0.1)] * 4
    assert paced(*steps, (2048, 0.6), (2048, 1e-5), *[(1, 0.01)] * 99).tokens_s == pytest.approx(
        20_480
    )


def test_the_speed_is_that_of_the_last_large_steps_whatever_size_they_had() -> None:
    """Neither a size that came once nor steps that decode count for long."""
    late = [(4096, 0.4)] * 9 + [(600, 1e-3)] + [(4096, 0.4)] * SAMPLES
    assert paced(*late).tokens_s == pytest.approx(10_240)
    slower = [(700, 0.035)] * 4 + [(8192, 2.0)] * SAMPLES
    assert paced(*slower).tokens_s == pytest.approx(4096)
    decoding = [(1024, 0.05)] * SAMPLES + [(256, 0.06)] * SAMPLES
    assert paced(*decoding).tokens_s == pytest.approx(20_480)


def test_an_engine_that_has_become_slow_is_believed_in_the_end() -> None:
    times = paced(*[(4096, 0.5)] * 3, *[(4096, 1.0)] * SAMPLES)
    assert times.tokens_s == pytest.approx(4096)
    assert times.seconds(4096) == pytest.approx(1.0)


@pytest.mark.parametrize("younger", [SAMPLES - 1, SAMPLES])
def test_large_steps_of_a_time_when_the_engine_was_faster_do_not_count(younger: int) -> None:
    """After many small ones that are slower, a large one that was not made since is unknown."""
    before = [(1, 0.004), (256, 0.01), *[(1024, 0.02), (2048, 0.03)] * SAMPLES]
    times = paced(*before, *[(1, 0.05), (256, 0.1)] * younger)
    if younger < SAMPLES:
        assert times.seconds(256) == pytest.approx(0.02), "that of the larger ones"
    else:
        assert times.seconds(1) == pytest.approx(0.05)
        assert times.seconds(256) == pytest.approx(0.1)
        assert times.seconds(2048) == pytest.approx(0.8)


def test_a_step_that_loads_something_says_nothing_of_its_tokens() -> None:
    times = timed((100.0, 64), (100.01, None), (100.01, 64), (100.02, None))
    times.clock = lambda: 100.02
    times.planned(64, {"other"}, loads=1)
    times.clock = lambda: 101.0
    times.ended()
    assert times.seconds(64) == pytest.approx(0.01)
    assert times.names == {"other"}


def test_an_engine_that_does_not_tell_when_steps_end_costs_bounded_memory() -> None:
    assert len(timed(*[(float(now), 1) for now in range(3 * OPEN)])._open) <= OPEN
