"""Which blocks are the rows of which chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvass.kinds import GroupKind
from kvass.layout.spans import Spans
from kvass.types import GroupLayout

CHUNK = 64


def group(kind: GroupKind, block: int, window: int = 0) -> GroupLayout:
    return GroupLayout(kind, block, ("a",), (100,), window)


FULL, WINDOW, LONG, STATE = (
    group("full", 16),
    group("sliding_window", 16, 20),  # 2 of the 4 blocks of a chunk
    group("sliding_window", 16, 100),
    group("state", 32),
)


def spans(*groups: GroupLayout) -> Spans:
    return Spans(groups, CHUNK)


def test_a_row_is_the_end_of_its_chunk() -> None:
    one = spans(FULL, WINDOW, LONG, STATE)
    ids = list(range(100, 112))
    assert one.row(0, ids, 1) == (104, 105, 106, 107)
    assert one.row(1, ids, 1) == (106, 107)
    assert one.row(2, ids, 1) == (104, 105, 106, 107)
    assert one.row(3, ids[:6], 1) == (103,)


def test_d4_a_group_without_blocks_covers_nothing() -> None:
    """... and so nothing is stored, of any group, until it has some."""
    one = spans(FULL, WINDOW)
    assert one.covered([[1] * 8, []]) == 0
    assert one.covered([[1] * 8, [1] * 7]) == 1
    assert one.covered([[1] * 8, [1] * 8]) == 2


def test_what_left_the_window_is_not_stored() -> None:
    one = spans(FULL, WINDOW, STATE)
    table = [list(range(1, 9)), [0, 0, 0, 11, 12, 13, 14, 15], [0, 0, 0, 0]]
    assert one.storable(table, {}, 0) == 0b001, "one of the window's two blocks is gone"
    assert one.storable(table, {}, 1) == 0b011
    assert one.storable(table, {(2, 1): 20}, 1) == 0b111
    table[0][5] = 0
    assert one.storable(table, {(2, 1): 20}, 1) == 0, "no full row, so nothing"


def test_granted_rows_by_group() -> None:
    one = spans(FULL, WINDOW, STATE)
    table = [list(range(1, 9)), list(range(11, 19)), []]
    blocks = one.to_store(table, {(2, 1): 20}, 0b111, [(0, 1), (1,), (1,)])
    assert blocks == (tuple(range(1, 9)), (17, 18), (20,))
    assert one.to_store(table, {(2, 1): 20}, 0b100, [(1,)]) == ((), (), (20,))


def test_a_load_leaves_out_what_the_engine_has_and_no_hit_reads() -> None:
    one = spans(FULL, WINDOW, LONG, STATE)
    table = [list(range(1, 13)), list(range(21, 33)), list(range(41, 53)), list(range(61, 67))]
    found = one.to_load(table, local=80, first=1, tokens=3 * CHUNK, rows=[2, 1, 2, 1])
    assert found is not None
    blocks, skip = found
    assert blocks == (tuple(range(5, 13)), (31, 32), tuple(range(45, 53)), (66,))
    assert skip == (1, 0, 1, 0), "tokens 64..79 are the engine's; the long window begins at 93"
    found = one.to_load(table, local=176, first=2, tokens=3 * CHUNK, rows=[1, 1, 1, 1])
    assert found is not None
    assert found[1] == (3, 1, 3, 0)


@pytest.mark.parametrize("rows", [[3, 1, 2], [3, 2, 2, 1], [2, 1, 2, 1], [3, 1, 2, 0], []])
def test_a_match_that_is_not_what_the_hit_needs_is_not_used(rows: list[int]) -> None:
    one = spans(FULL, WINDOW, LONG, STATE)
    table = [[1] * 12, [2] * 12, [3] * 12, [4] * 6]
    assert one.to_load(table, local=0, first=0, tokens=3 * CHUNK, rows=[3, 1, 2, 1]) is not None
    assert one.to_load(table, local=0, first=0, tokens=3 * CHUNK, rows=rows) is None


@pytest.mark.parametrize("blocks", [9, 5, 8, 0])
def test_a_table_without_all_blocks_of_a_hit_is_not_used(blocks: int) -> None:
    """A hit may end inside of a chunk, so a row that is short is nothing odd to who copies it."""
    found = spans(FULL).to_load([range(1, blocks + 1)], 0, first=0, tokens=9 * 16, rows=[3])
    assert (found is not None) == (blocks == 9)


@given(
    window=st.integers(1, 300),
    block=st.sampled_from([4, 8, 16, 32, 64]),
    local_blocks=st.integers(0, 40),
    more=st.integers(1, 6),
)
def test_what_is_loaded_is_what_the_hit_needs_and_the_engine_lacks(
    window: int, block: int, local_blocks: int, more: int
) -> None:
    one = group("sliding_window", block, window)
    local = local_blocks * 64 // 16 * 16 // block * block
    first = local // CHUNK
    chunks = first + more
    end = chunks * CHUNK
    begin = min(chunks, max(first, one.needs(end) // CHUNK))
    table = [[1000 + i for i in range(end // block)]]
    found = spans(one).to_load(table, local, first, end, [chunks - begin])
    assert found is not None
    (ids,), (skip,) = found
    wanted = one.blocks(max(local, one.needs(end)), end)
    assert [i - 1000 for i in ids[skip:]] == list(wanted)
