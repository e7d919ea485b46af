"""How fast the ranks copy, as the scheduler knows it."""

from __future__ import annotations

import pytest

from kvass.engine.copy_speed import SAMPLES, SMALL_BYTES, Copied, CopySpeed

MIB = 1 << 20


def reported(*rates: float, size: int = MIB, speed: CopySpeed | None = None) -> CopySpeed:
    """The speed of one rank after loads of ``size`` bytes at these rates."""
    speed = speed or CopySpeed(1)
    for rate in rates:
        speed.reported({0: Copied(size, size / rate)})
    return speed


def test_nothing_is_known_before_every_rank_has_copied() -> None:
    speed = CopySpeed(2)
    assert (speed.known, speed.bytes_s, speed.seconds([1])) == (False, 0.0, None)
    speed.reported({1: Copied(MIB, 0.001, (4096,), True)})
    assert (speed.known, speed.bytes_s, speed.verified) == (False, 0.0, False)
    speed.reported({0: Copied(MIB, 0.001, (4096,), True)})
    assert speed.known
    assert speed.verified


def test_the_slowest_rank_decides_and_so_does_what_it_copies() -> None:
    speed = CopySpeed(2)
    speed.reported({0: Copied(MIB, 0.001, (4096, 8192)), 1: Copied(MIB, 0.004, (8192, 0))})
    assert speed.bytes_s == pytest.approx(MIB / 0.004)
    assert speed.seconds([10, 0]) == pytest.approx(10 * 8192 * 0.004 / MIB)
    assert speed.seconds([0, 10]) == pytest.approx(10 * 8192 * 0.001 / MIB)


def test_first_loads_are_verified_on_all_ranks_or_not_at_all() -> None:
    speed = CopySpeed(2)
    speed.reported({0: Copied(MIB, 0.001, (), True), 1: Copied(MIB, 0.001, (), False)})
    assert not speed.verified
    speed.reported({1: Copied(MIB, 0.001, (), True)})
    assert speed.verified


def test_a_slow_load_counts_at_once_and_one_that_was_slow_by_chance_until_the_next() -> None:
    speed = reported(*[1e9] * SAMPLES)
    assert reported(1e8, speed=speed).bytes_s == pytest.approx(1e8)
    assert reported(1e9, speed=speed).bytes_s == pytest.approx(1e9)


def test_one_fast_load_does_not_make_slow_ranks_fast() -> None:
    speed = reported(*[1e8] * SAMPLES, 1e9)
    assert speed.bytes_s == pytest.approx(1e8)
    assert reported(*[1e9] * (SAMPLES // 2), speed=speed).bytes_s == pytest.approx(1e9)


def test_a_small_load_says_little_unless_it_took_long() -> None:
    small = SMALL_BYTES - 1
    speed = reported(1e8, size=small)
    assert speed.bytes_s == pytest.approx(1e8), "nothing else is known"
    assert reported(1e10, speed=speed).bytes_s == pytest.approx(1e10)
    assert reported(1e8, size=16 << 10, speed=speed).bytes_s == pytest.approx(1e10)
    assert reported(1e7, size=small, speed=speed).bytes_s == pytest.approx(1e7)


@pytest.mark.parametrize("size", [SMALL_BYTES - 1, MIB])
def test_a_small_load_ends_what_one_slow_load_before_it_said(size: int) -> None:
    speed = reported(1e8, size=size, speed=reported(1e9, 1e9, 1e9))
    assert speed.bytes_s == pytest.approx(1e8)
    assert reported(0.9e9, size=16 << 10, speed=speed).bytes_s == pytest.approx(1e9)
    assert reported(1e8, size=SMALL_BYTES - 1, speed=speed).bytes_s == pytest.approx(1e8)


def test_fast_small_loads_end_what_slow_large_ones_said() -> None:
    speed = reported(*[1e9] * SAMPLES, size=16 << 10, speed=reported(*[1e8] * SAMPLES))
    assert speed.bytes_s == pytest.approx(1e9)
