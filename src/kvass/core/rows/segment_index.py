"""Which tokens indexed chunks have, so that they are found where they are not a prefix.

An entry names a chunk by its key. It leaves when a row of the chunk leaves L1, if the rows of its
namespace are in no tier; else when a promotion learns that no tier has the row. It also leaves with
a clear, with its namespace, and when the index is full and it was used longest ago.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvass.blend.match import ChunkMatcher, Chunks, entry_bytes
from kvass.core.rows.index import ABSENT, KeyIndex, odd_numbers, repeated
from kvass.types import I64Array, U64Array

SIZES: Final = 4
"""Chunks may be of so many sizes."""
SLICE: Final = 1024
"""Entries that one ``reclaim`` gives back: 2 ms of work."""


class IndexedChunks(msgspec.Struct, eq=False):
    """The indexed chunks of all namespaces whose chunks have so many tokens. ``by_key``: entries by
    key and place (``ChunkMatcher.keys_of``)."""

    matcher: ChunkMatcher
    by_key: KeyIndex

    def find(self, place: int, keys: U64Array) -> I64Array:
        """The entry of each key, or ``ABSENT``."""
        return self.by_key.find(self.matcher.named(place, keys))

    def add(self, place: int, space: U64Array, chunks: Chunks) -> int:
        """Index chunks; how many were not in the index."""
        once = np.delete(np.arange(len(chunks.keys)), repeated(chunks.keys))
        chunks = chunks.of(once[: self.matcher.capacity])
        known = self.find(place, chunks.keys)
        here = known != ABSENT
        same = here.copy()
        same[here] = (self.matcher.space[known[here]] == space).all(axis=1)
        self.matcher.touch(known[same])
        self.matcher.remove(known[here & ~same])
        added = self.matcher.add(place, space, chunks.of(~same))
        self.by_key.add(added)
        return len(added)

    def removing(self, ids: I64Array) -> None:
        """The matcher is about to remove ``ids``."""
        known = self.by_key.find(self.matcher.keys_of(ids)) == ids
        self.by_key.remove(ids[known])


class NamespaceEntries(NamedTuple):
    """A namespace's entries, from one clear to the next: those of ``chunks`` whose place is
    ``number``. ``in_tiers``: its rows may be in tiers, too."""

    number: int
    chunks: IndexedChunks
    in_tiers: bool


class SegmentIndex:
    """The indexed chunks of all namespaces, in ``room_bytes`` for each number of tokens of a chunk.
    ``seed``: secret."""

    def __init__(self, room_bytes: int, seed: bytes) -> None:
        self._room_bytes, self._seed = room_bytes, seed
        odd = [odd_numbers(seed + b"segments"), odd_numbers(seed + b"places")[:1]]
        self._odd: U64Array = np.concatenate(odd)
        self.sizes: dict[int, IndexedChunks] = {}
        """By the tokens of a chunk."""
        self.of: dict[int, NamespaceEntries] = {}
        """By namespace."""
        self._numbers = itertools.count(1)
        self.cleared: list[NamespaceEntries] = []
        """What was indexed of cleared namespaces, and has not been given back."""

    def begin(self, namespace: int, chunk_tokens: int, in_tiers: bool) -> NamespaceEntries | None:
        """A namespace's entries. ``None``: it can have none, there are too many sizes of chunks."""
        if namespace in self.of:
            return self.of[namespace]
        capacity = self._room_bytes // entry_bytes(chunk_tokens)
        if chunk_tokens not in self.sizes:
            if len(self.sizes) >= SIZES or not capacity:
                return None
            matcher = ChunkMatcher(chunk_tokens, capacity, self._seed)
            chunks = IndexedChunks(matcher, KeyIndex(matcher, self._odd, capacity))
            matcher.removing = chunks.removing
            self.sizes[chunk_tokens] = chunks
        made = NamespaceEntries(next(self._numbers), self.sizes[chunk_tokens], in_tiers)
        self.of[namespace] = made
        return made

    def reaches_tiers(self, namespace: int, in_tiers: bool) -> None:
        """Whether a namespace's rows may be in tiers changes. If they may not any more, its entries
        go: rows of some of them were there only."""
        entries = self.of.get(namespace)
        if entries is not None and in_tiers and not entries.in_tiers:
            self.of[namespace] = entries._replace(in_tiers=True)
        elif entries is not None and entries.in_tiers and not in_tiers:
            self.clear(namespace)

    def left(self, namespace: int, keys: U64Array) -> None:
        """Rows with these keys left L1."""
        entries = self.of.get(namespace)
        if entries is not None and not entries.in_tiers:
            self.forget(namespace, keys)

    def forget(self, namespace: int, keys: U64Array) -> None:
        """There are no rows with these keys any more, anywhere."""
        entries = self.of.get(namespace)
        if entries is not None:
            found = np.unique(entries.chunks.find(entries.number, keys))
            entries.chunks.matcher.remove(found[found != ABSENT])

    def clear(self, namespace: int) -> None:
        """Nothing of a namespace is found any more. ``reclaim`` gives its entries back."""
        entries = self.of.pop(namespace, None)
        if entries is not None:
            self.cleared.append(entries)

    def reclaim(self) -> None:
        """Give back some entries of cleared namespaces, and what nobody uses any more."""
        if not self.cleared:
            return
        number, chunks, _ = self.cleared[-1]
        ids = np.flatnonzero(chunks.matcher.place == number)[:SLICE]
        chunks.matcher.remove(ids)
        if len(ids) < SLICE:
            self.cleared.pop()
        used = {id(entries.chunks) for entries in (*self.of.values(), *self.cleared)}
        self.sizes = {k: each for k, each in self.sizes.items() if id(each) in used}
