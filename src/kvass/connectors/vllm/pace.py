"""How many tokens the engine computes per second, as its scheduler sees it.

Law of this file: it errs on the fast side, where the worst is that something is computed which
could have been loaded. What a step took is the longer one of the two intervals that follow it: with
asynchronous scheduling the next step is planned at once and the one after it waits. Idle time only
makes a sample slow, so of the last samples the fastest counts.
"""

from __future__ import annotations

from collections import deque
from typing import Final

ENOUGH_TOKENS: Final = 512
"""Steps of fewer tokens say nothing about prefill."""
SAMPLES: Final = 16


class Pace:
    """Tell it of every step; ``tokens_s`` is the engine's speed, 0 as long as it is not known."""

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
        """Tokens per second; 0: not known."""
        return max(self._samples, default=0.0)
