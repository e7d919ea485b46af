"""The longest hit: how far a prompt's rows reach in every layer group at once.

A hit ends at a chunk's end, and needs of each group the chunks that ``GroupLayout.needs`` names
from ``first`` on (what lies before, the engine has itself).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvass.types import GroupLayout

BoolArray = npt.NDArray[np.bool_]


def first_chunk(group: GroupLayout, chunks: int, chunk_tokens: int, first: int = 0) -> int:
    """The first chunk that a hit of ``chunks`` chunks needs of ``group``, from ``first`` on."""
    return min(chunks, max(first, group.needs(chunks * chunk_tokens) // chunk_tokens))


def checked_groups(groups: Sequence[GroupLayout]) -> list[bool]:
    """Which groups must have the spare chunks after a hit: the full ones, or else every window."""
    full = [group.kind == "full" for group in groups]
    return full if any(full) else [group.kind != "state" for group in groups]


def longest_hit(
    groups: Sequence[GroupLayout],
    there: Sequence[BoolArray],
    chunk_tokens: int,
    first: int,
    spare: int = 0,
) -> int:
    """The most chunks of a prompt, counted from its beginning, that can be had; ``first`` if none.

    ``there[g][c]``: group ``g``'s row of chunk ``c`` can be read. All are equally long. With EAGLE
    or MTP, the ``spare`` chunks after the hit must be there too, in ``checked_groups``.
    """
    end = len(there[0])
    for group, rows in zip(groups, there, strict=True):
        if group.kind == "full":
            wanted = rows[first:end]
            end = end if wanted.all() else first + int(wanted.argmin())
    end = max(first, end - spare)
    windows = [(g, r) for g, r in zip(groups, there, strict=True) if g.kind != "full"]
    if not windows or end == first:
        return end
    chunk = np.arange(first, end)
    reachable = np.ones(end - first, np.bool_)
    for group, rows in windows:
        # What is missing at or before a chunk must lie before all that a hit ending there needs.
        missing = np.maximum.accumulate(np.where(rows[first:end], -1, chunk))
        needed = group.needs((chunk + 1) * chunk_tokens) // chunk_tokens
        reachable &= missing < np.maximum(needed, first)
        if len(windows) == len(groups) and group.kind != "state":
            for after in range(1, spare + 1):
                reachable &= rows[first + after : end + after]
    hits = reachable.nonzero()[0]
    return first + int(hits[-1]) + 1 if len(hits) else first
