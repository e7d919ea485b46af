"""When rows were used, from their stamps: exact of late, and in bounded memory."""

from __future__ import annotations

import random

from kvass.core.rows.use_times import _MOST, STEP_S, UseTimes


def test_times_of_use_are_right_within_a_step_and_their_memory_is_bounded() -> None:
    draw, uses, now, given = random.Random(2), UseTimes(), 0.0, list[float]()
    for _ in range(20_000):
        now += draw.expovariate(0.5)
        uses.mark(len(given), now)
        given += [now] * draw.randrange(3)
    assert len(uses._stamps) <= _MOST
    for stamp in range(len(given) - 300, len(given)):
        assert 0 <= uses.age(stamp) - (now - given[stamp]) <= STEP_S
    for stamp in range(0, len(given), 100):
        assert uses.age(stamp) >= now - given[stamp] - 1e-6
