"""The states of a request's lookup: what may follow what."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.client.lookups import TRANSITIONS, Lookups, LookupState, Match, RequestLookup
from kvass.messages import Release

FOUND = Match(boot=b"b", lease=1, chunks=1)


@pytest.mark.parametrize(("before", "after"), product(LookupState, LookupState))
def test_a_lookup_changes_only_along_the_table(before: LookupState, after: LookupState) -> None:
    lookup = RequestLookup(before)
    if (before, after) in TRANSITIONS:
        lookup.move(after)
        assert lookup.state is after
    else:
        with pytest.raises(AssertionError):
            lookup.move(after)


def test_every_transition_of_the_table_is_taken_by_a_lookup_that_is_asked_and_answered() -> None:
    taken = set[tuple[LookupState, LookupState]]()
    paths: list[list[LookupState | Match | None]] = [
        [LookupState.ASKED, FOUND, None],
        [LookupState.ASKED, None],
        [LookupState.ASKED, FOUND, LookupState.ASKED_AGAIN, FOUND, None],
        [LookupState.ASKED, None, LookupState.ASKED_AGAIN, None],
    ]
    for path in paths:
        lookup = RequestLookup()
        for one in path:
            before = lookup.state
            if isinstance(one, LookupState):
                lookup.move(one)
                lookup.seq = 7
            else:
                lookup.end(one)
                assert lookup.seq == 0
            taken.add((before, lookup.state))
    assert taken == TRANSITIONS


def test_who_gives_up_the_second_lookup_keeps_the_match_of_the_first() -> None:
    lookup = RequestLookup()
    lookup.move(LookupState.ASKED)
    lookup.end(FOUND)
    lookup.move(LookupState.ASKED_AGAIN)
    lookup.end(lookup.match)
    assert (lookup.state, lookup.match) == (LookupState.MATCHED, FOUND)


def test_what_is_taken_while_it_is_asked_again_is_given_back_and_not_handed_out() -> None:
    """Its lease would be the caller's, and be released."""
    posted: list[object] = []
    client: Any = SimpleNamespace(connection=object(), post=posted.append, discard=posted.append)
    lookups = Lookups(client, Any, readers=None, spare=0, chunk_tokens=16, budget_s=None)  # type: ignore[arg-type]
    lookup = lookups._of["r"] = RequestLookup(LookupState.ASKED_AGAIN, client.connection, seq=7)
    lookup.match = FOUND
    assert lookups.take("r") is None
    assert posted == [Release(boot=b"b", lease=1), 7]
