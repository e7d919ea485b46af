"""The index of chunks by their tokens, which finds cached chunks that are not a prefix (*blend*).

Law of this file: memory is bounded. When the index is full, a new entry replaces an old one.

An entry names a chunk by its key. It is removed when a row of the chunk leaves L1, if the rows of
its namespace are in no tier. Otherwise it is removed when a promotion learns that no tier has the
row. It is also removed by a clear, and with its namespace.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvass.blend.match import ChunkMatcher, Chunks, entry_bytes
from kvass.core.rows.index import ABSENT, KeyIndex, odd_numbers, repeated
from kvass.core.rows.listeners import ClassesGone, Left, Listener
from kvass.types import I64Array, U64Array

SIZES: Final = 4
"""How many different sizes of chunks may be indexed."""
SLICE: Final = 1024
"""The most entries that one ``reclaim`` removes: 2 ms of work."""


class IndexedChunks(msgspec.Struct, eq=False):
    """The indexed chunks of all namespaces with one size of chunks.

    ``by_key``: finds entries by key and place (``ChunkMatcher.keys_of``).
    """

    matcher: ChunkMatcher
    by_key: KeyIndex

    def find(self, place: int, keys: U64Array) -> I64Array:
        """The entry of each key in a place, or ``ABSENT``."""
        return self.by_key.find(self.matcher.named(place, keys))

    def add(self, place: int, space: U64Array, chunks: Chunks) -> int:
        """Index chunks; returns how many of them are new."""
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
        """Forget the keys of entries that the matcher is about to remove."""
        known = self.by_key.find(self.matcher.keys_of(ids)) == ids
        self.by_key.remove(ids[known])


class NamespaceEntries(NamedTuple):
    """The entries of a namespace between two clears: those of ``chunks`` whose place is ``number``.

    ``in_tiers``: whether rows of the namespace may be in tiers.
    """

    number: int
    chunks: IndexedChunks
    in_tiers: bool


class SegmentIndex(Listener):
    """The indexed chunks of all namespaces.

    ``room_bytes``: the memory for each size of chunks. ``seed`` is secret.
    """

    def __init__(self, room_bytes: int, seed: bytes) -> None:
        self._room_bytes, self._seed = room_bytes, seed
        odd = [odd_numbers(seed + b"segments"), odd_numbers(seed + b"places")[:1]]
        self._odd: U64Array = np.concatenate(odd)
        self.sizes: dict[int, IndexedChunks] = {}
        """By the number of tokens of a chunk."""
        self.of: dict[int, NamespaceEntries] = {}
        """By namespace."""
        self._numbers = itertools.count(1)
        self.cleared: list[NamespaceEntries] = []
        """The entries of cleared namespaces that were not removed yet."""

    def begin(self, namespace: int, chunk_tokens: int, in_tiers: bool) -> NamespaceEntries | None:
        """The entries of a namespace, created if it has none. ``None``: there are too many sizes of
        chunks, or a chunk is larger than the index."""
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
        """Set whether a namespace's rows may be in tiers.

        If they no longer may, its entries are removed, because the rows of some were in tiers only.
        """
        entries = self.of.get(namespace)
        if entries is not None and in_tiers and not entries.in_tiers:
            self.of[namespace] = entries._replace(in_tiers=True)
        elif entries is not None and entries.in_tiers and not in_tiers:
            self.clear(namespace)

    def left(self, told: Left) -> None:
        """Remove the entries of rows that left L1, unless tiers may have the rows."""
        entries = self.of.get(told.row_class.namespace)
        if entries is not None and not entries.in_tiers:
            self.forget(told.row_class.namespace, told.keys)

    def gone(self, told: ClassesGone) -> None:
        for namespace in told.namespaces:
            self.clear(namespace)

    def forget(self, namespace: int, keys: U64Array) -> None:
        """Neither L1 nor a tier has rows with these keys any more: remove their entries."""
        entries = self.of.get(namespace)
        if entries is not None:
            found = np.unique(entries.chunks.find(entries.number, keys))
            entries.chunks.matcher.remove(found[found != ABSENT])

    def clear(self, namespace: int) -> None:
        """Forget the entries of a namespace. ``reclaim`` removes them later, in slices."""
        entries = self.of.pop(namespace, None)
        if entries is not None:
            self.cleared.append(entries)

    def reclaim(self) -> None:
        """Remove some entries of cleared namespaces, and sizes that no namespace uses any more."""
        if not self.cleared:
            return
        number, chunks, _ = self.cleared[-1]
        ids = np.flatnonzero(chunks.matcher.place == number)[:SLICE]
        chunks.matcher.remove(ids)
        if len(ids) < SLICE:
            self.cleared.pop()
        used = {id(entries.chunks) for entries in (*self.of.values(), *self.cleared)}
        self.sizes = {k: each for k, each in self.sizes.items() if id(each) in used}
