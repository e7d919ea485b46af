"""Which prefixes of a prompt can be restored from all pools of a hybrid model (SWA, Mamba).

It is pure: what each pool has goes in. SGLang's own file backend gives the same results.
"""

from __future__ import annotations

from collections.abc import Sequence


def all_pages(leading: int) -> set[int]:
    """The lengths in pages that a pool allows of which every page is needed. ``leading``: how many
    pages from the first it has."""
    return set(range(1, leading + 1))


def trailing_pages(held: Sequence[bool], window: int) -> set[int]:
    """The lengths in pages that a pool allows of which only the last ``window`` pages are needed.
    ``held``: which pages it has."""
    allowed, run = set(), 0
    for index, one in enumerate(held):
        run = run + 1 if one else 0
        if run >= min(window, index + 1):
            allowed.add(index + 1)
    return allowed
