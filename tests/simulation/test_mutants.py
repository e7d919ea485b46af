"""Every break of the core is noticed, and an unbroken core is not blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.mutant import Mutant
from tests.simulation.mutants import (
    MUTANTS,
    UNBROKEN,
    StaleMutantError,
    broken_copy,
    notice,
    simulate,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_every_break_is_noticed(mutant: Mutant) -> None:
    assert notice(mutant), f"nothing notices: {mutant.name}"


def test_an_unbroken_copy_is_not_blamed(tmp_path: Path) -> None:
    assert simulate(broken_copy(UNBROKEN, tmp_path), 20) == ""


def test_a_break_that_does_not_apply_any_more_is_an_error(tmp_path: Path) -> None:
    stale = Mutant("stale", 0, (("custody.py", "no such text", ""),))
    with pytest.raises(StaleMutantError, match="found 0 times"):
        broken_copy(stale, tmp_path)
