"""What a namespace was asked for and gave, by where it was, in all and in the last minute."""

from __future__ import annotations

import random

from kvass.core.clients.traffic import Traffic
from kvass.messages import LookupResult


def test_the_last_minute_is_fifty_to_sixty_seconds_and_its_memory_bounded() -> None:
    draw, counts, now = random.Random(1), list[tuple[float, int]](), 0.0
    seen = Traffic()
    for _ in range(2000):
        now += draw.expovariate(0.5)
        n = draw.randrange(100)
        seen.count_lookup(now, LookupResult("r", n, n // 2), "absent")
        counts.append((now, n))
        least = sum(k for t, k in counts if t > now - 50)
        most = sum(k for t, k in counts if t > now - 60)
        assert least <= seen.last_minute(now)[0] <= most
        assert len(seen.slots) <= 7
    assert (
        seen.lookup_tokens
        == sum(k for _, k in counts)
        == seen.hit_tokens + seen.miss_tokens["absent"]
    )
    assert (seen.loads, seen.failed_loads) == (sum(k > 1 for _, k in counts), 0)
    assert seen.last_minute(now + 60) == [0, 0, 0, 0]
