"""Which windows of a prompt are stored: those at which hits of later prompts end (decision 056).

Law of this file: a row of a window is wanted exactly if a hit needs it that ends at a point of its
prompt. A model without a group of which hits need all rows has a point at every chunk.

A hit ends where a prompt or an answer ended, or where two prompts part. Where they part is seen
when full rows match further than windows do. Until then the next point before it serves, and there
is one every ``interval`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kvass.types import GroupLayout

INTERVAL: Final = 4096
"""The default interval, unless windows are so long that little would be left out."""


class Points(NamedTuple):
    """Where hits of later prompts may end, in chunks: at ``since`` and behind it, and at
    ``parts``. ``since`` is the end of the prompt; where an answer will end is not known. ``parts``:
    up to there the prompt was seen before; 0: it was not."""

    since: int = 0
    parts: int = 0


EVERYWHERE: Final = Points()
"""A hit may end at each chunk."""


def default_interval(groups: Sequence[GroupLayout]) -> int:
    return max([INTERVAL, *(each.rules.sparse_tokens(each.window_tokens) for each in groups)])


class WindowRows:
    """The rows of windows of the prompts of one model. ``interval``: tokens; 0: all are wanted."""

    def __init__(self, groups: Sequence[GroupLayout], chunk_tokens: int, interval: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._windows = [(n, group) for n, group in enumerate(groups) if group.rules.windowed]
        self._all = (1 << len(groups)) - 1
        sparse = interval > 0 and any(group.rules.whole for group in groups)
        self._every = max(1, interval // chunk_tokens) if sparse and self._windows else 0

    @property
    def sparse(self) -> bool:
        """Whether rows are left out."""
        return self._every > 1

    def wanted(self, chunk: int, points: Points) -> int:
        """Bit mask of the groups whose row of ``chunk`` is wanted; of groups without windows all
        are."""
        if not self.sparse or chunk >= points.since:
            return self._all
        following = (chunk // self._every + 1) * self._every
        ends = [end for end in (following, *points) if end > chunk]
        mask = self._all
        for number, group in self._windows:
            if all(self._begin(group, end) > chunk for end in ends):
                mask &= ~(1 << number)
        return mask

    def _begin(self, group: GroupLayout, chunks: int) -> int:
        """The first chunk that a hit of ``chunks`` chunks needs."""
        return group.needs(chunks * self._chunk_tokens) // self._chunk_tokens
