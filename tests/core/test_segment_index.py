"""The index of chunks by their tokens: its entries by namespace, and when they leave."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvass.blend.match import Chunks, entry_bytes
from kvass.core.rows import segment_index
from kvass.core.rows.index import ABSENT
from kvass.core.rows.listeners import Left
from kvass.core.rows.row_table import READY
from kvass.core.rows.segment_index import SIZES, NamespaceEntries, SegmentIndex
from kvass.types import U64Array
from tests.core.rows import keys

TOKENS = 16
SPACE, OTHER_SPACE = keys(0)[0], keys(1)[0]


def index_of(entries: int = 100) -> SegmentIndex:
    return SegmentIndex(entries * entry_bytes(TOKENS), b"seed")


def begin(
    index: SegmentIndex, namespace: int, tokens: int = TOKENS, in_tiers: bool = False
) -> NamespaceEntries:
    made = index.begin(namespace, tokens, in_tiers)
    assert made is not None
    return made


def chunks(*numbers: int, tokens: int = TOKENS) -> Chunks:
    """Chunks that differ in all tokens, with the keys of ``numbers``."""
    text = np.arange(tokens, dtype=np.uint32) + 1000 * np.array(numbers, np.uint32)[:, None]
    none = np.zeros_like(keys(*numbers))
    return Chunks(text, keys(*numbers), none, np.zeros(len(numbers), np.int64))


def add(entries: NamespaceEntries, *numbers: int, tokens: int = TOKENS) -> int:
    return entries.chunks.add(entries.number, SPACE, chunks(*numbers, tokens=tokens))


def known(entries: NamespaceEntries, *numbers: int) -> list[bool]:
    found = entries.chunks.find(entries.number, keys(*numbers))
    return [row != ABSENT for row in found.tolist()]


def test_a_chunk_is_indexed_once_and_again_only_in_another_space() -> None:
    entries = begin(index_of(), 1)
    assert add(entries, 1, 2, 2) == 2
    assert add(entries, 1, 2) == 0
    assert known(entries, 1, 2, 3) == [True, True, False]
    assert entries.chunks.add(entries.number, OTHER_SPACE, chunks(1)) == 1
    assert entries.chunks.matcher.count == 2, "the entry of the other space was replaced"


def test_namespaces_share_the_memory_of_a_size_and_no_entries() -> None:
    index = index_of()
    one, other = begin(index, 1), begin(index, 2)
    assert begin(index, 1) is one
    assert one.chunks is other.chunks
    add(one, 1)
    assert (known(one, 1), known(other, 1)) == ([True], [False])


def test_there_are_so_many_sizes_of_chunks_and_no_more_until_one_is_unused() -> None:
    index = index_of()
    for n in range(SIZES):
        begin(index, n, TOKENS + n)
    assert index.begin(9, TOKENS + SIZES, in_tiers=False) is None
    begin(index, 10, TOKENS)
    index.clear(1)
    index.reclaim()
    begin(index, 9, TOKENS + SIZES)


def test_without_room_for_one_chunk_nothing_is_indexed() -> None:
    index = SegmentIndex(entry_bytes(TOKENS) - 1, b"seed")
    assert index.begin(1, TOKENS, in_tiers=False) is None
    assert index.sizes == {}


def left(index: SegmentIndex, namespace: int, gone: U64Array) -> None:
    """Rows with the keys ``gone`` left L1."""
    row_class: Any = SimpleNamespace(namespace=namespace)
    index.left(Left(row_class, np.arange(len(gone)), gone, READY, "capacity", 0.0))


@pytest.mark.parametrize("in_tiers", [False, True])
def test_an_entry_leaves_with_its_row_unless_a_tier_may_have_it(in_tiers: bool) -> None:
    index = index_of()
    entries = begin(index, 1, in_tiers=in_tiers)
    add(entries, 1, 2)
    left(index, 1, keys(1, 1, 7))
    assert known(entries, 1, 2) == [in_tiers, True]
    index.forget(1, keys(1))
    assert known(entries, 1, 2) == [False, True]
    left(index, 5, keys(1))
    index.forget(5, keys(1))


def test_entries_go_when_their_namespace_loses_its_last_tier_and_stay_when_it_gets_one() -> None:
    index = index_of()
    add(begin(index, 1), 1)
    index.reaches_tiers(1, in_tiers=True)
    entries = index.of[1]
    assert (entries.in_tiers, known(entries, 1)) == (True, [True])
    index.reaches_tiers(1, in_tiers=True)
    assert index.of[1] is entries
    index.reaches_tiers(1, in_tiers=False)
    assert 1 not in index.of
    index.reaches_tiers(5, in_tiers=True)


def test_a_cleared_namespace_has_new_entries_and_the_old_ones_memory_comes_back_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment_index, "SLICE", 2)
    index = index_of()
    add(begin(index, 1), *range(5))
    index.clear(1)
    new = begin(index, 1)
    assert known(new, 0) == [False]
    counts = []
    while index.cleared:
        index.reclaim()
        counts.append(new.chunks.matcher.count)
    assert counts == [3, 1, 0]
    index.clear(1)
    index.reclaim()
    assert index.sizes == {}, "nobody uses that size any more"


def test_a_full_index_drops_the_entry_that_was_used_longest_ago_and_its_key() -> None:
    index = index_of(entries=8)
    entries = begin(index, 1)
    add(entries, *range(8))
    assert add(entries, 0) == 0, "it is in use again"
    add(entries, 8)
    assert known(entries, 0, 8) == [True, True]
    assert sum(known(entries, *range(1, 8))) < 7
    assert len(entries.chunks.by_key) == entries.chunks.matcher.count <= 8
