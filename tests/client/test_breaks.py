"""Breaks of clients, most of them of engines over several nodes, made by hand (``breaks.txt``);
the test that each one names must notice it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mutants import SOURCE, TIMEOUT_S, UNBROKEN, Mutant, parse
from tests.support.mutation import survives

MUTANTS = parse(Path(__file__).with_name("breaks.txt").read_text())


def judged(mutant: Mutant) -> tuple[str, str]:
    """The package that a break is in, and the test that notices it: ``package: test``."""
    package, _, test = mutant.name.partition(" | ")[2].partition(": ")
    return f"kvass.{package}", f"tests/client/{test}"


def lives(mutant: Mutant, package: str, test: str) -> bool:
    return survives(mutant, package, ["-m", "not slow", test], TIMEOUT_S)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.partition(" |")[0])
def test_every_break_applies(mutant: Mutant) -> None:
    folder = SOURCE / judged(mutant)[0].replace(".", "/")
    for file, old, _ in mutant.edits:
        assert (folder / file).read_text().count(old) == 1


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.partition(" |")[0])
def test_every_break_is_noticed(mutant: Mutant) -> None:
    assert not lives(mutant, *judged(mutant)), f"nothing notices: {mutant.name}"


@pytest.mark.slow
def test_unbroken_files_are_not_blamed() -> None:
    for judge in sorted({judged(mutant) for mutant in MUTANTS}):
        assert lives(UNBROKEN, *judge)
