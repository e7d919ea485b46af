"""An agenda: what is due, and when.

Law of this file: what is taken off is gone at once. So what one call does takes no longer if much
was put on and taken off before, and hardly longer if there is more (0.1 ms with a million).

``sortedcontainers`` has such a list. It would be a dependency of the core for these 40 lines.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from operator import itemgetter
from typing import Final, Generic, TypeVar

_BLOCK: Final = 512
"""The most entries of a block."""
_FIRST: Final = itemgetter(0)

E = TypeVar("E", bound=tuple[float, *tuple[int, ...]])


class Agenda(Generic[E]):
    """Entries that are different from one another; each begins with the time when it is due."""

    def __init__(self) -> None:
        self._blocks: list[list[E]] = []
        """All entries in order, in blocks that are not empty."""

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    @property
    def first(self) -> E | None:
        """What is due first; ``None``: nothing is."""
        return self._blocks[0][0] if self._blocks else None

    def add(self, entry: E) -> None:
        if not self._blocks:
            self._blocks.append([entry])
            return
        at = max(0, self._block_of(entry))
        block = self._blocks[at]
        insort(block, entry)
        if len(block) > _BLOCK:
            self._blocks.insert(at + 1, block[_BLOCK // 2 :])
            del block[_BLOCK // 2 :]

    def remove(self, entry: E) -> None:
        """Take off an entry, which must be there."""
        at = self._block_of(entry)
        block = self._blocks[at]
        i = bisect_left(block, entry)
        assert block[i] == entry, "it is not on the agenda"
        del block[i]
        if not block:
            del self._blocks[at]

    def _block_of(self, entry: E) -> int:
        """The last block that begins with ``entry`` or before it."""
        return bisect_right(self._blocks, entry, key=_FIRST) - 1
