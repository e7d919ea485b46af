"""Which loads begin while the engine counts too few blocks. With real schedulers:
``test_scheduler_pressure.py``."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvass.engine.head_of_line import HeadOfLine
from kvass.engine.load_admission import LoadAdmission
from kvass.engine.setup import Admission
from kvass.types import GroupLayout

FULL = (GroupLayout("full", 16, ("a",), (4096,)), GroupLayout("full", 32, ("b",), (4096,)))
WINDOW = (GroupLayout("sliding_window", 16, ("a",), (4096,), 40), FULL[0])
DRAFTS = Admission(step_tokens=512, draft_tokens=5)
WINDOWS = Admission(step_tokens=48, draft_tokens=0)


@dataclass
class Waiting:
    """As much of a request as is asked for."""

    computed_tokens: int
    known_tokens: int
    waits_with_blocks: bool = True


def one(computed: int, known: int, waits: bool = True) -> Any:
    return SimpleNamespace(request=Waiting(computed, known, waits))


def admits(
    free: int,
    others: list[Any],
    admission: Admission | None = DRAFTS,
    groups: tuple[GroupLayout, ...] = FULL,
) -> bool:
    """Whether a load begins: of 32 of 60 tokens, or with a window of 320 of 400."""
    end, known = (32, 60) if groups is FULL else (320, 400)
    setup: Any = SimpleNamespace(groups=groups, admission=admission, one_queue=True)
    pool: Any = SimpleNamespace(free_blocks=free)
    new: Any = SimpleNamespace(
        request=Waiting(0, known, waits_with_blocks=False), answer=SimpleNamespace(end=end)
    )
    requests = {"new": new} | {str(number): other for number, other in enumerate(others)}
    return LoadAdmission(setup, requests, pool).admits("new")


def test_a_load_without_others_begins() -> None:
    """Also beside requests that run, or that hold no blocks."""
    assert admits(0, [])
    assert admits(0, [one(0, 1000, waits=False), one(500, 1000, waits=False)])


@pytest.mark.parametrize(("computed", "needed"), [(32, 16), (64, 13), (96, 10)])
def test_beside_another_load_it_begins_if_both_have_room(computed: int, needed: int) -> None:
    """60 tokens and 5 for drafts are 5 blocks and 3. What the other one lacks of 100 tokens are
    with these 5 blocks and 3, or 3 and 2, or 1 and 1."""
    waiting = [one(computed, 100)]
    assert admits(needed, waiting)
    assert not admits(needed - 1, waiting)


@pytest.mark.parametrize(
    ("computed", "lacks"), [(384, 1 + 1), (320, 4 + 5), (16, 5 + 24), (0, 6 + 25)]
)
def test_in_a_window_a_request_needs_blocks_for_the_tokens_of_a_step(
    computed: int, lacks: int
) -> None:
    """The new one loads 3 blocks of the window, and 20. It computes 80 tokens: with 39 of 40 in the
    window, 49 more are needed at once, which are 4 blocks, and 5. A shorter hit has fewer in the
    window."""
    waiting = [one(computed, 400)]
    needed = 3 + 20 + 4 + 5 + lacks
    assert admits(needed, waiting, WINDOWS, WINDOW)
    assert not admits(needed - 1, waiting, WINDOWS, WINDOW)


def test_an_engine_that_counts_right_decides_itself() -> None:
    assert admits(0, [one(0, 1000)], None)


def test_of_a_ring_each_request_has_one_block_whatever_it_computes() -> None:
    """The new one needs 20 blocks for its hit, 5 for the rest and one for its ring."""
    ring = (GroupLayout("sliding_window", 16, (), (), 1), FULL[0])
    rings = Admission(step_tokens=48, draft_tokens=0, rings=frozenset({0}))
    for computed, lacks in ((384, 1), (0, 25)):
        waiting = [one(computed, 400)]
        assert admits(20 + 5 + 1 + lacks, waiting, rings, ring)
        assert not admits(20 + 5 + lacks, waiting, rings, ring)


def test_only_an_engine_with_one_queue_passes_requests_over() -> None:
    """It has answered one in an earlier step, and another one's load has ended."""
    for one_queue in (True, False):
        line = HeadOfLine(one_queue)
        line.answered("tried")
        line.new_step()
        line.loaded(["loaded"])
        assert (line.passes("tried"), line.passes("loaded")) == (one_queue, False)
