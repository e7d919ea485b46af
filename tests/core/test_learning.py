"""Which rows go first by how often they were used, and what decides that."""

from __future__ import annotations

import numpy as np
import pytest

from kvass.core.eviction import Learned
from kvass.core.index import odd_numbers
from kvass.core.learning import Learning
from kvass.core.rows import AGAIN, KEY_WORDS, READY, SAMPLED, RowTable
from kvass.types import U64Array
from tests.core.rig import Rig

ODD = odd_numbers(b"seed")
SLOTS = 2000


def keys(*numbers: int) -> U64Array:
    made = np.zeros((len(numbers), KEY_WORDS), np.uint64)
    made[:, 0] = numbers
    return made


# ---------------------------------------------------------------- counting


def test_a_chunk_of_a_second_request_was_used_again() -> None:
    rig = Rig(core={"policy": "learned"})
    engine, table = rig.engine(), rig.machine.state.store.table

    def again() -> list[bool]:
        return [bool(use & AGAIN) for use in table.use[table.state == READY]]

    engine.store("a", "b")
    engine.store("a", "b", "c")  # the same request, which goes on
    assert again() == [False, False, False]
    engine.lookup("a", "b")
    assert sorted(again()) == [False, True, True]


def test_a_key_that_had_a_row_before_was_used_before_and_so_were_those_before_it() -> None:
    learning = Learning(ODD, 1)
    assert not (learning.added(keys(3), SLOTS, 0) & AGAIN).any()
    use = learning.added(keys(1, 2, 3, 4), SLOTS, 1)
    assert [bool(each & AGAIN) for each in use] == [True, True, True, False]


def test_few_keys_are_sampled_and_always_the_same() -> None:
    numbers = range(10_000)
    use = Learning(ODD, 1).added(keys(*numbers), SLOTS, 0) & SAMPLED
    assert 500 < use.sum() < 750, "one in 16"
    fewer = Learning(ODD, 1).added(keys(*numbers), 100 * SLOTS, 0) & SAMPLED
    assert 30 < fewer.sum() < 130, "one in 128"
    assert not (fewer & ~use).any()


# ---------------------------------------------------------------- deciding


def play(learning: Learning, turns: range, *, scan: bool) -> None:
    """``scan``: each turn 200 new chunks, and some of 1,000 others that come in any order. Else
    each chunk is used once more, 600 chunks later: LRU hits all of them."""
    others = np.random.default_rng(turns.start).integers(1000, size=(turns.stop, 50))
    for turn in turns:
        fresh = range(10_000 + turn * 200, 10_200 + turn * 200)
        learning.added(keys(*fresh), SLOTS, turn)
        if scan:
            learning.used(keys(*others[turn].tolist()), SLOTS, turn)
        else:
            learning.used(keys(*(x - 600 for x in fresh)), SLOTS, turn)


def test_what_was_used_once_goes_sooner_when_that_hits_more() -> None:
    learning = Learning(ODD, 1)
    play(learning, range(3), scan=True)
    assert learning.weight == 1, "it is too early to say"
    play(learning, range(3, 300), scan=True)
    assert learning.weight > 1
    play(learning, range(300, 800), scan=False)
    assert learning.weight == 1, "it is LRU again where LRU hits more"


def test_one_small_lead_is_luck_and_several_are_not() -> None:
    learning = Learning(ODD, 1)
    weights = []
    for _ in range(4):
        learning._caches[1].hits = 10
        learning._decide()
        weights.append(learning.weight)
    assert (weights[0], weights[-1]) == (1, 2)


def test_where_lru_hits_all_it_stays() -> None:
    learning = Learning(ODD, 1)
    for turn in range(0, 600, 10):
        play(learning, range(turn, turn + 10), scan=False)
        assert learning.weight == 1


def test_memory_is_bounded_and_grows_with_the_rows() -> None:
    learning = Learning(ODD, 1)
    play(learning, range(300), scan=True)
    assert len(learning._known) == 8192
    for cache in learning._caches:
        assert len(cache._once) + len(cache._again) == SLOTS // 16
    assert len(learning._seen) == 5 * (SLOTS // 16)
    learning.added(keys(1), 3 * SLOTS, 0)
    assert (len(learning._known), len(learning._seen)) == (32768, 0)
    learning.added(keys(*range(20_000)), 3 * SLOTS, 0)
    assert len(learning._seen) == 256, "what one step plays is bounded"


# ---------------------------------------------------------------- evicting


def rows_of(weight: int) -> tuple[RowTable, Learned]:
    """Rows 0 to 7, touched in that order; the odd ones were used again."""
    table = RowTable()
    table.grow(8)
    table.state[:8], table.use[1:8:2] = READY, AGAIN
    learned = Learned(table, ODD, weight)
    rows = np.arange(8)
    learned.touched(rows, table.stamp_rows(rows), counts=False)
    return table, learned


@pytest.mark.parametrize(
    ("weight", "order"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, [0, 2, 4, 1, 3, 6, 5, 7]),  # ages 8 to 1; those of the even rows count twice
        (8, [0, 2, 4, 6, 1, 3, 5, 7]),
    ],
)
def test_the_oldest_row_goes_and_what_was_used_once_ages_faster(
    weight: int, order: list[int]
) -> None:
    table, learned = rows_of(weight)
    rows, oldest = learned.victims(8, table.clock)
    assert (rows.tolist(), oldest) == (order, 0)


def test_what_was_used_or_pinned_since_it_was_found_does_not_go() -> None:
    table, learned = rows_of(8)
    assert learned.victims(2, table.clock)[0].tolist() == [0, 2]
    table.pins[2] = 1
    touched = np.array([0])
    learned.touched(touched, table.stamp_rows(touched), counts=True)
    assert learned.victims(2, table.clock)[0].tolist() == [4, 6]
    assert learned.victims(8, table.clock)[0].tolist() == [4, 6, 1, 3, 5, 7, 0]
    assert learned.victims(1, 4)[0].tolist() == [1], "4 and 6 were found, and are protected"
    rows, oldest = learned.victims(9, 4)
    assert (rows.tolist(), oldest) == ([1, 3], 1)
    rows, oldest = learned.victims(9, 1)
    assert (rows.tolist(), oldest) == ([], 1), "none may go"
