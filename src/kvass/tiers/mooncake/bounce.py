"""Memory of a fixed size that transfers borrow pieces of.

Pieces are given in the order in which they were asked for, so that a large one is not overtaken by
small ones for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvass.tiers.base import Buffer
from kvass.tiers.buffers import page_buffer


class BounceBuffer:
    """``memory`` begins at a page; pieces need not."""

    def __init__(self, size: int) -> None:
        self.memory = page_buffer(size)
        self._free = [(0, size)]  # in order, with gaps between
        self._order = threading.Lock()
        self._changed = threading.Condition()

    @contextmanager
    def piece(self, size: int) -> Iterator[Buffer]:
        """``size`` bytes, at most all of them; waits until they are free."""
        with self._order, self._changed:
            while (at := self._take(size)) is None:
                self._changed.wait()
        try:
            yield self.memory[at : at + size]
        finally:
            with self._changed:
                self._give_back(at, size)
                self._changed.notify()

    def _take(self, size: int) -> int | None:
        for i, (at, free) in enumerate(self._free):
            if free >= size:
                self._free[i : i + 1] = [(at + size, free - size)] if free > size else []
                return at
        return None

    def _give_back(self, at: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for first, length in sorted([*self._free, (at, size)]):
            if merged and sum(merged[-1]) == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((first, length))
        self._free = [part for part in merged if part[1]]
