"""The index against a dictionary, with keys that fight for the same bucket and fingerprint."""

from __future__ import annotations

import errno
import mmap

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvass.core.rows import index as index_file
from kvass.core.rows.blocks import BlockPrints
from kvass.core.rows.index import ABSENT, KeyIndex, key_array, odd_numbers
from kvass.core.rows.row_table import RowTable
from kvass.types import KEY_WORDS, I64Array, U64Array

KEYS = st.tuples(*[st.integers(0, 3)] * KEY_WORDS)
STEPS = st.lists(st.tuples(st.booleans(), st.lists(KEYS, max_size=40, unique=True)), max_size=12)


class Crowded(KeyIndex):
    """Three buckets and two fingerprints for all, whatever the real ones are made of."""

    def _place(self, keys: U64Array) -> tuple[I64Array, U64Array]:
        first = keys[:, 0]
        return (first % np.uint64(3)).astype(np.int64), first & np.uint64(2) | np.uint64(1)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index has four buckets at first, and moves half a bucket for each row when it grows."""
    monkeypatch.setattr(index_file, "_SMALLEST", 4)
    monkeypatch.setattr(index_file, "MOVED", 0)


def as_array(keys: list[tuple[int, ...]]) -> U64Array:
    return np.array(keys, np.uint64).reshape(-1, KEY_WORDS)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_agrees_with_a_dictionary(
    small: None, steps: list[tuple[bool, list[tuple[int, ...]]]]
) -> None:
    table = RowTable()
    table.grow(512)
    index, model, fresh = (
        Crowded(table, odd_numbers(b"")),
        dict[tuple[int, ...], int](),
        iter(range(512)),
    )
    for adding, keys in steps:
        chosen = [k for k in keys if (k in model) != adding]
        rows = np.array([next(fresh) if adding else model.pop(k) for k in chosen], np.int64)
        if adding:
            table.key[rows] = as_array(chosen)
            model.update(zip(chosen, rows.tolist(), strict=True))
            index.add(rows)
        else:
            index.remove(rows)
        everything = sorted({*keys, *model})
        want = [model.get(k, ABSENT) for k in everything]
        assert index.find(as_array(everything)).tolist() == want
        assert len(index) == len(model)
        assert sorted(index.rows().tolist()) == sorted(model.values())


def test_grows_a_little_at_a_time(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest rows leave while others come; those that are left are found at each step."""
    table = RowTable()
    table.grow(2000)
    table.key[:, 0] = np.arange(2000)
    index, rows, inserted = KeyIndex(table, odd_numbers(b"")), np.arange(2000), [0]
    insert = index._insert

    def counted(some: I64Array) -> None:
        inserted.append(len(some))
        insert(some)

    monkeypatch.setattr(index, "_insert", counted)
    for step in range(250):
        index.add(rows[8 * step : 8 * step + 8])
        index.remove(rows[2 * step : 2 * step + 2])
        found = index.find(table.key)
        there = rows[2 * step + 2 : 8 * step + 8].tolist()
        assert found[found != ABSENT].tolist() == there == sorted(index.rows().tolist())
    assert max(inserted) <= 32, "four buckets of eight are moved at a time"


@pytest.mark.parametrize("before", [0, 3, 200])
def test_very_many_rows_are_filled_in(
    small: None, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(index_file, "PART", 16)
    table, rows = RowTable(), np.arange(1000)
    table.grow(1000)
    table.key[:, 0] = np.arange(1000)
    index = Crowded(table, odd_numbers(b""))
    index.add(rows[:before])
    for many in (rows[before:before], rows[before:]):
        index.fill(many)
    assert len(index) == 1000
    assert index.find(table.key).tolist() == rows.tolist()
    index.remove(rows[::2])
    assert sorted(index.rows().tolist()) == rows[1::2].tolist()


def test_grows_and_empties() -> None:
    rng = np.random.default_rng(0)
    table = RowTable()
    table.grow(20_000)
    table.key[:] = rng.integers(0, 1 << 64, (len(table), KEY_WORDS), np.uint64)
    index, rows = KeyIndex(table, odd_numbers(b"")), np.arange(20_000)
    for part in np.split(rows, 40):
        index.add(part)
    assert (index.find(table.key[rows]) == rows).all()
    wrong = table.key[rows] ^ np.array([0, 0, 0, 1], np.uint64)
    assert (index.find(wrong) == ABSENT).all(), "the fingerprint alone is not the key"
    index.remove(rows[::2])
    assert (index.find(table.key[rows[::2]]) == ABSENT).all()
    assert (index.find(table.key[rows[1::2]]) == rows[1::2]).all()
    index.remove(rows[1::2])
    assert (index.find(table.key[rows]) == ABSENT).all()


@pytest.mark.parametrize("width", [8, 16, 20, 32])
def test_keys_of_any_width(width: int) -> None:
    blob = bytes(range(1, 3 * width + 1))
    keys = key_array(blob, width)
    assert keys.shape == (3, KEY_WORDS)
    assert [k.tobytes()[:width] for k in keys] == [
        blob[i : i + width] for i in (0, width, 2 * width)
    ]
    assert not any(k.tobytes()[width:].strip(b"\0") for k in keys)


def test_a_kernel_without_huge_pages_has_an_index_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There madvise refuses what it does not know."""

    class Plain(mmap.mmap):
        def madvise(self, *_: object) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    table = RowTable()
    assert table.grow(8)
    made = KeyIndex(table, odd_numbers(b""))
    while made.cold:
        made.warm()
    made.add(np.arange(1))
    prints = BlockPrints(table, 4)
    prints.note(np.arange(1), np.ones((1, 4), np.uint64), 0)
    assert prints.of[0].all()
