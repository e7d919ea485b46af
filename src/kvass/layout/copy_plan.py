"""Copy plans: which blocks and which slots a mover copies, made from block ids and slots of rows.

A plan is always safe to carry out: every block id and slot is checked when the plan is made, and no
mover checks them again (numpy's gather with ``mode="clip"`` would copy the *wrong block* for an id
out of range).

A plan has no direction: a store gathers ``blocks -> slot``, a load scatters ``slot -> blocks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvass.errors import UsageError
from kvass.layout.describe import GroupPlanes
from kvass.types import PAGE, I64Array


@dataclass(frozen=True, slots=True, eq=False)
class RowCopy:
    """A row to copy, or a part of it: pages ``[first, first + len(blocks))`` of the row.

    ``slot`` is the byte offset of the row's shard in the arena, ``blocks`` int64 of shape ``(n,)``.
    """

    slot: int
    first: int
    blocks: I64Array

    def spans(self) -> list[tuple[int, int, int]]:
        """``blocks`` as runs of consecutive ids: ``(block, at, count)`` says that blocks
        ``block .. block + count - 1`` are pages ``first + at ..`` of the row."""
        cuts = (np.flatnonzero(np.diff(self.blocks) != 1) + 1).tolist()
        return [
            (int(self.blocks[lo]), lo, hi - lo)
            for lo, hi in zip([0, *cuts], [*cuts, len(self.blocks)], strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """The rows of one group to copy. ``bytes`` is the size of all copied pages, and ``end`` is the
    first byte of the arena behind the last slot.

    ``distinct`` says that no block occurs twice, which a load needs.
    """

    planes: GroupPlanes
    rows: tuple[RowCopy, ...]
    bytes: int
    end: int
    distinct: bool


def plan_copy(
    planes: GroupPlanes,
    blocks: npt.ArrayLike,
    slots: Sequence[int] | I64Array,
    *,
    skip: int = 0,
    drop: int = 0,
    null_block: bool = True,
) -> CopyPlan:
    """Plan the copy of ``len(slots)`` rows of one group.

    ``blocks`` has shape ``(rows, planes.chunk_blocks)``: the block ids of each chunk. ``slots`` are
    byte offsets in the arena (``Slots.offsets``). ``skip`` leading blocks of the *first* row are
    left out, and their ids are not checked: a load skips them if the engine's local hit ends inside
    that chunk. The last ``drop`` blocks of the *last* row are left out, too, if the hit or the
    stored prompt ends before them. At least one block of each row must be left. ``null_block``:
    block 0 is the engine's null block; False: it is a block like any other.

    Raises :class:`UsageError`: shapes that do not fit, a block id that is 0 (the null block) or out
    of range, a slot that is negative, unaligned or overlaps another.
    """
    offsets = np.asarray(slots, np.int64).reshape(-1)
    raw = np.asarray(blocks)
    if raw.size == 0:
        raw = raw.reshape(0, planes.chunk_blocks).astype(np.int64)
    ids, used, error = raw, offsets, _misfit(planes, raw, len(offsets), skip, drop)
    if not error:
        ids = np.ascontiguousarray(raw, np.int64)
        used = ids.reshape(-1)[skip : ids.size - drop].copy()
        used.sort()
        error = _unsafe(planes, used, offsets, int(null_block))
    if error:
        raise UsageError(f"group {planes.group}: {error}")
    begins, ends = [0] * len(ids), [planes.chunk_blocks] * len(ids)
    if len(ids):
        begins[0], ends[-1] = skip, planes.chunk_blocks - drop
    rows = tuple(
        RowCopy(slot, begin, row[begin:end])
        for slot, row, begin, end in zip(offsets.tolist(), ids, begins, ends, strict=True)
    )
    return CopyPlan(
        planes=planes,
        rows=rows,
        bytes=len(used) * planes.block_bytes,
        end=int(offsets.max()) + planes.shard_bytes if rows else 0,
        distinct=bool((used[1:] != used[:-1]).all()),
    )


def _misfit(
    planes: GroupPlanes, blocks: npt.NDArray[np.generic], rows: int, skip: int, drop: int
) -> str:
    """What is wrong with the shape of a plan's arguments; empty if nothing is."""
    shape = (rows, planes.chunk_blocks)
    if blocks.dtype.kind not in "iu" or blocks.shape != shape:
        return (
            f"block ids of shape {blocks.shape} ({blocks.dtype}) for {rows} slots; give "
            f"integers of shape {shape}"
        )
    most = planes.chunk_blocks - 1 if rows else 0
    left_out = skip + drop if rows == 1 else max(skip, drop)
    if min(skip, drop) < 0 or left_out > most:
        return f"cannot skip {skip} and drop {drop} blocks of a chunk of {planes.chunk_blocks}"
    return ""


def _unsafe(planes: GroupPlanes, used: I64Array, offsets: I64Array, least: int) -> str:
    """What is wrong with the sorted block ids ``used``, or with the slots; empty if nothing is.
    ``least``: the lowest valid block id."""
    if not len(used):
        return ""
    low, high = int(used[0]), int(used[-1])
    if low == 0 < least:
        return "block 0 is the null block: never stored or loaded"
    if low < 0 or high >= planes.blocks:
        return f"block id {low if low < 0 else high} is out of range {least}..{planes.blocks - 1}"
    slots = offsets.copy()
    slots.sort()
    if int(slots[0]) < 0 or bool((slots % PAGE).any()):
        return f"a slot offset is negative or no multiple of {PAGE}"
    if bool((slots[1:] - slots[:-1] < planes.shard_bytes).any()):
        return f"two rows share bytes of the arena; slots are {planes.shard_bytes} bytes apart"
    return ""
