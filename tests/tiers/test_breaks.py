"""Breaks of tiers, made by hand (``breaks.txt``); the test that each one names must notice it."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.mutants import TIMEOUT_S, Mutant, break_package, parse, unit_tests

MUTANTS = parse(Path(__file__).with_name("breaks.txt").read_text())


def notice(mutant: Mutant, test: str) -> str:
    """The test that fails; empty if none does. Breaks this process. ``test`` is in ``tests/tiers``,
    or begins with ``daemon/``: then it is about a tier's process."""
    if test.startswith("daemon/"):
        break_package(mutant, "kvass.daemon.tier_process")
        return unit_tests(f"tests/{test}")
    break_package(mutant, "kvass.tiers")
    return unit_tests(f"tests/tiers/{test}")


@pytest.fixture(scope="module")
def forked() -> Iterator[Pool]:
    """A new process for each task, in which nothing of tiers is imported."""
    with processes.pool(1) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.partition(" |")[0])
def test_every_break_is_noticed(mutant: Mutant, forked: Pool) -> None:
    test = mutant.name.partition(" | ")[2]
    told = forked.apply_async(notice, (mutant, test)).get(TIMEOUT_S)
    assert told, f"nothing notices: {mutant.name}"


@pytest.mark.slow
def test_unbroken_tiers_are_not_blamed(forked: Pool) -> None:
    for test in {mutant.name.partition(" | ")[2] for mutant in MUTANTS}:
        assert forked.apply(notice, (Mutant("unbroken"), test)) == ""
