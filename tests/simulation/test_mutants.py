"""Every break of the core is noticed, and an unbroken core is not blamed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.side_by_side import cores
from tests.simulation.mutants import (
    MUTANTS,
    UNBROKEN,
    Mutant,
    StaleMutantError,
    broken_copy,
    notice,
    simulate,
    unit_tests,
)


@pytest.fixture(scope="module")
def noticed(selected: dict[str, list[Any]]) -> Iterator[dict[str, Future[str]]]:
    """What notices each break. A thread for each core of ours, since each check is a process."""
    with ThreadPoolExecutor(cores()) as pool:
        yield {one.name: pool.submit(notice, one) for one in selected["mutant"]}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_every_break_is_noticed(mutant: Mutant, noticed: dict[str, Future[str]]) -> None:
    assert noticed[mutant.name].result(), f"nothing notices: {mutant.name}"


def test_an_unbroken_copy_is_not_blamed(tmp_path: Path) -> None:
    """All tests and seeds run elsewhere: here, that a copy is not blamed for being one."""
    copy = broken_copy(UNBROKEN, tmp_path)
    assert (simulate(copy, range(3)), unit_tests(copy, "tests/core/test_room.py")) == ("", "")


def test_a_break_that_does_not_apply_any_more_is_an_error(tmp_path: Path) -> None:
    stale = Mutant("stale", 0, [("settlement.py", "no such text", "")])
    with pytest.raises(StaleMutantError, match="found 0 times"):
        broken_copy(stale, tmp_path)
