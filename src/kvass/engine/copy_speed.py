"""How fast an engine's ranks copy rows from L1, as its scheduler knows it.

Each rank reports what its loads took (``Copied``). All ranks copy their part of a load, so the
slowest one decides.

Small loads and larger ones are estimated apart. A small load takes a time that hardly depends on
its bytes, and its rows may be in a CPU's cache. So neither says much of the other, and counts for
it only while nothing else is known.

The estimate errs on the slow side: it is the median of a rank's last loads, but the last one if
that was slower. So a load that took long counts at once, and one that was slow by chance only until
the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

SAMPLES: Final = 9
"""How many of the last loads of a rank the estimate uses."""
SMALL_BYTES: Final = 256 << 10
"""A load of fewer bytes is small."""
SLOW_S: Final = 0.001
"""A small load that took no more than this longer than usual was not slow."""


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

    def seconds(self, blocks: Sequence[int]) -> float | None:
        """How long the slowest rank copies ``blocks[g]`` blocks of each layer group ``g``. None:
        unknown."""
        if not self.known:
            return None
        return max(rank.seconds(blocks) for rank in self._of.values())

    def most(self, seconds: float) -> int:
        """How many blocks of an engine with one layer group the slowest rank copies in that time;
        0: unknown."""
        return min(rank.most(seconds) for rank in self._of.values()) if self.known else 0


class _Rank:
    def __init__(self) -> None:
        self._small: deque[Copied] = deque(maxlen=SAMPLES)
        self._large: deque[Copied] = deque(maxlen=SAMPLES)
        self.last = Copied(0, 0.0)

    def add(self, copied: Copied) -> None:
        self.last = copied
        (self._small if copied.bytes < SMALL_BYTES else self._large).append(copied)

    def renew(self) -> None:
        self._small.clear()
        self._large.clear()
        self.add(self.last)

    @property
    def bytes_s(self) -> float:
        """Of loads that are not small, if one is known."""
        rates = [_rate(load) for load in self._large or self._small]
        return min(median(rates), rates[-1])

    @property
    def doubtful(self) -> bool:
        if self.last.bytes >= SMALL_BYTES:
            return self.bytes_s < median(_rate(load) for load in self._large) / 2
        usual_s = median(load.seconds for load in self._small)
        return self.last.seconds > max(2 * usual_s, usual_s + SLOW_S)

    def seconds(self, blocks: Sequence[int]) -> float:
        sizes = zip(blocks, self.last.block_bytes, strict=True)
        return self._seconds(sum(count * size for count, size in sizes))

    def most(self, seconds: float) -> int:
        (block_bytes,) = self.last.block_bytes
        size = seconds * self.bytes_s
        if size < SMALL_BYTES and self._small:
            size = SMALL_BYTES - 1 if self._seconds(1) <= seconds else 0
        return int(size / max(block_bytes, 1))

    def _seconds(self, size: int) -> float:
        if 0 < size < SMALL_BYTES and self._small:
            usual_s = median(load.seconds for load in self._small)
            return max(usual_s, self._small[-1].seconds)
        return size / self.bytes_s


def _rate(load: Copied) -> float:
    return load.bytes / max(load.seconds, 1e-9)
