"""What a hit needs of each layer group, and the longest hit, against brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvass.core.matching.coverage import first_chunk, longest_hit
from kvass.kinds import KINDS, GroupKind
from kvass.types import PAGE, GroupLayout
from tests.support.reference.reads import read_next

DEEPSEEK_V4 = (256, 64, 64, 4, 8)


def group(kind: GroupKind, block: int, window: int = 0, page: int = 100) -> GroupLayout:
    return GroupLayout(kind, block, ("a", "b"), (page, page), window)


@st.composite
def groups(draw: st.DrawFn, block_sizes: tuple[int, ...] = (1, 4, 8, 16, 48)) -> GroupLayout:
    kind = draw(st.sampled_from(list(KINDS)))
    window = draw(st.integers(1, 700)) if KINDS[kind].windowed else 0
    return group(kind, draw(st.sampled_from(block_sizes)), window)


@given(one=groups(), tokens=st.integers(0, 1500))
@example(one=group("sliding_window", 16, 1), tokens=256)
def test_needs_is_what_the_next_token_attends_to(one: GroupLayout, tokens: int) -> None:
    assert list(range(one.needs(tokens), tokens)) == read_next(one, tokens)


@given(one=groups(), ends=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5))
def test_needs_of_many_is_needs_of_each(one: GroupLayout, ends: list[int]) -> None:
    assert one.needs(np.array(ends, np.int64)).tolist() == [one.needs(n) for n in ends]


def test_a_token_range_is_exact_in_every_block_size() -> None:
    """DeepSeek-V4's block sizes: 4,096 tokens are 16, 64, 64, 1,024 and 512 blocks."""
    sizes = [len(group("full", block).blocks(0, 4096)) for block in DEEPSEEK_V4]
    assert sizes == [16, 64, 64, 1024, 512]


@given(
    one=groups((*DEEPSEEK_V4, 16, 32, 384, 544)),
    first=st.integers(0, 500),
    count=st.integers(0, 500),
    cut=st.integers(0, 600),
)
def test_blocks_and_tokens_are_each_others_inverse(
    one: GroupLayout, first: int, count: int, cut: int
) -> None:
    blocks = range(first, first + count)
    begin, end = first * one.block_tokens, (first + count) * one.block_tokens
    assert one.blocks(begin, end) == blocks
    holding = {t // one.block_tokens for t in range(begin, begin + cut)}
    assert set(one.blocks(begin, begin + cut)) == holding


@given(one=groups((4, 8, 16, 32, 64, 256)), chunk=st.sampled_from([256, 512, 768]))
def test_a_row_keeps_every_block_that_some_hit_needs_and_few_others(
    one: GroupLayout, chunk: int
) -> None:
    """Of chunk 2, over all hits that end at or after it."""
    needed = set[int]()
    for end in range(3, 12):
        first = max(one.needs(end * chunk), 2 * chunk)
        needed |= set(one.blocks(first, min(end, 3) * chunk)) if first < 3 * chunk else set()
    kept = set(one.blocks(2 * chunk, 3 * chunk)[-one.row_blocks(chunk) :])
    kept = kept if one.row_blocks(chunk) else set()
    assert needed <= kept
    if one.kind != "chunked_local":
        assert needed == kept


def test_a_row_of_nothing_still_has_an_address() -> None:
    local = group("chunked_local", 16, 128)
    assert local.row_blocks(256) == 0
    assert local.shard_bytes(256) == PAGE
    assert GroupLayout("full", 16, (), ()).shard_bytes(256) == PAGE


def brute_force(
    groups: list[GroupLayout], there: list[list[bool]], chunk: int, first: int, spare: int
) -> int:
    proves = [one for one in groups if one.kind == "full"] or [
        one for one in groups if one.window_tokens
    ]
    best = first
    for chunks in range(first + 1, len(there[0]) - spare + 1):
        if all(
            rows[token // chunk]
            for one, rows in zip(groups, there, strict=True)
            for token in read_next(one, chunks * chunk)
            if token // chunk >= first
        ) and all(
            all(rows[chunks : chunks + spare])
            for one, rows in zip(groups, there, strict=True)
            if one in proves
        ):
            best = chunks
    return best


@given(data=st.data())
def test_the_longest_hit_is_brute_forces(data: st.DataObject) -> None:
    some = data.draw(st.lists(groups((1, 2, 4)), min_size=1, max_size=4))
    chunk = math.lcm(4, data.draw(st.integers(4, 60)))
    count = data.draw(st.integers(0, 12))
    rows = st.lists(st.sampled_from([True, True, True, False]), min_size=count, max_size=count)
    there = [data.draw(rows) for _ in some]
    first = data.draw(st.integers(0, count))
    spare = data.draw(st.sampled_from([0, 1, 1, 2, 20]))
    found = longest_hit(some, [np.array(x, np.bool_) for x in there], chunk, first, spare)
    assert found == brute_force(some, there, chunk, first, spare)


@pytest.mark.parametrize(
    ("kinds", "there", "hit"),
    [
        (["full"], ["1111"], 3),
        (["full"], ["1101"], 1),
        (["full"], ["1"], 0),
        (["full", "state"], ["1111", "0010"], 3),
        (["full", "state"], ["1110", "0010"], 0),
        (["full", "sliding_window"], ["1111", "0010"], 3),
        (["sliding_window"], ["0111"], 3),
        (["sliding_window"], ["0101"], 0),
        (["state"], ["0010"], 3),
    ],
)
def test_what_is_spared_proves_what_came_next(kinds: list[Any], there: list[str], hit: int) -> None:
    """Of every full group, of windows if there is none; a state after the hit proves nothing."""
    some = [group(kind, 64, window=10) for kind in kinds]
    rows = [np.array(list(map(int, row)), np.bool_) for row in there]
    assert longest_hit(some, rows, 64, 0, 1) == hit


@pytest.mark.parametrize(
    ("chunks", "first", "begins"),
    [(8, 0, (0, 6, 7)), (8, 7, (7, 7, 7)), (1, 0, (0, 0, 0))],
)
def test_the_first_chunk_of_a_hit(chunks: int, first: int, begins: tuple[int, ...]) -> None:
    kinds = group("full", 16), group("sliding_window", 16, 300), group("state", 256)
    assert tuple(first_chunk(one, chunks, 256, first) for one in kinds) == begins
