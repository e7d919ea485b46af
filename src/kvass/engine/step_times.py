"""How long an engine's steps take, by how many tokens they compute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Set
from statistics import median
from typing import Final

MIN_SAMPLE_TOKENS: Final = 512
"""Steps that compute fewer tokens are not used for ``StepTimes.tokens_s``."""
SAMPLES: Final = 16
"""How many of the last measurements an estimate uses."""
OPEN: Final = 64
"""More steps are never planned and not ended."""


class StepTimes:
    """The times of one engine's steps. A step takes from when it was planned, or from the end of
    the step before it if that is later, to its own end. With asynchronous scheduling the next step
    is planned before. Call ``planned`` and ``ended`` for each step, also for one without tokens.

    Steps are kept by size: those of 1 token, of 2 and 3, of 4 to 7 and so on, the last ``SAMPLES``
    of each. The lower quartile of each size counts, because other work slows a step and nothing
    makes it faster. More tokens never take less time, so a size that seems slower than a larger one
    takes the larger one's time. But if all its ``SAMPLES`` are younger than those of the larger
    one, the engine has become slower, and nothing is known of the larger one any more.

    ``clock``: CLOCK_MONOTONIC.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._open: deque[tuple[float, int, int]] = deque()
        """When each step was planned, its tokens, and how many loads it makes before it computes.
        """
        self._ended_s = 0.0
        self._sizes: dict[int, deque[tuple[int, float, float]]] = {}
        """By the bit length of a number of tokens: tokens and seconds of the last steps, and when
        each ended."""
        self._points: dict[int, tuple[float, float]] = {}
        """The same of each size that was not measured since: tokens and seconds of its estimate."""
        self._curve: list[tuple[float, float]] | None = None
        """Tokens and seconds, both rising; None: it is computed when it is needed."""
        self._speeds: deque[float] = deque(maxlen=SAMPLES)
        """Tokens per second of the last large steps."""
        self._recent: deque[float] = deque(maxlen=SAMPLES)
        self.names: Set[str] = frozenset()
        """Of the requests of which the last step that was planned computes tokens. A step without
        tokens does not count."""

    def planned(self, tokens: int, names: Set[str], *, loads: int = 0) -> None:
        """A step of ``tokens`` of the requests ``names`` is planned. ``loads``: how many loads it
        makes before it computes. Then its time is not that of its tokens."""
        if len(self._open) == OPEN:  # the engine does not tell when steps end
            self._open.clear()
        self._open.append((self.clock(), tokens, loads))
        if tokens:
            self.names = names

    def ended(self) -> None:
        """The result of the oldest step that has not ended is there."""
        if not self._open:
            return
        planned_s, tokens, loads = self._open.popleft()
        now_s = self.clock()
        took_s = now_s - max(planned_s, self._ended_s)
        self._ended_s = now_s
        if tokens and not loads and took_s > 0:
            samples = self._sizes.setdefault(size := tokens.bit_length(), deque(maxlen=SAMPLES))
            samples.append((tokens, took_s, now_s))
            self._recent.append(took_s)
            self._points.pop(size, None)
            self._curve = None
            if tokens >= MIN_SAMPLE_TOKENS:
                self._speeds.append(tokens / took_s)

    def load_s(self, since_s: float) -> float | None:
        """How long a load took inside the oldest step that has not ended, and that ends now: the
        time since ``since_s`` (CLOCK_MONOTONIC) or the end of the step before it, but that which
        its tokens alone take, for each of its loads. None: it makes none, or that is unknown."""
        _, tokens, loads = self._open[0] if self._open else (0.0, 0, 0)
        if not loads or not (alone_s := self.seconds(tokens)):
            return None
        return (self.clock() - max(since_s, self._ended_s) - alone_s) / loads

    @property
    def tokens_s(self) -> float:
        """How many tokens the engine computes per second, in large steps; 0: unknown. It errs on
        the high side: of the last large steps a quarter were faster, of three or fewer none. If it
        were too low, a request would wait for tiers that take longer than computing. But one step
        that seemed fast does not count, because that of a step before it was seen late."""
        speeds = sorted(self._speeds)
        return speeds[-1 - len(speeds) // 4] if speeds else 0.0

    @property
    def recent_s(self) -> float:
        """How long the last steps took, whatever they computed: their median; 0: unknown."""
        return median(self._recent) if self._recent else 0.0

    def seconds(self, tokens: float) -> float:
        """How long a step of ``tokens`` tokens takes; 0: unknown. Of fewer tokens than any step had
        it takes as long as the smallest. Of more than any had the engine makes several steps."""
        if self._curve is None:
            self._curve = self._rising()
        before = None
        for point in self._curve:
            if tokens <= point[0]:
                return point[1] if before is None else _between(before, point, tokens)
            before = point
        return 0.0 if before is None else before[1] * tokens / before[0]

    def _rising(self) -> list[tuple[float, float]]:
        points: list[tuple[int, float, float]] = []
        for size in sorted(self._sizes, reverse=True):
            if size not in self._points:
                tokens, seconds, _ = zip(*self._sizes[size], strict=True)
                self._points[size] = median(tokens), lower_quartile(seconds)
            at, took_s = self._points[size]
            samples = self._sizes[size]
            while points and points[-1][2] < took_s:
                larger = points[-1][0]
                if len(samples) < SAMPLES or samples[0][2] <= self._sizes[larger][-1][2]:
                    took_s = points[-1][2]
                    break
                points.pop()
            points.append((size, at, took_s))
        return [point[1:] for point in reversed(points)]


def lower_quartile(values: Collection[float]) -> float:
    """A quarter of ``values`` are smaller."""
    return sorted(values)[len(values) // 4]


def _between(one: tuple[float, float], other: tuple[float, float], at: float) -> float:
    """The value at ``at`` of the line through two points."""
    return one[1] + (other[1] - one[1]) * (at - one[0]) / (other[0] - one[0])
