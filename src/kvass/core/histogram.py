"""Histograms of durations."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

import msgspec

BOUNDS: Final = tuple(n * 10.0**e for e in range(-5, 4) for n in (1, 2, 5))
"""Seconds: 10 us to 5,000 s, three a decade."""


class Histogram(msgspec.Struct):
    """A histogram of seconds. ``counts[i]``: how many values are at most ``BOUNDS[i]`` and above
    the bound before; the last count is of all values above. ``sum``: the sum of all values."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    sum: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, value)] += times
        self.sum += value * times

    def fields(self) -> dict[str, Any]:
        """The histogram as a JSON-able dictionary."""
        return {"counts": list(self.counts), "sum": self.sum}
