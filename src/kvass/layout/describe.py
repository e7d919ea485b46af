"""Planes: where the pages of one layer group lie in the engine's memory, and in a slot.

Pages are opaque bytes: only the engine knows what they mean (heads, dtypes, K before V). The memory
of an engine is one or more *regions*, which are flat byte ranges. The page of block ``b`` in plane
``p`` is::

    regions[p.region][p.base + b * p.block_stride :][: p.run]

A slot holds one row's shard, and is ``GroupLayout.shard_bytes`` long. It has the group's layers one
after the other. Each layer is ``chunk_blocks`` adjacent pages, in the order of the chunk's tokens.
The end of the slot is padding that nobody reads or writes::

    slot:  | layer 0: page page .. page | layer 1: page page .. page | ... | padding |

If layers are adjacent within each block, as in layouts with blocks as the outermost dimension,
``join_layers`` makes one layer of them. Then a block is one piece in the engine's memory and in a
slot. The daemon and the namespace know only the joined layer. So an engine that has
the same layers apart never reads the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec

from kvass.errors import UsageError
from kvass.types import GroupLayout, align_up


class Plane(msgspec.Struct, frozen=True):
    """The place of one layer of a group, in bytes. ``region`` is an index into the engine's
    regions."""

    base: int
    block_stride: int
    run: int
    region: int = 0

    def end(self, blocks: int) -> int:
        """The first byte of the region behind the page of block ``blocks - 1``."""
        return self.base + (blocks - 1) * self.block_stride + self.run


class GroupPlanes(msgspec.Struct, frozen=True, dict=True):
    """The planes of one layer group as one rank holds them.

    ``planes`` are in the order of ``GroupLayout.layers``. ``blocks`` counts the block ids of the
    group, which begin at 0, the null block of engines that have one. ``chunk_blocks`` is the number
    of blocks that a row keeps of its chunk (``GroupLayout.row_blocks``). Planes and blocks of one
    group must not overlap; those of different groups may. Raises :class:`UsageError` for values
    that describe no memory.
    """

    group: int
    planes: tuple[Plane, ...]
    blocks: int
    chunk_blocks: int

    def __post_init__(self) -> None:
        if self.group < 0 or self.chunk_blocks < 0 or self.blocks < 1:
            raise UsageError(
                f"group {self.group}: {self.blocks} blocks, {self.chunk_blocks} per row; "
                "a group has an id >= 0, at least one block, and none or more per row"
            )
        for plane in self.planes:
            if plane.base < 0 or plane.run < 1 or plane.region < 0:
                raise UsageError(f"group {self.group}: negative or empty: {plane}")
            if plane.block_stride < plane.run:
                raise UsageError(f"group {self.group}: blocks overlap: {plane}")

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block in all planes."""
        return sum(p.run for p in self.planes)

    @cached_property
    def shard_bytes(self) -> int:
        """Bytes of a slot, padded to ``PAGE``, as ``GroupLayout.shard_bytes``."""
        return align_up(max(1, self.chunk_blocks * self.block_bytes))

    def slot_offsets(self) -> tuple[int, ...]:
        """For each plane the byte offset in a slot at which its pages begin."""
        sizes = (self.chunk_blocks * plane.run for plane in self.planes[:-1])
        return tuple(accumulate(sizes, initial=0)) if self.planes else ()

    def check(self, region_bytes: Sequence[int]) -> None:
        """Raise :class:`UsageError` unless every page of every block lies inside its region."""
        for plane in self.planes:
            if plane.region >= len(region_bytes):
                raise UsageError(f"group {self.group}: {len(region_bytes)} regions, and {plane}")
            end, size = plane.end(self.blocks), region_bytes[plane.region]
            if end > size:
                raise UsageError(
                    f"group {self.group}: block {self.blocks - 1} ends at byte {end} of a region "
                    f"of {size} bytes: {plane}"
                )


class Part(NamedTuple):
    """A piece of ``run`` bytes in every block: a layer, several joined layers, or a part of one."""

    name: str
    base: int
    block_stride: int
    run: int
    region: int


def join_layers(
    layout: GroupLayout, parts: Iterable[Part]
) -> tuple[GroupLayout, list[int], list[int], list[int]]:
    """``layout`` with ``parts`` as its layers, and their bases, block strides and regions for
    ``describe_group``. The parts are sorted by address, and those that are adjacent within each
    block are joined."""
    joined: list[Part] = []
    for part in sorted(parts, key=lambda p: (p.region, p.base)):
        last = joined[-1] if joined else part
        run = last.run + part.run
        end = (last.region, last.block_stride, last.base + last.run)
        if joined and (part.region, part.block_stride, part.base) == end and run <= end[1]:
            joined[-1] = last._replace(name=f"{last.name}+{part.name}", run=run)
        else:
            joined.append(part)
    names, runs = tuple(p.name for p in joined), tuple(p.run for p in joined)
    return (
        msgspec.structs.replace(layout, layers=names, page_bytes=runs),
        [p.base for p in joined],
        [p.block_stride for p in joined],
        [p.region for p in joined],
    )


def describe_group(
    group: int,
    layout: GroupLayout,
    chunk_tokens: int,
    blocks: int,
    bases: Sequence[int],
    block_strides: Sequence[int],
    regions: Sequence[int] | None = None,
) -> GroupPlanes:
    """The planes of ``layout``, one per layer. ``bases`` are the offsets of block 0 of the layers.

    ``bases[i]``, ``block_strides[i]`` (bytes) and ``regions[i]`` (default: all 0) belong to
    ``layout.layers[i]``. Raises :class:`UsageError` if they do not fit together.
    """
    where = list(regions) if regions is not None else [0] * len(layout.layers)
    lists = (bases, block_strides, layout.page_bytes, where)
    if {len(values) for values in lists} != {len(layout.layers)}:
        raise UsageError(
            f"group {group}: {len(layout.layers)} layers, {len(layout.page_bytes)} page sizes, "
            f"{len(bases)} bases, {len(block_strides)} strides, {len(where)} regions; give one each"
        )
    if chunk_tokens < 1 or chunk_tokens % layout.block_tokens:
        raise UsageError(
            f"group {group}: a chunk of {chunk_tokens} tokens is no multiple of the block of "
            f"{layout.block_tokens}"
        )
    planes = tuple(Plane(*values) for values in zip(*lists, strict=True))
    return GroupPlanes(group, planes, blocks, layout.row_blocks(chunk_tokens))
