"""The two machines of a request: which state follows which, and what counts as offered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from kvass.engine.request_state import (
    LOAD_TRANSITIONS,
    STORE_TRANSITIONS,
    Answer,
    LoadState,
    OfferProgress,
    RequestState,
    StoreState,
)


@dataclass
class OneRequest:
    """As much of a request as its states need."""

    name: str = "r"
    computed_tokens: int = 0


def change(tokens: int, stale: bool) -> Callable[[RequestState], None]:
    def weights_changed(state: RequestState) -> None:
        state.request.computed_tokens = tokens  # type: ignore[misc]
        state.weights_changed(stale)

    return weights_changed


def begin_load(state: RequestState) -> None:
    """As the planner: the engine asks for a load only of what was answered, or of nothing."""
    if state.state in (LoadState.UNANSWERED, LoadState.ANSWERED, LoadState.STALE):
        state.begin_load()


def step(state: RequestState) -> None:
    """An engine computes no request that was answered and has no blocks."""
    if state.state is not LoadState.ANSWERED:
        state.step(1)


def answered(state: RequestState) -> None:
    if state.may_load:
        state.answered(Answer(0, 4, None))


EVENTS: list[Callable[[RequestState], Any]] = [
    answered,
    begin_load,
    step,
    RequestState.got_blocks,
    RequestState.load_failed,
    lambda state: None if state.offered.never else state.offered.prompt_computed(3, 1),
    lambda state: state.offered.stop(),
    *(change(tokens, stale) for tokens in (0, 7) for stale in (False, True)),
]


def test_what_can_happen_to_a_request_takes_exactly_the_transitions_of_the_tables() -> None:
    loads, stores = set[tuple[LoadState, LoadState]](), set[tuple[StoreState, StoreState]]()
    first = RequestState(OneRequest())  # type: ignore[arg-type]
    todo, known = deque([first]), {(first.state, first.offered.state)}
    while todo:
        before = todo.popleft()
        for event in EVENTS:
            after = deepcopy(before)
            event(after)
            loads.add((before.state, after.state))
            stores.add((before.offered.state, after.offered.state))
            if (now := (after.state, after.offered.state)) not in known:
                known.add(now)
                todo.append(after)
    assert {(a, b) for a, b in loads if a is not b} == LOAD_TRANSITIONS
    assert {(a, b) for a, b in stores if a is not b} == STORE_TRANSITIONS


@pytest.mark.parametrize(("before", "after"), product(LoadState, LoadState))
def test_a_load_state_changes_only_along_the_table(before: LoadState, after: LoadState) -> None:
    state = RequestState(OneRequest(), before)  # type: ignore[arg-type]
    if before is after or (before, after) in LOAD_TRANSITIONS:
        state._move(after)
        assert state.state is after
    else:
        with pytest.raises(AssertionError):
            state._move(after)


@pytest.mark.parametrize(("before", "after"), product(StoreState, StoreState))
def test_a_store_state_changes_only_along_the_table(before: StoreState, after: StoreState) -> None:
    offered = OfferProgress(before)
    if before is after or (before, after) in STORE_TRANSITIONS:
        offered._move(after)
        assert offered.state is after
    else:
        with pytest.raises(AssertionError):
            offered._move(after)


def test_a_request_begins_one_load() -> None:
    state = RequestState(OneRequest())  # type: ignore[arg-type]
    state.begin_load()
    with pytest.raises(AssertionError, match="r has begun its load"):
        state.begin_load()


def test_only_the_first_answer_before_it_has_blocks_counts() -> None:
    state = RequestState(OneRequest())  # type: ignore[arg-type]
    assert state.answered(Answer(0, 4, None))
    assert not state.answered(Answer(0, 4, None))
    state.got_blocks()
    state.step(1)
    assert state.answered(Answer(0, 4, None)), "it was preempted"


def test_a_tail_is_due_until_the_reserve_that_names_it_is_sent() -> None:
    offered = OfferProgress()
    offered.prompt_computed(5, 2)
    assert (offered.due, offered.tail) == (5, 0), "nothing but sending makes it offered"
    offered.sent(1, 5)
    assert (offered.chunks, offered.tail) == (1, 5)
    offered.offer_again()
    assert (offered.chunks, offered.tail, offered.due) == (0, 0, 5), "it is offered once more"


def test_chunks_that_are_offered_again_take_those_after_them_along() -> None:
    offered = OfferProgress()
    offered.sent(4, 0)
    offered.offer_again(1)
    offered.granted(2, 6)
    assert offered.chunks == 1
    offered.granted(1, 3)
    assert offered.chunks == 3


@pytest.mark.parametrize(
    ("computed", "stale", "load", "store"),
    [
        (0, False, LoadState.UNANSWERED, StoreState.PREFILL),
        (7, False, LoadState.UNANSWERED, StoreState.NEVER),
        (0, True, LoadState.STALE, StoreState.NEVER),
        (7, True, LoadState.STALE, StoreState.NEVER),
    ],
)
def test_after_a_change_of_weights_nothing_of_before_is_stored(
    computed: int, stale: bool, load: LoadState, store: StoreState
) -> None:
    state = RequestState(OneRequest())  # type: ignore[arg-type]
    state.offered.sent(3, 0)
    change(computed, stale)(state)
    assert (state.state, state.offered.state) == (load, store)
    assert state.offered.never or state.offered.chunks == 0, "all of it is offered again"
    change(0, False)(state)
    assert state.offered.never == stale, "a stale request stays so"


def test_the_first_step_that_computed_a_request_is_kept() -> None:
    state = RequestState(OneRequest())  # type: ignore[arg-type]
    state.step(3)
    assert state.computed
    state.step(4)
    assert (state.first_step, state.state) == (3, LoadState.COMPUTING)
    state.load_failed()
    assert state.computed, "its load is over"


def test_a_new_request_has_nothing_computed_answered_or_offered() -> None:
    state = RequestState(OneRequest())  # type: ignore[arg-type]
    assert (state.computed, state.answer, state.first_step) == (False, None, 0)
    offered = state.offered
    assert (offered.chunks, offered.tail, offered.due, offered.prefilled) == (0, 0, 0, False)
    answer = Answer(0, 4, None)
    state.answered(answer)
    assert state.answer is answer


def test_what_was_loaded_counts_as_offered_and_a_restart_forgets_the_tail_that_was_due() -> None:
    offered = OfferProgress()
    offered.loaded(3)
    assert offered.chunks == 3
    offered.prompt_computed(5, 2)
    assert offered.prefilled
    offered.stop()
    offered.restart()
    assert (offered.chunks, offered.due, offered.prefilled) == (0, 0, False)


class Hashed(OneRequest):
    """A request of which chunk ``n`` and block ``n`` have a hash of 32 times the byte ``n``."""

    def chunk_hashes(self, first: int, end: int) -> list[bytes]:
        return [bytes([n]) * 32 for n in range(first, end)]

    block_hashes = chunk_hashes


def test_hashes_begin_with_the_first_chunk_and_have_their_salt() -> None:
    state = RequestState(Hashed())  # type: ignore[arg-type]
    assert state.digests(0, b"") == state.block_digests(2, 2, b"") == (b"", 0)
    plain, width = state.digests(2, b"")
    assert (plain, width) == (bytes(32) + bytes([1]) * 32, 32)
    assert state.block_digests(1, 2, b"") == (bytes([1]) * 32, 32)
    salted, width = state.digests(2, b"salt")
    mask = salted[:32]  # of a hash that is all zero
    assert (mask != bytes(32), width) == (True, 32)
    assert salted[32:] == bytes(byte ^ 1 for byte in mask)
