"""How much sooner rows go that were used once than rows that were used again.

Small caches are played beside the real one, one for each weight, with a sample of the keys. The
real cache takes the weight whose small cache hits more than that of LRU, once the lead is certain.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core.index import mixed
from kvass.core.rows import AGAIN, SAMPLED, small_pages
from kvass.types import U32Array, U64Array

WEIGHTS: Final = (1, 2, 8)
"""The age of what was used once is multiplied by one of these. The first is LRU."""
_SAMPLED: Final = 16
"""One key in so many is sampled, and fewer where a small cache would have more than ``_MOST``."""
_MOST: Final = 2048
_REMEMBERED: Final = 4
"""So many keys that once got a row are remembered for each row, at least."""
_LEAST: Final = 32
"""So many sampled uses, and as many as an eighth of a small cache has rows, lie between two
decisions."""
_STILL: Final = 0.99
"""What counts of a lead at the next decision."""
_SURE: Final = 1.5
"""A lead is certain if it is so many standard deviations, of which ``_LUCK`` hits squared are there
from the beginning. The weight that counts already needs but a part of it, ``_STAYS``."""
_LUCK: Final = 36.0
_STAYS: Final = 0.7
_AT_ONCE: Final = 256
"""Of more sampled uses in one step the last ones do not count: they would take long."""

U8Array = npt.NDArray[np.uint8]


class Learning:
    """Of one row class. ``weight``: what counts now, and what it begins with.

    It takes 16 to 32 bytes for each row, and 2 MiB at most for the small caches.
    """

    def __init__(self, odd: U64Array, weight: int) -> None:
        self.weight = weight
        self._odd = odd
        self._known: U32Array = np.zeros(0, np.uint32)
        """Halves of the hashes of keys that once got a row, each where the other half says. The
        next one for the same place replaces it."""
        self._fit(1)

    def _fit(self, slots: int) -> None:
        """There may be ``slots`` rows. If that is far more than before, all is forgotten."""
        size = 1 << (_REMEMBERED * slots - 1).bit_length()
        if size > len(self._known):
            self._known = small_pages(size // 2).view(np.uint32)
            self._mask = np.uint64(size - 1)
            self._every = max(_SAMPLED, size // (_REMEMBERED * _MOST))
            self._limit = np.uint64((1 << 64) // self._every)
            self._seen = OrderedDict[int, None]()
            self._caches = [_SmallCache(weight) for weight in WEIGHTS]
            self._lead, self._squares = np.zeros(len(WEIGHTS)), np.zeros(len(WEIGHTS))
            self._uses = 0

    def added(self, keys: U64Array, slots: int, now: int) -> U8Array:
        """Chunks of a prompt, from its beginning, get rows; what ``RowTable.use`` says of these. A
        chunk counts as used before if one behind it was: it must not go sooner."""
        self._fit(slots)
        hashes = mixed(keys, self._odd)
        places, marks = hashes & self._mask, hashes.view(np.uint32)[1::2]
        again = (self._known[places] == marks).nonzero()[0]
        self._known[places] = marks
        sampled = hashes < self._limit
        use = sampled.view(np.uint8) * SAMPLED
        if len(again):
            use[: again[-1] + 1] |= AGAIN
        self._play(hashes[sampled], slots, now)
        return use

    def used(self, keys: U64Array, slots: int, now: int) -> None:
        """Chunks that were sampled when they were added were used, in the order of the prompt."""
        hashes = mixed(keys, self._odd)
        self._play(hashes[hashes < self._limit], slots, now)

    def _play(self, hashes: U64Array, slots: int, now: int) -> None:
        """The small caches are asked for what was used, the deepest chunk first."""
        room = max(1, slots // self._every)
        for key in hashes[:_AT_ONCE][::-1].tolist():
            again = key in self._seen
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > (1 + _REMEMBERED) * room:
                self._seen.popitem(last=False)
            for cache in self._caches:
                cache.use(key, again, now, room)
            self._uses += 1
        if self._uses >= max(_LEAST, room // 8):
            self._decide()

    def _decide(self) -> None:
        self._uses = 0
        hits = np.array([cache.hits for cache in self._caches])
        for cache in self._caches:
            cache.hits = 0
        lead = hits - hits[0]
        self._lead = _STILL * self._lead + lead
        self._squares = _STILL * self._squares + lead * lead
        doubt = _SURE * np.sqrt(_LUCK + self._squares)
        doubt[WEIGHTS.index(self.weight)] *= _STAYS
        doubt[0] = 0.0
        self.weight = WEIGHTS[int((self._lead - doubt).argmax())]


class _SmallCache:
    """Keys and when they were last used, the oldest first. ``hits``: since the last decision."""

    def __init__(self, weight: int) -> None:
        self._weight, self.hits = weight, 0
        self._once, self._again = OrderedDict[int, int](), OrderedDict[int, int]()

    def use(self, key: int, again: bool, now: int, room: int) -> None:
        """``key`` is used at ``now``; there is room for ``room`` keys."""
        once, more = self._once, self._again
        if once.pop(key, None) is not None or more.pop(key, None) is not None:
            self.hits += 1
        (more if again else once)[key] = now
        while len(once) + len(more) > room:
            first, second = next(iter(once.values()), now), next(iter(more.values()), now)
            sooner = (now - first) * self._weight >= now - second
            (once if not more or (once and sooner) else more).popitem(last=False)
