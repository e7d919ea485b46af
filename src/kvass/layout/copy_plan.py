"""Copy plans: block ids of some rows + the slots of those rows -> what a mover copies.

Law of this file: a plan that exists is safe to carry out blindly. Every block id and slot was
checked when it was made, for no mover checks them again (numpy's fast gather, ``mode="clip"``,
would copy the *wrong block* for an id out of range). Whoever makes a wrong plan gets a typed error
before one byte moves.

A plan has no direction: store gathers ``blocks -> slot``, load scatters ``slot -> blocks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvass.errors import UsageError
from kvass.layout.describe import GroupPlanes
from kvass.types import PAGE, I64Array

Span = tuple[int, int, int]
"""``(block, at, count)``: blocks ``block .. block + count - 1`` are pages ``at ..`` of a row."""


@dataclass(frozen=True, slots=True, eq=False)
class RowCopy:
    """One row, or its tail: pages ``[first, first + len(blocks))`` of the chunk.

    ``slot`` is the byte offset of the row's shard in the arena, ``blocks`` int64 of shape ``(n,)``.
    """

    slot: int
    first: int
    blocks: I64Array

    def spans(self) -> list[Span]:
        """``blocks`` as runs of consecutive ids; ``at`` counts from ``first``."""
        cuts = (np.flatnonzero(np.diff(self.blocks) != 1) + 1).tolist()
        return [
            (int(self.blocks[lo]), lo, hi - lo)
            for lo, hi in zip([0, *cuts], [*cuts, len(self.blocks)], strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """The rows of one group to copy. ``bytes`` is what moves, ``end`` the first arena byte past it.

    ``distinct`` says that no block occurs twice, which a load needs.
    """

    planes: GroupPlanes
    rows: tuple[RowCopy, ...]
    bytes: int
    end: int
    distinct: bool


def plan_copy(
    planes: GroupPlanes, blocks: npt.ArrayLike, slots: Sequence[int] | I64Array, *, skip: int = 0
) -> CopyPlan:
    """Plan the copy of ``len(slots)`` rows of one group.

    ``blocks`` has shape ``(rows, planes.chunk_blocks)``: the block ids of each chunk. ``slots`` are
    byte offsets in the arena (``Slots.offsets``). ``skip`` leading blocks of the *first* row are
    left alone (0 <= skip < chunk_blocks): a load starts there when the engine's local hit ends
    inside that chunk; what ``blocks`` says of them does not matter.

    Raises :class:`UsageError`, before anything is planned: shapes that do not fit, a block id that
    is 0 (the null block) or out of range, a slot that is negative, unaligned or overlaps another.
    """
    ids, offsets = _as_table(planes, blocks, slots, skip)
    used = ids.reshape(-1)[skip:]
    _check_blocks(planes, used)
    _check_slots(planes, offsets)
    rows = tuple(
        RowCopy(slot, skip, ids[0, skip:]) if i == 0 else RowCopy(slot, 0, ids[i])
        for i, slot in enumerate(offsets.tolist())
    )
    return CopyPlan(
        planes=planes,
        rows=rows,
        bytes=len(used) * sum(p.run for p in planes.planes),
        end=int(offsets.max()) + planes.shard_bytes if rows else 0,
        distinct=len(np.unique(used)) == len(used),
    )


def _as_table(
    planes: GroupPlanes, blocks: npt.ArrayLike, slots: Sequence[int] | I64Array, skip: int
) -> tuple[I64Array, I64Array]:
    """``blocks`` as int64 ``(rows, chunk_blocks)`` and ``slots`` as int64 ``(rows,)``."""
    offsets = np.asarray(slots, np.int64).reshape(-1)
    raw = np.asarray(blocks)
    if raw.size == 0:
        raw = raw.reshape(0, planes.chunk_blocks).astype(np.int64)
    if raw.dtype.kind not in "iu" or raw.shape != (len(offsets), planes.chunk_blocks):
        raise UsageError(
            f"group {planes.group}: block ids of shape {raw.shape} ({raw.dtype}) for "
            f"{len(offsets)} slots; give integers of shape ({len(offsets)}, {planes.chunk_blocks})"
        )
    if not 0 <= skip < planes.chunk_blocks or (skip and not len(offsets)):
        raise UsageError(
            f"group {planes.group}: cannot skip {skip} blocks of a chunk of {planes.chunk_blocks}"
        )
    return np.ascontiguousarray(raw, np.int64), offsets


def _check_blocks(planes: GroupPlanes, ids: I64Array) -> None:
    if not len(ids):
        return
    low, high = int(ids.min()), int(ids.max())
    if low == 0:
        raise UsageError(f"group {planes.group}: block 0 is the null block: never stored or loaded")
    if low < 0 or high >= planes.blocks:
        raise UsageError(
            f"group {planes.group}: block id {low if low < 0 else high} is out of range "
            f"1..{planes.blocks - 1}"
        )


def _check_slots(planes: GroupPlanes, offsets: I64Array) -> None:
    if not len(offsets):
        return
    if int(offsets.min()) < 0 or bool((offsets % PAGE).any()):
        raise UsageError(
            f"group {planes.group}: a slot offset is negative or no multiple of {PAGE}"
        )
    gaps = np.diff(np.sort(offsets))
    if bool((gaps < planes.shard_bytes).any()):
        raise UsageError(
            f"group {planes.group}: two rows share bytes of the arena; slots are "
            f"{planes.shard_bytes} bytes apart"
        )
