"""How fast an engine's ranks copy rows from L1, as its scheduler knows it.

Each rank reports what its loads took (``Copied``). All ranks copy their part of a load, so the
slowest one decides.

The estimate errs on the low side: it is the median of a rank's last loads, but no more than its
last one. So a load that took long counts at once, and one that was slow by chance only until the
next. A small load takes a time that hardly depends on its bytes. Once a larger one is known, it
counts in the median only if it was faster than that, and it is slow only if it took ``SLOW_S``
longer than the median lets expect.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

SAMPLES: Final = 9
"""How many of the last loads of a rank the estimate uses."""
SMALL_BYTES: Final = 256 << 10
"""A load of fewer bytes is small."""
SLOW_S: Final = 0.001


class Copied(NamedTuple):
    """The loads of one rank that were copied since its last report. ``seconds``: how long one
    thread copies that many ``bytes``. ``block_bytes``: of one block, by layer group. ``verified``:
    the first loads of each group were verified (``verifier.py``). ``in_step``: the rank can copy a
    load inside a step."""

    bytes: int
    seconds: float
    block_bytes: tuple[int, ...] = ()
    verified: bool = False
    in_step: bool = False


class CopySpeed:
    """The speed of an engine of ``ranks`` ranks. Used from its scheduler's thread only."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._of: dict[int, _Rank] = {}

    def reported(self, copied: Mapping[int, Copied]) -> None:
        for rank, figures in copied.items():
            self._of.setdefault(rank, _Rank()).add(figures)

    def renew(self) -> None:
        """Forget all but the last load of each rank, which was faster than they let expect."""
        for rank in self._of.values():
            rank.renew()

    @property
    def known(self) -> bool:
        """Whether each rank has copied something."""
        return len(self._of) == self._ranks

    @property
    def verified(self) -> bool:
        """Whether the first loads of each rank were verified."""
        return self.known and all(rank.last.verified for rank in self._of.values())

    @property
    def doubtful(self) -> bool:
        """Whether the last load of some rank was slow, perhaps by chance."""
        return any(rank.doubtful for rank in self._of.values())

    @property
    def in_step(self) -> bool:
        """Whether all ranks can copy inside a step."""
        return self.known and all(rank.last.in_step for rank in self._of.values())

    @property
    def bytes_s(self) -> float:
        """Bytes per second of the slowest rank; 0: unknown."""
        return min(rank.bytes_s for rank in self._of.values()) if self.known else 0.0

    def seconds(self, blocks: Sequence[int]) -> float | None:
        """How long the slowest rank copies ``blocks[g]`` blocks of each layer group ``g``. None:
        unknown."""
        if not self.known:
            return None
        return max(rank.seconds(blocks) for rank in self._of.values())


class _Rank:
    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._small = True
        """Whether all loads so far were small."""
        self._last = math.inf
        """The rate of the last load; infinity: it was small, and not slow."""
        self.last = Copied(0, 0.0)

    def add(self, copied: Copied) -> None:
        self.last, self._last = copied, copied.bytes / max(copied.seconds, 1e-9)
        small = copied.bytes < SMALL_BYTES
        if small and not self._small and self._last <= (usual := median(self._rates)):
            if copied.seconds < copied.bytes / usual + SLOW_S:
                self._last = math.inf
            return
        if not small and self._small:
            self._rates.clear()
        self._small = self._small and small
        self._rates.append(self._last)

    def renew(self) -> None:
        self._rates.clear()
        self._small = True
        self.add(self.last)

    @property
    def bytes_s(self) -> float:
        return min(median(self._rates), self._last)

    @property
    def doubtful(self) -> bool:
        return self._last < median(self._rates) / 2

    def seconds(self, blocks: Sequence[int]) -> float:
        sizes = zip(blocks, self.last.block_bytes, strict=True)
        return sum(count * size for count, size in sizes) / self.bytes_s
