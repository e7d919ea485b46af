"""How fast the ranks copy, as the scheduler knows it."""

from __future__ import annotations

import pytest

from kvass.engine.copy_speed import SAMPLES, SMALL_BYTES, Copied, CopySpeed

MIB = 1 << 20
SMALL = SMALL_BYTES - 1
BLOCK = 4096


def reported(*rates: float, size: int = MIB, speed: CopySpeed | None = None) -> CopySpeed:
    """The speed of one rank after loads of ``size`` bytes at these rates."""
    speed = speed or CopySpeed(1)
    for rate in rates:
        speed.reported({0: Copied(size, size / rate, (BLOCK,))})
    return speed


def rate(speed: CopySpeed, size: int = MIB) -> float:
    """Bytes per second of a load of ``size`` bytes."""
    blocks = size // BLOCK
    seconds = speed.seconds([blocks])
    assert seconds
    return blocks * BLOCK / seconds


def test_nothing_is_known_before_every_rank_has_copied() -> None:
    speed = CopySpeed(2)
    assert (speed.known, speed.seconds([1]), speed.most(1.0)) == (False, None, 0)
    speed.reported({1: Copied(MIB, 0.001, (BLOCK,), True)})
    assert (speed.known, speed.seconds([1]), speed.verified) == (False, None, False)
    speed.reported({0: Copied(MIB, 0.001, (BLOCK,), True)})
    assert speed.known
    assert speed.verified


def test_the_slowest_rank_decides_and_so_does_what_it_copies() -> None:
    speed = CopySpeed(2)
    speed.reported({0: Copied(MIB, 0.001, (4096, 8192)), 1: Copied(MIB, 0.004, (8192, 0))})
    assert speed.seconds([10, 0]) == pytest.approx(10 * 8192 * 0.004 / MIB)
    assert speed.seconds([0, 10]) == pytest.approx(10 * 8192 * 0.001 / MIB)


def test_first_loads_are_verified_on_all_ranks_or_not_at_all() -> None:
    speed = CopySpeed(2)
    speed.reported({0: Copied(MIB, 0.001, (), True), 1: Copied(MIB, 0.001, (), False)})
    assert not speed.verified
    speed.reported({1: Copied(MIB, 0.001, (), True)})
    assert speed.verified


@pytest.mark.parametrize("size", [BLOCK, MIB])
def test_a_slow_load_counts_at_once_and_one_that_was_slow_by_chance_until_the_next(
    size: int,
) -> None:
    speed, found = CopySpeed(1), []
    for one in (*[1e9] * SAMPLES, 1e6, 1e9):
        reported(one, size=size, speed=speed)
        found.append((rate(speed, size), speed.doubtful))
    assert found[-3:] == [(pytest.approx(1e9), False), (pytest.approx(1e6), True), found[0]]


def test_one_fast_load_does_not_make_slow_ranks_fast() -> None:
    speed = reported(*[1e8] * SAMPLES, 1e9)
    assert rate(speed) == pytest.approx(1e8)
    assert rate(reported(*[1e9] * (SAMPLES // 2), speed=speed)) == pytest.approx(1e9)


def test_a_small_load_takes_a_time_that_hardly_depends_on_its_bytes() -> None:
    speed = reported(1e8, size=SMALL, speed=reported(1e9))
    assert speed.seconds([1]) == speed.seconds([SMALL // BLOCK]) == pytest.approx(SMALL / 1e8)
    assert speed.seconds([0]) == 0.0
    assert speed.seconds([256]) == pytest.approx(MIB / 1e9)


@pytest.mark.parametrize(("first", "then"), [(BLOCK, MIB), (MIB, BLOCK)])
def test_small_loads_and_larger_ones_say_nothing_of_each_other(first: int, then: int) -> None:
    """Small ones from a CPU's cache do not make larger ones fast, slow larger ones do not end loads
    of small hits, and neither ends what the other said."""
    speed = reported(*[1e8] * SAMPLES, size=first)
    assert rate(speed, then) == pytest.approx(1e8), "nothing else is known"
    for other in (1e7, 1e10):
        assert rate(reported(*[other] * SAMPLES, size=then, speed=speed), then) == pytest.approx(
            other
        )
        assert rate(speed, first) == pytest.approx(1e8)


def test_most_is_what_is_copied_in_that_time() -> None:
    speed = reported(1e9)
    assert speed.most(0.001) == 10**6 // BLOCK
    assert speed.most(1.5 * BLOCK / 1e9) == 1
    reported(1e6, size=BLOCK, speed=speed)
    assert speed.most(0.001) == 10**6 // BLOCK
    assert speed.most(1.5 * BLOCK / 1e9) == 0
    reported(1e8, 1e8, size=BLOCK, speed=speed)
    assert speed.most(1.5 * BLOCK / 1e8) == SMALL // BLOCK


def test_a_renewed_speed_is_that_of_the_last_load() -> None:
    speed = reported(1e9, size=BLOCK, speed=reported(*[1e6] * SAMPLES))
    speed.renew()
    assert rate(speed) == pytest.approx(1e9)
