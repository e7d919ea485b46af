"""The KV pages of the reference engine's ranks, with content that can be checked.

The content of a page follows from its group, layer, shard and the tokens up to its end alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Literal

import numpy as np

from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, describe_group
from kvass.testing.pages import WrongPageError
from kvass.transfer.base import U8Array
from kvass.types import RankLayout, Slots

BLOCKS: Final = 400
"""In a rank's memory."""


def content(group: int, layer: int, shard: int, prefix: bytes, size: int) -> U8Array:
    """The page of a layer whose last token has this prefix digest: uint8, shape ``(size,)``."""
    place = bytes((group, layer, shard))
    seed = np.frombuffer(blake2b(prefix + place, digest_size=32).digest(), np.uint8)
    return np.resize(seed, size)


class RankPages:
    """One rank's KV pages. All groups share the blocks; the largest group gives a block's size."""

    def __init__(self, rng: random.Random, layout: RankLayout, shard: int, chunk: int) -> None:
        self.layout, self.shard, self._rng = layout, shard, rng
        pads = [[rng.choice([0, 0, 5, 64]) for _ in g.layers] for g in layout.groups]
        stride = 1 + max(
            sum(g.page_bytes) + sum(pad) for g, pad in zip(layout.groups, pads, strict=True)
        )
        self.bytes = np.zeros(stride * BLOCKS, np.uint8)
        self.planes: list[GroupPlanes] = []
        for number, (group, pad) in enumerate(zip(layout.groups, pads, strict=True)):
            bases, at = [], 0
            for size, gap in zip(group.page_bytes, pad, strict=True):
                bases.append(at + gap)
                at += gap + size
            strides = [stride] * len(bases)
            self.planes.append(describe_group(number, group, chunk, BLOCKS, bases, strides))

    def page(self, group: int, layer: int, block: int) -> U8Array:
        """The page itself, writable."""
        plane = self.planes[group].planes[layer]
        at = plane.base + block * plane.block_stride
        return self.bytes[at : at + plane.run]

    def write(self, group: int, block: int, prefix: bytes) -> None:
        """The forward pass: write a block's page in every layer."""
        for layer in range(len(self.layout.groups[group].layers)):
            page = self.page(group, layer, block)
            page[:] = content(group, layer, self.shard, prefix, len(page))

    def check(self, group: int, block: int, prefix: bytes) -> None:
        """Check a block's page in every layer. Raises ``WrongPageError``."""
        for layer in range(len(self.layout.groups[group].layers)):
            page = self.page(group, layer, block)
            if not np.array_equal(page, content(group, layer, self.shard, prefix, len(page))):
                raise WrongPageError(f"group {group}, layer {layer}, shard {self.shard}")

    def scribble(self, block: int) -> None:
        """Overwrite the whole block."""
        stride = len(self.bytes) // BLOCKS
        self.bytes[block * stride : (block + 1) * stride] = self._rng.randrange(256)

    def copy(
        self,
        kind: Literal["store", "load"],
        arena: U8Array,
        blocks: Sequence[Sequence[int]],
        slots: Sequence[Slots],
        skips: Sequence[int],
    ) -> None:
        """Copy every group's rows page by page: the simplest possible mover."""
        for planes, ids, where, skip in zip(self.planes, blocks, slots, skips, strict=True):
            if not ids or not planes.planes:
                continue
            drop = -len(ids) % planes.chunk_blocks  # the last row may be used in part
            table = np.array([*ids, *[0] * drop], np.int64).reshape(-1, planes.chunk_blocks)
            offsets = where.offsets(self.shard, planes.shard_bytes)
            for row in plan_copy(planes, table, offsets, skip=skip, drop=drop).rows:
                for plane, inside in zip(planes.planes, planes.slot_offsets(), strict=True):
                    for i, block in enumerate(row.blocks.tolist()):
                        at = row.slot + inside + (row.first + i) * plane.run
                        slot = arena[at : at + plane.run]
                        here = plane.base + block * plane.block_stride
                        page = self.bytes[here : here + plane.run]
                        if kind == "store":
                            slot[:] = page
                        else:
                            page[:] = slot
