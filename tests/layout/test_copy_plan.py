"""A plan that exists names only blocks and slots that may be touched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.errors import UsageError
from kvass.layout.copy_plan import RowCopy, plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.batch import Region
from kvass.transfer.descriptors import plan_runs

PLANES = GroupPlanes(0, (Plane(0, 1000, 1000), Plane(64_000, 1000, 25)), blocks=64, chunk_blocks=4)
SLOT = PLANES.shard_bytes
GOOD = [[1, 2, 3, 4], [9, 8, 7, 6]]


def test_rows_in_order() -> None:
    plan = plan_copy(PLANES, GOOD, [3 * SLOT, 0])
    assert [(r.slot, r.first, r.blocks.tolist()) for r in plan.rows] == [
        (3 * SLOT, 0, GOOD[0]),
        (0, 0, GOOD[1]),
    ]
    assert (plan.bytes, plan.end, plan.distinct) == (8 * 1025, 4 * SLOT, True)


def test_skip_leaves_the_first_rows_head_alone() -> None:
    plan = plan_copy(PLANES, [[0, 0, 999, 5], [9, 8, 7, 6]], [0, SLOT], skip=3)
    assert [(r.first, r.blocks.tolist()) for r in plan.rows] == [(3, [5]), (0, [9, 8, 7, 6])]
    assert plan.bytes == 5 * 1025


def test_drop_leaves_the_last_rows_end_alone() -> None:
    plan = plan_copy(PLANES, [[1, 2, 3, 4], [9, 0, 999, 0]], [0, SLOT], drop=3)
    assert [(r.first, r.blocks.tolist()) for r in plan.rows] == [(0, [1, 2, 3, 4]), (0, [9])]
    assert plan.bytes == 5 * 1025


def test_one_row_may_be_the_first_and_the_last() -> None:
    plan = plan_copy(PLANES, [[0, 5, 6, 0]], [SLOT], skip=1, drop=1)
    assert [(r.first, r.blocks.tolist()) for r in plan.rows] == [(1, [5, 6])]
    for skip, drop in ((2, 2), (0, 4), (0, -1), (1, 3)):
        with pytest.raises(UsageError, match=f"skip {skip} and drop {drop}"):
            plan_copy(PLANES, [[1, 2, 3, 4]], [SLOT], skip=skip, drop=drop)
    with pytest.raises(UsageError, match="drop 1"):
        plan_copy(PLANES, [], [], drop=1)


def test_nothing_to_copy_is_a_plan() -> None:
    plan = plan_copy(PLANES, np.empty((0, 4), np.int64), [])
    assert (plan.rows, plan.bytes, plan.end, plan.distinct) == ((), 0, 0, True)


def test_a_block_twice_is_seen() -> None:
    assert not plan_copy(PLANES, [[1, 2, 3, 4], [5, 6, 7, 1]], [0, SLOT]).distinct


@pytest.mark.parametrize(
    ("blocks", "slots", "skip", "says"),
    [
        ([[1, 2, 0, 4]], [0], 0, "null block"),
        ([[1, 2, 3, 64]], [0], 0, "64 is out of range 1..63"),
        ([[1, 2, 3, -1]], [0], 0, "-1 is out of range"),
        ([[0, 2, 3, 4], [9, 0, 7, 6]], [0, SLOT], 1, "null block"),
        ([[1, 2, 3]], [0], 0, "shape"),
        ([1, 2, 3, 4], [0], 0, "shape"),
        (GOOD, [0], 0, "shape"),
        ([[1.0, 2.0, 3.0, 4.0]], [0], 0, "float64"),
        (GOOD, [0, SLOT], 4, "skip 4"),
        (GOOD, [0, SLOT], -1, "skip -1"),
        ([], [], 1, "skip 1"),
        (GOOD, [0, -SLOT], 0, "negative"),
        (GOOD, [0, SLOT + 8], 0, "multiple"),
        (GOOD, [SLOT, SLOT], 0, "share bytes"),
        (GOOD, [0, SLOT - 4096], 0, "share bytes"),
    ],
)
def test_misuse_is_refused(blocks: Any, slots: list[int], skip: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_copy(PLANES, blocks, slots, skip=skip)


def test_without_a_null_block_block_0_is_one_like_any_other() -> None:
    plan = plan_copy(PLANES, [[0, 2, 3, 63]], [0], null_block=False)
    assert plan.rows[0].blocks.tolist() == [0, 2, 3, 63]
    for block in (-1, 64):
        with pytest.raises(UsageError, match=f"{block} is out of range 0..63"):
            plan_copy(PLANES, [[0, 2, 3, block]], [0], null_block=False)


@given(st.lists(st.integers(1, 30), max_size=12))
def test_spans_are_the_blocks(ids: list[int]) -> None:
    spans = RowCopy(0, 0, np.array(ids or [1], np.int64)).spans()
    assert [b + i for b, _, n in spans for i in range(n)] == (ids or [1])
    assert [at for _, at, _ in spans] == np.cumsum([0, *(n for _, _, n in spans)])[:-1].tolist()
    assert all(a + n != b for (a, _, n), (b, _, _) in pairwise(spans))


@pytest.mark.parametrize(("skip", "drop"), [(0, 0), (3, 0), (0, 3), (1, 2)])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_gpus_runs_are_the_plans_pages(rows: int, skip: int, drop: int) -> None:
    ids = np.random.default_rng(skip).permutation(np.arange(1, 64))[: 4 * rows].reshape(rows, 4)
    plan = plan_copy(PLANES, ids, [2 * i * SLOT for i in range(rows)], skip=skip, drop=drop)
    moved = {
        (device + i, host + i)
        for runs in plan_runs((plan,), [Region(0, 1 << 20)], 1 << 30)
        for device, host, count in zip(runs.device, runs.host, runs.count, strict=True)
        for i in range(count)
    }
    expected = {
        (
            plane.base + block * plane.block_stride + i,
            row.slot + at + (row.first + n) * plane.run + i,
        )
        for row in plan.rows
        for plane, at in zip(PLANES.planes, PLANES.slot_offsets(), strict=True)
        for n, block in enumerate(row.blocks.tolist())
        for i in range(plane.run)
    }
    assert moved == expected
