"""The core's parts by themselves: spans, extent sets, rows, the LRU log."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.core.rows.extents import STAYS, ExtentMap, FreeSpace
from kvass.types import I64Array

# ---------------------------------------------------------------- spans


def give(spans: FreeSpace, start: int, length: int) -> None:
    spans.give(np.array([start]), np.array([length]))


def test_spans_take_first_fit_and_coalesce() -> None:
    spans = FreeSpace(10)
    assert [spans.take(3), spans.take(4), spans.take(4), spans.take(3)] == [0, 3, None, 7]
    give(spans, 0, 3)
    give(spans, 7, 3)
    assert (spans.starts.tolist(), spans.lengths.tolist(), spans.total) == ([0, 7], [3, 3], 6)
    give(spans, 3, 4)
    assert (spans.starts.tolist(), spans.lengths.tolist()) == ([0], [10])


@pytest.mark.parametrize("again", [(0, 2), (1, 1), (1, 5), (6, 3)])
def test_what_is_free_cannot_be_given_back(again: tuple[int, int]) -> None:
    spans = FreeSpace(8)
    spans.take(8)
    give(spans, 0, 2)
    give(spans, 6, 2)
    with pytest.raises(AssertionError, match="twice"):
        give(spans, *again)


# ---------------------------------------------------------------- extent sets


def test_a_set_has_one_extent_per_shard_and_as_many_slots_as_fit() -> None:
    extents = ExtentMap(100)
    one = extents.add(shard_bytes=(10, 5), slots=4)
    assert one is not None
    assert (one.slots, one.bases, one.extent_bytes, one.first_row) == (4, (0, 40), (40, 20), 0)
    two = extents.add((10, 5), 4)
    assert two is not None
    assert (two.slots, two.first_row, extents.free_bytes) == (2, 4, 10)
    assert extents.add((10, 5), 4) is None
    assert extents.free_bytes == 10


def line_of(*value: int | None) -> tuple[ExtentMap, I64Array]:
    """Sets 0, 1, ... of ten bytes each, side by side, and what they are worth; None: they stay."""
    extents = ExtentMap(10 * len(value))
    assert [s.id for _ in value if (s := extents.add((10,), 1))] == [*range(len(value))]
    return extents, np.array([STAYS if v is None else v for v in value])


def test_of_a_long_run_only_the_fewest_sets_go() -> None:
    extents, value = line_of(1, 1, 2, 1, None, 1)
    assert extents.cheapest((30,), 1, 1, value).tolist() == [0, 1, 2]
    extents.remove(np.array([3]))
    assert extents.cheapest((30,), 1, 1, value).tolist() == [1, 2]


def test_many_sets_are_chosen_at_once() -> None:
    extents, value = line_of(3, 0, 8, 1, 2, None, 9, 4)
    assert extents.cheapest((10,), 1, 3, value).tolist() == [1, 3, 4]
    assert extents.cheapest((20,), 1, 2, value).tolist() == [0, 1, 3, 4]
    assert extents.cheapest((20,), 1, 9, value).tolist() == [0, 1, 2, 3, 6, 7], "as often as it can"
    assert extents.cheapest((20, 10), 1, 2, value).tolist() == [1, 3, 4], "of unequal ones, one"


@settings(max_examples=200)
@given(
    st.lists(st.none() | st.integers(0, 9), min_size=1, max_size=12),
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_what_is_chosen_makes_room_and_nothing_cheaper_would(
    worth: list[int | None], shards: list[int], count: int
) -> None:
    extents, value = line_of(*worth)
    chosen = extents.cheapest(tuple(shards), 1, count, value)
    assert (value[chosen] < STAYS).all()
    cheaper = np.flatnonzero(value < (value[chosen].max() if len(chosen) else STAYS))
    if count == 1 and len(cheaper):
        other, _ = line_of(*worth)
        other.remove(cheaper)
        assert other.add(tuple(shards), 1) is None, "cheaper sets were enough"
    if len(chosen):
        extents.remove(chosen)
        assert extents.add(tuple(shards), 1) is not None, "there is no room after all"


def test_a_removed_set_leaves_its_bytes_and_row_ids() -> None:
    extents = ExtentMap(20)
    one = extents.add((10,), 2)
    assert one is not None
    extents.remove(np.array([one.id]))
    again = extents.add((5,), 4)
    assert again is not None
    assert (again.first_row, again.bases, extents.free_bytes) == (0, (0,), 0)
