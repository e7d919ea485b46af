"""Every break of the core is noticed, and an unbroken core is not blamed."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.pool import ApplyResult
from typing import Any

import pytest

from tests.simulation.mutants import MUTANTS, notice, unblamed
from tests.support import processes
from tests.support.mutants import TIMEOUT_S, Mutant, StaleMutantError


@pytest.fixture(scope="module")
def noticed(selected: dict[str, list[Any]]) -> Iterator[dict[str, ApplyResult[str]]]:
    """What notices each break, each in a process of its own."""
    with processes.pool(1) as pool:
        yield {one.name: pool.apply_async(notice, (one,)) for one in selected["mutant"]}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_every_break_is_noticed(mutant: Mutant, noticed: dict[str, ApplyResult[str]]) -> None:
    assert noticed[mutant.name].get(2 * TIMEOUT_S), f"nothing notices: {mutant.name}"


def test_an_unbroken_core_is_not_blamed() -> None:
    with processes.pool(1) as pool:
        assert pool.apply(unblamed) == ["", ""]


@pytest.mark.parametrize("text", ["no such text", "self"])
def test_a_break_that_does_not_apply_any_more_is_an_error(text: str) -> None:
    stale = Mutant("stale", 0, [("settlement.py", text, "")])
    with processes.pool(1) as pool, pytest.raises(StaleMutantError, match=r"found \d+ times"):
        pool.apply(notice, (stale,))
