"""How many tokens the engine computes per second, measured from when its steps are planned.

The estimate is high rather than low: too high, the engine computes tokens that it could have
loaded; too low, it would wait for loads that take longer than computing. A step's time is the
longer one of the two intervals after it, because with asynchronous scheduling the next step is
planned at once and the one after it waits. Idle time only makes a sample slower, so the fastest of
the last samples counts.
"""

from __future__ import annotations

from collections import deque
from typing import Final

ENOUGH_TOKENS: Final = 512
"""Steps of fewer tokens say nothing about prefill."""
SAMPLES: Final = 16


class PrefillSpeed:
    """Tell it of every step; ``tokens_s`` is the engine's speed, 0 while it is unknown."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=3)
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def step(self, tokens: int, now_s: float) -> None:
        """A step of ``tokens`` is planned at ``now_s`` (CLOCK_MONOTONIC)."""
        self._steps.append((now_s, tokens))
        if len(self._steps) == 3:
            (first, computed), (second, _), (third, _) = self._steps
            took_s = max(second - first, third - second)
            if computed >= ENOUGH_TOKENS and took_s > 0:
                self._samples.append(computed / took_s)

    @property
    def tokens_s(self) -> float:
        """Tokens per second; 0: unknown."""
        return max(self._samples, default=0.0)
