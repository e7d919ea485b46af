"""How fast an engine computes prompts, which says how long a lookup may wait for tiers."""

from __future__ import annotations

from collections import deque
from typing import Final

MIN_SAMPLE_TOKENS: Final = 512
"""Steps that compute fewer tokens are not used for the estimate."""
SAMPLES: Final = 16
"""How many of the last measurements the estimate uses."""


class PrefillSpeed:
    """An estimate of how many tokens the engine computes per second. It is measured from the times
    at which steps are planned.

    The estimate errs on the high side. If it were too low, a request would wait for loads that
    take longer than computing. The duration of a step is the longer of the two intervals that
    follow it, because with asynchronous scheduling the next step is planned at once. Idle time
    makes a sample too slow, so the estimate is the fastest of the last ``SAMPLES`` samples.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=3)
        self._samples: deque[float] = deque([0.0], maxlen=SAMPLES)

    @property
    def tokens_s(self) -> float:
        """Tokens per second; 0: unknown."""
        return max(self._samples)

    def step(self, tokens: int, now_s: float) -> None:
        """A step of ``tokens`` is planned at ``now_s`` (CLOCK_MONOTONIC)."""
        self._steps.append((now_s, tokens))
        if len(self._steps) == 3:
            (first, computed), (second, _), (third, _) = self._steps
            took_s = max(second - first, third - second)
            if computed >= MIN_SAMPLE_TOKENS and took_s > 0:
                self._samples.append(computed / took_s)
