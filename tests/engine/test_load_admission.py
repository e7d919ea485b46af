"""Which loads begin while the engine counts too few blocks. With real schedulers:
``test_scheduler_pressure.py``."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.engine.load_admission import LoadAdmission
from kvass.engine.request_state import LoadState
from kvass.engine.setup import Admission
from kvass.types import GroupLayout

FULL = (GroupLayout("full", 16, ("a",), (4096,)), GroupLayout("full", 32, ("b",), (4096,)))
WINDOW = (GroupLayout("sliding_window", 16, ("a",), (4096,), 40), FULL[0])
DRAFTS = Admission(step_tokens=512, draft_tokens=5)
WINDOWS = Admission(step_tokens=48, draft_tokens=0)


@dataclass
class OneState:
    """As much of a request's state as is asked for."""

    request: Any
    state: LoadState
    answer: Any


def one(tokens: int, hit: int, state: LoadState = LoadState.ANSWERED) -> Any:
    return OneState(SimpleNamespace(known_tokens=tokens), state, SimpleNamespace(end=hit))


def admits(
    free: int,
    others: dict[str, Any],
    admission: Admission | None = DRAFTS,
    groups: tuple[GroupLayout, ...] = FULL,
) -> bool:
    setup: Any = SimpleNamespace(groups=groups, admission=admission)
    pool: Any = SimpleNamespace(free_blocks=free)
    new = one(60, 32) if groups is FULL else one(400, 320)
    return LoadAdmission(setup, {"new": new, **others}, pool).admits("new")


def test_a_load_without_others_begins() -> None:
    """Also beside requests that run, or that have not begun to load."""
    others = (LoadState.UNANSWERED, LoadState.ANSWERED, LoadState.COMPUTING, LoadState.LOADED)
    assert admits(0, {})
    assert admits(0, {state.name: one(1000, 0, state) for state in others})


@pytest.mark.parametrize(("hit", "needed"), [(32, 16), (64, 13), (96, 10)])
def test_beside_another_load_it_begins_if_both_have_room(hit: int, needed: int) -> None:
    """60 tokens and 5 for drafts are 5 blocks and 3. What the other one lacks of 100 tokens are
    with these 5 blocks and 3, or 3 and 2, or 1 and 1."""
    waiting = {"other": one(100, hit, LoadState.LOADING)}
    assert admits(needed, waiting)
    assert not admits(needed - 1, waiting)


@pytest.mark.parametrize(("hit", "others"), [(384, 1 + 1 + 1), (320, 4 + 5), (0, 4 + 25)])
def test_in_a_window_a_request_needs_blocks_for_the_tokens_of_a_step(hit: int, others: int) -> None:
    """The new one loads 3 blocks of the window and 20, and computes 3 and 5. A step may begin
    inside a block of a window, so each needs one more."""
    waiting = {"other": one(400, hit, LoadState.LOADING)}
    needed = 3 + 20 + 4 + 5 + others
    assert admits(needed, waiting, WINDOWS, WINDOW)
    assert not admits(needed - 1, waiting, WINDOWS, WINDOW)


def test_an_engine_that_counts_right_decides_itself() -> None:
    assert admits(0, {"other": one(1000, 0, LoadState.LOADING)}, None)
