"""The longest hit of a prompt, from the chunks that each layer group has.

A hit ends at the end of a chunk. ``GroupLayout.needs`` says from where on a hit needs the chunks of
a group. A hit needs none before ``first``, because the engine has those itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvass.types import GroupLayout

BoolArray = npt.NDArray[np.bool_]


def first_chunk(group: GroupLayout, chunks: int, chunk_tokens: int, first: int = 0) -> int:
    """The first chunk of ``group`` that a hit of ``chunks`` chunks needs; at least ``first``."""
    return min(chunks, max(first, group.needs(chunks * chunk_tokens) // chunk_tokens))


def checked_groups(groups: Sequence[GroupLayout]) -> list[bool]:
    """Which groups must have the spare chunks after a hit: those of which it needs all chunks. If
    there are none: all but states."""
    whole = [group.rules.whole for group in groups]
    return whole if any(whole) else [not group.rules.summary for group in groups]


def whole_end(groups: Sequence[GroupLayout], there: Sequence[BoolArray], first: int) -> int:
    """Up to which chunk no chunk from ``first`` on lacks a row of a group of which a hit needs all.
    ``there``: as for ``longest_hit``."""
    end = len(there[0])
    for group, rows in zip(groups, there, strict=True):
        if group.rules.whole:
            wanted = rows[first:end]
            end = end if wanted.all() else first + int(wanted.argmin())
    return end


def longest_hit(
    groups: Sequence[GroupLayout],
    there: Sequence[BoolArray],
    chunk_tokens: int,
    first: int,
    spare: int = 0,
) -> int:
    """The length of the longest hit in chunks, from the beginning of the prompt; ``first`` if none.

    ``there[g][c]``: whether group ``g`` has chunk ``c``. All have the same length. With EAGLE or
    MTP, ``checked_groups`` must also have the ``spare`` chunks after the hit.
    """
    end = whole_end(groups, there, first)
    end = max(first, end - spare)
    windows = [(g, r) for g, r in zip(groups, there, strict=True) if not g.rules.whole]
    if not windows or end == first:
        return end
    chunk = np.arange(first, end)
    reachable = np.ones(end - first, np.bool_)
    for group, rows in windows:
        # The last missing chunk must be before the first chunk that a hit ending here needs.
        missing = np.maximum.accumulate(np.where(rows[first:end], -1, chunk))
        needed = group.needs((chunk + 1) * chunk_tokens) // chunk_tokens
        reachable &= missing < np.maximum(needed, first)
        if len(windows) == len(groups) and not group.rules.summary:
            for after in range(1, spare + 1):
                reachable &= rows[first + after : end + after]
    hits = reachable.nonzero()[0]
    return first + int(hits[-1]) + 1 if len(hits) else first
