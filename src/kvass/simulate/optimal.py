"""The optimal eviction policy: Belady's rule, where a new chunk may be dropped at once.

Of all chunks seen so far the cache keeps those that are used again soonest. Of chunks that the same
prompt uses next, it keeps the first ones. This is optimal in tokens, too: a chunk's next use is
never later than that of a chunk behind it, so the chunks that are kept of a prompt are always a
prefix. (L. A. Belady, IBM Systems Journal 5(2), 1966.)
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Final

import numpy as np

from kvass.simulate.player import Model
from kvass.simulate.prompts import WIDTH, prompt_of
from kvass.simulate.traces import Trace

_NEVER: Final = 1 << 62


class Best:
    """The best hit rate that an eviction policy can have. With ``tails`` a chunk is kept in the
    parts that the trace distinguishes, and the end of a prompt is kept as a row."""

    def __init__(self, trace: Trace, models: Mapping[int, Model], tails: bool) -> None:
        self._trace, self._rates = trace, dict[int, float]()
        self._prompts, self._tokens = list[list[int]](), list[tuple[int, int]]()
        new, whole, self._parts = count(), 0, 1
        numbers = {engine: defaultdict[bytes, int](new.__next__) for engine in models}
        for r in trace.requests:
            model, piece_tokens = models[r.engine], trace.tokens_of(r.engine)
            known = len(numbers[r.engine])
            block = model.block_tokens if tails else 0
            prompt = prompt_of(trace, r, model.chunk_tokens, block)
            keys, unit, most = prompt.chunks, model.chunk_tokens, _NEVER
            if block:
                unit, most = min(piece_tokens, unit), prompt.max_hit_blocks * block
                keys = prompt.ends(unit // block)
            self._parts = model.chunk_tokens // unit
            self._tokens.append((unit, most))
            named = np.frombuffer(keys, f"V{WIDTH}").tolist()
            self._prompts.append([*map(numbers[r.engine].__getitem__, named)])
            whole += (len(numbers[r.engine]) - known) * model.row_bytes
        self.whole_bytes = whole
        """The bytes that a cache that evicts nothing holds at the end."""
        self.row_bytes = max(1, whole // max(1, next(new)))
        self._next_uses = _next_uses(self._prompts)

    def rate(self, size: int) -> float:
        """The best hit rate of a cache of ``size`` bytes."""
        rows = size // self.row_bytes
        if rows not in self._rates:
            hits = optimal_hits(self._prompts, rows * self._parts, self._next_uses)
            found = sum(
                min(hit * unit, most)
                for r, hit, (unit, most) in zip(
                    self._trace.requests, hits, self._tokens, strict=True
                )
                if r.looks_up
            )
            self._rates[rows] = found / max(1, self._trace.input_tokens)
        return self._rates[rows]


def optimal_hits(
    prompts: Sequence[Sequence[int]],
    capacity: int,
    next_uses: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """How many chunks of each prompt are hits if the cache has room for ``capacity`` chunks.
    ``prompts`` has the ids of their chunks. ``next_uses``: the result of ``_next_uses``, if the
    caller has it."""
    next_uses = next_uses or _next_uses(prompts)
    evicts = capacity < sum(map(len, prompts))
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
                if evicts:
                    heapq.heappush(latest, (-use, -depth, chunk))
        while len(held) > capacity:
            use, _, chunk = heapq.heappop(latest)
            if held.get(chunk) == -use:
                del held[chunk]
    return hits


def _next_uses(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    coming: dict[int, int] = {}
    found = []
    for at in range(len(prompts) - 1, -1, -1):
        found.append([coming.get(chunk, _NEVER) for chunk in prompts[at]])
        coming.update(dict.fromkeys(prompts[at], at))
    found.reverse()
    return found
