"""The KV memory of a fake rank, with contents that can be checked.

The content of a page follows from its chunk's key, its group, shard and layer, and its place in the
chunk. So ranks that share a shard have equal bytes, and ``verify`` finds a page that is in the
wrong place or of the wrong shard.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from kvass.layout.describe import GroupPlanes, describe_group
from kvass.transfer.base import U8Array
from kvass.types import I64Array, RankLayout

_ODD = np.uint64(0x9E3779B97F4A7C15)


class WrongPageError(AssertionError):
    """A page has other bytes than it should have."""


def page_bytes(key: bytes, group: int, shard: int, layer: int, pages: int, size: int) -> U8Array:
    """The pages of one chunk in one layer: uint8, shape ``(pages, size)``."""
    place = struct.pack("<III", group, shard, layer)
    seed = np.frombuffer(blake2b(key + place, digest_size=8).digest(), np.uint64)
    words = -(-size // 8)
    code = (np.arange(pages * words, dtype=np.uint64) + np.uint64(1)) * _ODD ^ seed
    return code.view(np.uint8).reshape(pages, words * 8)[:, :size]


class RankMemory:
    """The KV pages of one rank: ``blocks`` blocks in every layer of every group.

    ``regions`` and ``planes`` are the arguments of a mover. A *table* holds the block ids of some
    chunks in one group: int64, shape ``(chunks, blocks per chunk)``; tables come one per group.
    """

    def __init__(self, layout: RankLayout, shard: int, chunk_tokens: int, blocks: int) -> None:
        self.shard = shard
        sizes = [[blocks * size for size in group.page_bytes] for group in layout.groups]
        memory = np.zeros(sum(map(sum, sizes)), np.uint8)
        self.regions = (memory,)
        planes: list[GroupPlanes] = []
        self._pages: list[list[U8Array]] = []
        at = 0
        for number, (group, layers) in enumerate(zip(layout.groups, sizes, strict=True)):
            bases = [at + sum(layers[:i]) for i in range(len(layers))]
            at += sum(layers)
            planes.append(
                describe_group(number, group, chunk_tokens, blocks, bases, group.page_bytes)
            )
            self._pages.append(
                [
                    memory[base : base + n].reshape(blocks, -1)
                    for base, n in zip(bases, layers, strict=True)
                ]
            )
        self.planes = tuple(planes)

    def compute(self, keys: Sequence[bytes], tables: Sequence[I64Array]) -> None:
        """Write the pages of these chunks, as a forward pass does."""
        for group, table in enumerate(tables):
            for key, ids in zip(keys, table, strict=True):
                for layer, pages in enumerate(self._pages[group]):
                    pages[ids] = self._expected(key, group, layer, len(ids))

    def wipe(self, tables: Sequence[I64Array]) -> None:
        """Zero the pages of these blocks, so that no page is right by chance."""
        for group, table in enumerate(tables):
            for pages in self._pages[group]:
                pages[table.reshape(-1)] = 0

    def verify(self, keys: Sequence[bytes], tables: Sequence[I64Array]) -> int:
        """Check the pages of these chunks; a table of fewer rows has the last ones. Returns how
        many there are. Raises ``WrongPageError``."""
        right = 0
        for group, table in enumerate(tables):
            first = len(keys) - len(table)
            for chunk, (key, ids) in enumerate(zip(keys[first:], table, strict=True), first):
                for layer, pages in enumerate(self._pages[group]):
                    wrong = pages[ids] != self._expected(key, group, layer, len(ids))
                    if wrong.any():
                        page = int(wrong.any(axis=1).argmax())
                        raise WrongPageError(
                            f"chunk {chunk}, group {group}, shard {self.shard}, layer {layer}, "
                            f"page {page} (block {ids[page]}) holds other bytes"
                        )
                    right += len(ids)
        return right

    def _expected(self, key: bytes, group: int, layer: int, pages: int) -> U8Array:
        size = self._pages[group][layer].shape[1]
        return page_bytes(key, group, self.shard, layer, pages, size)
