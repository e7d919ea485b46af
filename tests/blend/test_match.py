"""The matcher against what a search of every offset finds, and against texts made to fool it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.blend.match import WAYS, ChunkMatcher, Chunks, Run, _thinned
from kvass.types import KEY_WORDS, I64Array, U32Array, U64Array

SPACE = np.zeros(KEY_WORDS, np.uint64)
OTHER = np.ones(KEY_WORDS, np.uint64)
NOBODY = np.zeros(KEY_WORDS, np.uint64)


def key(number: int) -> U64Array:
    return np.array([number, 0, 0, 1], np.uint64)


def any_of(ids: I64Array) -> npt.NDArray[np.bool_]:
    return np.ones(len(ids), np.bool_)


class Known:
    """A matcher, and the tokens that it should know, by the number of their key."""

    def __init__(self, k: int, capacity: int = 64) -> None:
        self.k = k
        self.gone: list[int] = []
        self.matcher = ChunkMatcher(k, capacity, b"x")
        self.matcher.removing = lambda ids: self.gone.extend(ids.tolist())
        self.tokens: dict[int, bytes] = {}
        self.ids: dict[int, int] = {}

    def add(
        self, first: int, text: Sequence[int] | U32Array, start: int = 0, before: U64Array = NOBODY
    ) -> list[int]:
        """A text whose chunks have the keys ``first``, ``first + 1`` and so on."""
        tokens = np.array(text, np.uint32).reshape(-1, self.k)
        numbers = range(first, first + len(tokens))
        keys = np.array([key(n) for n in numbers])
        chunks = Chunks(
            tokens,
            keys,
            np.concatenate([before[None], keys[:-1]]),
            start + self.k * np.arange(len(tokens)),
        )
        ids = self.matcher.add(1, SPACE, chunks)
        self.tokens |= {n: row.tobytes() for n, row in zip(numbers, tokens, strict=True)}
        self.ids |= {n: int(i) for n, i in zip(numbers, ids, strict=False)}
        return [*map(int, ids)]

    def find(self, prompt: Sequence[int] | U32Array, first: int = 0) -> list[tuple[int, list[int]]]:
        """Where runs begin, and the numbers of their keys."""
        runs = self.matcher.find(1, SPACE, np.array(prompt, np.uint32), first, any_of)
        return [(run.new_start, self.numbers(run)) for run in runs]

    def numbers(self, run: Run) -> list[int]:
        return [*map(int, self.matcher.key[run.ids, 0])]

    def check(self, prompt: U32Array, first: int = 0) -> int:
        """No match is false, and none could be added; how many chunks there are."""
        k, end, chunks = self.k, first, 0
        free = []
        for start, numbers in self.find(prompt, first):
            assert start >= end
            free.append((end, start))
            for i, number in enumerate(numbers):
                at = start + i * k
                assert prompt[at : at + k].tobytes() == self.tokens[number]
            end = start + len(numbers) * k
            chunks += len(numbers)
        known = set(self.tokens.values())
        for begin, stop in [*free, (end, len(prompt))]:
            for at in range(begin, stop - k + 1):
                assert prompt[at : at + k].tobytes() not in known, "a match was missed"
        return chunks


@settings(max_examples=150, deadline=None)
@given(
    k=st.integers(1, 5),
    texts=st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=12), max_size=5),
    prompt=st.lists(st.integers(0, 2), max_size=60),
    first=st.integers(0, 8),
    large=st.booleans(),
)
def test_what_is_found_is_there_and_nothing_is_missed(
    k: int, texts: list[list[int]], prompt: list[int], first: int, large: bool
) -> None:
    """Three tokens make texts that repeat themselves and each other, and so overlap."""
    alphabet = np.array([0, 2**32 - 1, 2**31] if large else [0, 1, 2], np.uint32)
    known = Known(k)
    used = set[bytes]()
    for number, text in enumerate(texts):
        row = alphabet[text[: len(text) // k * k]]
        parts = row.reshape(-1, k)
        once = [i for i in range(len(parts)) if parts[i].tobytes() not in used]
        used |= {part.tobytes() for part in parts}
        for i in dict.fromkeys(once):
            known.add(100 * number + i, parts[i])
    known.check(alphabet[prompt], min(first, len(prompt)))


def test_planted_runs_are_all_found_at_odd_offsets() -> None:
    rng, k = np.random.default_rng(1), 32
    known = Known(k, 4096)
    docs = rng.integers(0, 2**32, size=(300, 8 * k), dtype=np.uint32)
    for number, doc in enumerate(docs):
        known.add(8 * number, doc)
    parts, planted, at = list[U32Array](), [], 0
    for number in rng.permutation(300)[:200].tolist():
        gap = rng.integers(0, 2**32, size=int(rng.integers(1, 90)), dtype=np.uint32)
        begin, count = int(rng.integers(0, 4)), int(rng.integers(1, 5))
        planted.append((at + len(gap), [8 * number + begin + i for i in range(count)]))
        parts += [gap, docs[number, begin * k : (begin + count) * k]]
        at += len(gap) + count * k
    assert known.find(np.concatenate(parts)) == planted


def thue_morse(length: int, a: int, b: int) -> U32Array:
    odd = np.array([i.bit_count() & 1 for i in range(length)], np.bool_)
    return np.where(odd, np.uint32(b), np.uint32(a))


def test_texts_made_to_collide_are_told_apart() -> None:
    """Thue-Morse texts of 1,024 tokens have one hash modulo 2**64, whatever the base is."""
    k = 1024
    one, other = thue_morse(k, 5, 9), thue_morse(k, 9, 5)
    known = Known(k)
    salt = known.matcher._salt(1, SPACE)
    hashes = known.matcher._hash_chunks(np.stack([one, other]), salt)
    assert hashes[0] == hashes[1], "they do not collide: the test shows nothing"
    known.add(1, one)
    assert known.find(other) == []
    assert known.find(np.concatenate([[3], one, other])) == [(1, [1])]
    known.add(2, other)
    assert known.find(np.concatenate([other, one, [3], other])) == [
        (0, [2]),
        (k, [1]),
        (2 * k + 1, [2]),
    ]


def test_a_false_match_hides_no_true_one_that_overlaps_it() -> None:
    k = 1024
    false = thue_morse(k, 9, 5)
    true = np.concatenate([false[5:], np.arange(5, dtype=np.uint32)])
    known = Known(k)
    known.add(1, thue_morse(k, 5, 9))
    known.add(2, true)
    assert known.find(np.concatenate([false, true[-5:]])) == [(5, [2])]


def test_of_overlapping_chunks_those_of_the_longer_run_are_chosen() -> None:
    text = np.arange(4 * 8 + 3, dtype=np.uint32)
    known = Known(8)
    known.add(1, text[:8])
    known.add(10, text[3:])
    assert known.find(text) == [(3, [10, 11, 12, 13])]


def test_a_chunk_is_found_as_often_as_it_stands_in_a_prompt() -> None:
    known = Known(4)
    known.add(1, [1, 2, 3, 4])
    assert known.find([1, 2, 3, 4, 1, 2, 3, 4, 0, 1, 2, 3, 4]) == [(0, [1]), (4, [1]), (9, [1])]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_in_a_text_that_repeats_itself_few_offsets_are_looked_at_and_no_match_is_missed(
    period: int,
) -> None:
    """All of its offsets match. Documents stand before, between and behind."""
    rng = np.random.default_rng(period)
    k, known = 64, Known(64)
    repeated = np.tile(np.arange(period, dtype=np.uint32), 1000)
    known.add(1, np.concatenate([repeated[i : i + k] for i in range(period)]))
    documents = rng.integers(100, 200, (3, 4 * k), dtype=np.uint32)
    for number, document in enumerate(documents):
        known.add(10 * (1 + number), document)
    prompt = np.concatenate(
        [documents[0], repeated[:803], documents[1], repeated[:717], documents[2]]
    )
    assert known.check(prompt) == 3 * 4 + 803 // k + 717 // k
    found = known.find(prompt)
    assert {(0, (10, 11, 12, 13)), (1059, (20, 21, 22, 23))} <= {(at, (*n,)) for at, n in found}
    assert len(np.arange(10_000)[_thinned(np.arange(10_000), 256)]) < 500


@pytest.mark.parametrize("blank", [range(100, 300), range(70, 400), range(300), range(250, 512)])
def test_a_document_with_a_long_blank_in_it_is_found_in_one_piece(blank: range) -> None:
    """The offsets beside its chunks match in the blank, too."""
    k, known = 64, Known(64)
    document = np.random.default_rng(0).integers(1, 200, 8 * k, dtype=np.uint32)
    document[blank.start : blank.stop] = 0
    known.add(1, document)
    before = np.random.default_rng(1).integers(200, 300, 37, dtype=np.uint32)
    prompt = np.concatenate([before, document, before])
    assert known.find(prompt) == [(37, list(range(1, 9)))]


def test_what_only_passes_the_filter_hides_no_match_in_a_text_that_repeats_itself() -> None:
    known = Known(64)
    repeated = np.tile(np.array([5, 6], np.uint32), 200)
    known.add(1, repeated[:64])
    matcher = known.matcher
    other = matcher._hash_offsets(repeated[1:65], matcher._salt(1, SPACE))
    matcher._filter[matcher._cells(other)] += 1
    assert known.check(repeated[1:-1]) == 397 // 64


@pytest.mark.parametrize("ahead", [10, 20])
def test_of_chunks_with_the_same_tokens_that_which_continues_the_run_is_chosen(ahead: int) -> None:
    """Two documents share their middle chunk: each prompt goes on in its own document."""
    shared, known = [7] * 4, Known(4)
    known.add(10, [1, 1, 1, 1, *shared, 2, 2, 2, 2])
    known.add(20, [3, 3, 3, 3, *shared, 4, 4, 4, 4])
    text = {10: [1, 1, 1, 1, *shared, 2, 2, 2, 2], 20: [3, 3, 3, 3, *shared, 4, 4, 4, 4]}[ahead]
    assert known.find(text) == [(0, [ahead, ahead + 1, ahead + 2])]
    assert known.find(text[4:]) == [(0, [ahead + 1, ahead + 2])]
    mixed = known.find([1, 1, 1, 1, *shared, 4, 4, 4, 4])
    assert [len(numbers) for _, numbers in mixed] == [2, 1]


def test_neighbours_in_a_prompt_that_were_stored_apart_are_two_runs() -> None:
    known = Known(4)
    known.add(1, [1, 1, 1, 1])
    known.add(2, [2, 2, 2, 2], start=4)  # of another text: nothing before it is known
    known.add(3, [3, 3, 3, 3], start=40, before=key(2))  # it says that 2 was before, but not where
    assert known.find([1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]) == [(0, [1]), (4, [2]), (8, [3])]


def test_only_its_own_place_and_space_are_found_and_only_what_is_usable() -> None:
    known = Known(4)
    (only,) = known.add(1, [1, 2, 3, 4])
    prompt = np.array([1, 2, 3, 4], np.uint32)
    assert known.matcher.find(2, SPACE, prompt, 0, any_of) == []
    assert known.matcher.find(1, OTHER, prompt, 0, any_of) == []
    assert known.matcher.find(1, SPACE, prompt, 0, lambda ids: ids != only) == []
    assert known.matcher.find(1, SPACE, prompt, 0, any_of) == [Run(0, [only])]


def test_removed_chunks_are_not_found_and_their_ids_are_used_again() -> None:
    known = Known(4, capacity=2)
    first = known.add(1, [1, 1, 1, 1, 2, 2, 2, 2])[0]
    known.matcher.remove(np.array([first]))
    assert (known.gone, known.matcher.count) == ([first], 1)
    assert known.find([1, 1, 1, 1, 2, 2, 2, 2]) == [(4, [2])]
    assert known.add(3, [3, 3, 3, 3]) == [first]
    assert known.find([3, 3, 3, 3, 1, 1, 1, 1]) == [(0, [3])]
    assert not known.matcher._filter[known.matcher._filter > 1].any()


def test_in_a_full_matcher_what_was_not_found_for_long_makes_room() -> None:
    known = Known(2, capacity=4)
    known.add(1, [1, 1, 2, 2, 3, 3, 4, 4])
    assert known.find([2, 2, 1, 1])
    known.add(5, [5, 5, 6, 6])
    assert known.matcher.count == 4
    assert known.matcher.replaced == 2
    found = known.find([1, 1, 0, 2, 2, 0, 3, 3, 0, 4, 4, 0, 5, 5, 0, 6, 6])
    assert [numbers for _, numbers in found] == [[1], [2], [5], [6]]


def test_room_is_made_by_entries_that_are_there() -> None:
    known = Known(2, capacity=4)
    ids = known.add(1, [1, 1, 2, 2, 3, 3, 4, 4])
    known.matcher.remove(np.array(ids[:1]))
    known.add(5, [5, 5, 6, 6, 7, 7])
    assert (known.matcher.count, known.matcher.replaced) == (4, 2)
    assert len(set(known.gone)) == len(known.gone) == 3


def test_a_text_under_many_keys_keeps_the_last_ones_and_costs_no_more() -> None:
    known = Known(2, capacity=64)
    for number in range(1, 40):
        known.add(number, [1, 1])
    assert known.matcher.count <= WAYS
    assert known.find([1, 1])
    kept = [n for n in range(1, 40) if n in known.matcher.key[known.matcher.place > 0, 0]]
    assert kept == [*range(40 - len(kept), 40)]


def test_many_chunks_with_the_same_tokens_are_not_replaced_one_by_one() -> None:
    known = Known(2, capacity=64)
    for first in (1, 100):
        known.add(first, [1, 1] * 40 + [2, 2])
        assert known.find([1, 1])
        assert known.find([2, 2])
    kept = {n for n in known.tokens if n in known.matcher.key[known.matcher.place > 0, 0]}
    assert kept == {*range(132, 140), 41, 140}
    assert known.matcher.replaced == WAYS, "those of the first text by those of the second"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=60))
def test_adding_and_removing_leaves_nothing_behind(steps: list[tuple[bool, int]]) -> None:
    known, live = Known(3, capacity=16), dict[int, int]()
    for adds, number in steps:
        for gone in known.gone:
            live = {n: i for n, i in live.items() if i != gone}
        known.gone.clear()
        if adds and number not in live:
            (live[number],) = known.add(number, [number, number + 1, number])
            live = {n: i for n, i in live.items() if i not in known.gone}
            known.gone.clear()
            live[number] = known.ids[number]
        elif not adds and number in live:
            known.matcher.remove(np.array([live.pop(number)]))
            known.gone.clear()
        assert known.matcher.count == len(live)
    for number in range(31):
        assert bool(known.find([number, number + 1, number])) == (number in live)
    known.matcher.remove(np.array([*live.values()], np.int64))
    assert not known.matcher._filter.any()
    assert not known.matcher._table.any()
