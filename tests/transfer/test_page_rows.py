"""``PageRows`` moves the right bytes and no others, wherever pages and slots lie."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from kvass.errors import UsageError
from kvass.layout.copy_plan import plan_copy
from kvass.layout.describe import GroupPlanes, Plane
from kvass.transfer.page_rows import PageRows

PAGES, SLOTS = 12, 20
LAYOUTS = {
    "one plane": [Plane(3, 4100, 4099)],
    "layers outermost": [Plane(5 + i * 1200, 100, 99) for i in range(4)],
    "pages outermost": [Plane(7 + i * 33, 200, 33) for i in range(5)],
    "two regions": [Plane(0, 64, 64), Plane(9, 70, 70, 1), Plane(900, 64, 64)],
}


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("planes", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("pages", "slots"),
    [
        ([0, 1, 2, 3], [4, 5, 6, 7]),
        ([0, 1, 2, 5, 6, 11], [4, 5, 7, 8, 9, 3]),
        ([3, 2, 1, 0], [0, 1, 2, 3]),
        ([1, 3, 5], [7, 8, 9]),
        ([11], [19]),
    ],
    ids=["in a row", "in runs", "backwards", "every second", "one"],
)
def test_these_pages_are_moved_and_nothing_else(
    kind: Literal["store", "load"], planes: list[Plane], pages: list[int], slots: list[int]
) -> None:
    """The model is a loop over single pages; all memory is compared."""
    group = GroupPlanes(0, tuple(planes), PAGES, 1)
    random = np.random.default_rng(0)
    regions = [random.integers(0, 256, 60_000, np.uint8) for _ in range(2)]
    arena = random.integers(0, 256, SLOTS * group.shard_bytes, np.uint8)
    offsets = [slot * group.shard_bytes for slot in slots]
    plan = plan_copy(group, [[page] for page in pages], offsets, null_block=False)
    right, right_arena = [region.copy() for region in regions], arena.copy()
    for page, slot in zip(pages, offsets, strict=True):
        for plane, at in zip(planes, group.slot_offsets(), strict=True):
            begin = plane.base + page * plane.block_stride
            memory = right[plane.region][begin : begin + plane.run]
            row = right_arena[slot + at : slot + at + plane.run]
            if kind == "store":
                row[:] = memory
            else:
                memory[:] = row
    PageRows(regions, group).copy(kind, plan, arena)
    assert np.array_equal(arena, right_arena)
    assert all(map(np.array_equal, regions, right))


def test_regions_that_are_no_bytes_or_too_short_are_refused() -> None:
    group = GroupPlanes(0, (Plane(0, 64, 64),), PAGES, 1)
    with pytest.raises(UsageError, match="ends at byte"):
        PageRows([np.zeros(64 * PAGES - 1, np.uint8)], group)
    fixed = np.zeros(64 * PAGES, np.uint8)
    fixed.flags.writeable = False
    with pytest.raises(UsageError, match="region 0 is read-only"):
        PageRows([fixed], group)
