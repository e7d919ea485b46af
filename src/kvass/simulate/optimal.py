"""What no eviction policy can beat: Belady's rule, with the choice not to keep what comes.

Of all chunks seen so far the cache keeps those that are used again soonest, and of those that are
used again by the same prompt the first ones. That is exact for tokens: a chunk's next use is never
later than that of a chunk behind it, so what is kept of a prompt is always a prefix.
(L. A. Belady, IBM Systems Journal 5(2), 1966.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final

_NEVER: Final = 1 << 62


def optimal_hits(prompts: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """How many chunks of each prompt hit (``prompts``: ids of their chunks), with room for
    ``capacity`` chunks."""
    next_uses = _next_uses(prompts)
    held: dict[int, int] = {}
    latest: list[tuple[int, int, int]] = []  # (-next use, -depth, chunk); stale if ``held`` differs
    hits = []
    for prompt, uses in zip(prompts, next_uses, strict=True):
        there = 0
        while there < len(prompt) and prompt[there] in held:
            there += 1
        hits.append(there)
        for depth, (chunk, use) in enumerate(zip(prompt, uses, strict=True)):
            if use == _NEVER:
                held.pop(chunk, None)
            else:
                held[chunk] = use
                heapq.heappush(latest, (-use, -depth, chunk))
        while len(held) > capacity:
            use, _, chunk = heapq.heappop(latest)
            if held.get(chunk) == -use:
                del held[chunk]
    return hits


def _next_uses(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each chunk of each prompt: which prompt uses it next."""
    coming: dict[int, int] = {}
    found = []
    for at in range(len(prompts) - 1, -1, -1):
        found.append([coming.get(chunk, _NEVER) for chunk in prompts[at]])
        coming.update(dict.fromkeys(prompts[at], at))
    found.reverse()
    return found
