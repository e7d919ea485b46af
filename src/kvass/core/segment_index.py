"""Which tokens indexed chunks have, so that they are found where they are not a prefix.

An entry names a chunk by its key. It leaves when a row of the chunk leaves L1, if the rows of its
namespace are in no tier; else when a promotion learns that no tier has the row. It also leaves with
a clear, with its namespace, and when the index is full and it was used longest ago.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Final

import msgspec
import numpy as np

from kvass.blend.match import ChunkMatcher, Chunks, entry_bytes
from kvass.core.index import ABSENT, KeyIndex, repeated
from kvass.types import I64Array, U64Array

SIZES: Final = 4
"""Matchers that there may be: one for each number of tokens of a chunk."""
SLICE: Final = 1024
"""Entries that one ``reclaim`` gives back: 2 ms of work."""


class IndexedChunks(msgspec.Struct, eq=False):
    """What is indexed of a namespace, from one clear to the next. ``in_tiers``: its rows may be in
    tiers, too."""

    place: int
    matcher: ChunkMatcher
    by_key: KeyIndex
    in_tiers: bool

    def add(self, space: U64Array, chunks: Chunks) -> int:
        """Index chunks; how many were not in the index."""
        once = np.delete(np.arange(len(chunks.keys)), repeated(chunks.keys))
        chunks = chunks.of(once[: self.matcher.capacity])
        known = self.by_key.find(chunks.keys)
        here = known != ABSENT
        same = here.copy()
        same[here] = (self.matcher.space[known[here]] == space).all(axis=1)
        self.matcher.touch(known[same])
        self.matcher.remove(known[here & ~same])
        added = self.matcher.add(self.place, space, chunks.of(~same))
        self.by_key.add(added)
        return len(added)


class SegmentIndex:
    """The indexed chunks of all namespaces, in ``room_bytes`` for each number of tokens of a chunk.
    ``odd``: as of ``KeyIndex``."""

    def __init__(self, room_bytes: int, seed: bytes, odd: U64Array) -> None:
        self._room_bytes, self._seed, self._odd = room_bytes, seed, odd
        self.matchers: dict[int, ChunkMatcher] = {}
        """By the tokens of a chunk."""
        self.of: dict[int, IndexedChunks] = {}
        """By namespace."""
        self._places = itertools.count(1)
        self._by_place: dict[int, IndexedChunks] = {}
        self._cleared: list[tuple[IndexedChunks, I64Array]] = []

    def begin(self, namespace: int, chunk_tokens: int, in_tiers: bool) -> IndexedChunks | None:
        """What is indexed of a namespace; ``None``: it cannot have any, there are too many sizes of
        chunks."""
        known = self.of.get(namespace)
        if known is not None:
            return known
        capacity = self._room_bytes // entry_bytes(chunk_tokens)
        if chunk_tokens not in self.matchers:
            if len(self.matchers) >= SIZES or not capacity:
                return None
            told = partial(self._removing, chunk_tokens)
            self.matchers[chunk_tokens] = ChunkMatcher(chunk_tokens, capacity, told, self._seed)
        matcher, place = self.matchers[chunk_tokens], next(self._places)
        by_key = KeyIndex(matcher, self._odd, capacity)
        self.of[namespace] = IndexedChunks(place, matcher, by_key, in_tiers)
        self._by_place[place] = self.of[namespace]
        return self.of[namespace]

    def left(self, namespace: int, keys: U64Array) -> None:
        """Rows with these keys left L1."""
        chunks = self.of.get(namespace)
        if chunks is not None and not chunks.in_tiers:
            self.forget(namespace, keys)

    def forget(self, namespace: int, keys: U64Array) -> None:
        """There are no rows with these keys any more, anywhere."""
        chunks = self.of.get(namespace)
        if chunks is not None:
            found = np.unique(chunks.by_key.find(keys))
            chunks.matcher.remove(found[found != ABSENT])

    def clear(self, namespace: int) -> None:
        """Nothing of a namespace is found any more. ``reclaim`` gives its entries back."""
        chunks = self.of.pop(namespace, None)
        if chunks is not None:
            del self._by_place[chunks.place]
            self._cleared.append((chunks, chunks.by_key.rows()))

    @property
    def unfinished(self) -> bool:
        """Whether ``reclaim`` has something to do."""
        return bool(self._cleared)

    def reclaim(self) -> None:
        """Give back some entries of cleared namespaces, and what nobody uses any more."""
        if not self._cleared:
            return
        chunks, ids = self._cleared.pop()
        matcher, some = chunks.matcher, ids[:SLICE]
        matcher.remove(some[matcher.place[some] == chunks.place])  # ids are used again
        if len(ids) > SLICE:
            self._cleared.append((chunks, ids[SLICE:]))
        used = {id(each.matcher) for each in self.of.values()}
        used |= {id(each.matcher) for each, _ in self._cleared}
        self.matchers = {k: m for k, m in self.matchers.items() if id(m) in used}

    def _removing(self, chunk_tokens: int, ids: I64Array) -> None:
        """A matcher is about to remove ``ids``."""
        matcher = self.matchers[chunk_tokens]
        places = matcher.place[ids]
        for place in np.unique(places).tolist():
            if place in self._by_place:
                here, by_key = ids[places == place], self._by_place[place].by_key
                by_key.remove(here[by_key.find(matcher.key[here]) == here])
