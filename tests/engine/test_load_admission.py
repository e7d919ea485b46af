"""Which loads begin while the engine counts no blocks for drafts. With real schedulers:
``test_scheduler_pressure.py``."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.engine.load_admission import LoadAdmission
from kvass.engine.request_state import LoadState
from kvass.types import GroupLayout

GROUPS = (GroupLayout("full", 16, ("a",), (4096,)), GroupLayout("full", 32, ("b",), (4096,)))


@dataclass
class OneState:
    """As much of a request's state as is asked for."""

    request: Any
    state: LoadState = LoadState.ANSWERED
    loaded_tokens: int = 0


def one(tokens: int, state: LoadState = LoadState.ANSWERED, loaded: int = 0) -> Any:
    return OneState(SimpleNamespace(known_tokens=tokens), state, loaded)


def admits(free: int, others: dict[str, Any], uncounted: int = 5) -> bool:
    setup: Any = SimpleNamespace(groups=GROUPS, uncounted_tokens=uncounted)
    pool: Any = SimpleNamespace(free_blocks=free)
    return LoadAdmission(setup, {"new": one(60), **others}, pool).admits("new")


def test_a_load_without_others_begins() -> None:
    """Also beside requests that run, or that have not begun to load."""
    others = (LoadState.UNANSWERED, LoadState.ANSWERED, LoadState.COMPUTING, LoadState.LOADED)
    assert admits(0, {})
    assert admits(0, {state.name: one(1000, state) for state in others})


@pytest.mark.parametrize(("loaded", "needed"), [(56, 14), (78, 11)])
def test_beside_another_load_it_begins_if_both_have_room(loaded: int, needed: int) -> None:
    """60 tokens and 5 for drafts are 5 blocks and 3. What the other one lacks of 100 tokens are
    with these 4 blocks and 2, or 2 and 1."""
    waiting = {"other": one(100, LoadState.LOADING, loaded)}
    assert admits(needed, waiting)
    assert not admits(needed - 1, waiting)


def test_an_engine_that_counts_drafts_decides_itself() -> None:
    assert admits(0, {"other": one(1000, LoadState.LOADING)}, uncounted=0)
