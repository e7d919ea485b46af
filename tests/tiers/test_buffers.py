"""Memory of records: cut into parts and put into groups, without a byte too many or too few."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.testing.tier_suite import data_of
from kvass.tiers.buffers import batches_by_size, split

SHAPE = (5000, 0, 17, 9000)


@pytest.mark.parametrize("size", [1, 7, 4000, 4999, 5000, 5001, 14_017, 99_999])
def test_parts_are_the_buffers_bytes_in_order(size: int) -> None:
    buffers = data_of(b"key", SHAPE)
    parts = [b"".join(part) for part in split(buffers, size)]
    assert b"".join(parts) == b"".join(buffer.tobytes() for buffer in buffers)
    assert {len(part) for part in parts[:-1]} <= {size}
    assert 0 < len(parts[-1]) <= size


@given(st.lists(st.integers(0, 10), max_size=12), st.integers(1, 20))
def test_groups_are_all_of_it_and_as_few_as_neighbours_allow(sizes: list[int], most: int) -> None:
    found = [sizes[group.start : group.stop] for group in batches_by_size(sizes, most)]
    assert [size for group in found for size in group] == sizes
    assert all(group and (sum(group) <= most or len(group) == 1) for group in found)
    for group, following in pairwise(found):
        assert sum(group) + following[0] > most
