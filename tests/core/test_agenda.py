"""An agenda has what was put on and not taken off, in order, and no call pays for the past."""

from __future__ import annotations

from random import Random

import pytest

from kvass.core import agenda
from kvass.core.agenda import Agenda
from tests.core.test_release_cost import bytecodes


def test_any_history_leaves_what_was_not_taken_off_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agenda, "_BLOCK", 4)
    random, due, known = Random(1), Agenda[tuple[float, int]](), set[tuple[float, int]]()
    for number in range(2000):
        entry = (float(random.randrange(50)), number)
        due.add(entry)
        known.add(entry)
        while known and random.random() < (0.3 if number % 500 < 300 else 0.7):
            gone = random.choice([min(known), random.choice([*known])])
            due.remove(gone)
            known.remove(gone)
        assert due.first == min(known, default=None)
        assert len(due) == len(known)
        assert [each for block in due._blocks for each in block] == sorted(known)
        assert all(0 < len(block) <= 4 for block in due._blocks)


def test_what_was_taken_off_costs_nothing_later() -> None:
    """Much is taken off that was due before what is left: the next call looks at none of it."""
    costs = list[int]()
    for many in (1, 5_000):
        due = Agenda[tuple[float, int]]()
        for number in range(many):
            due.add((1.0, number))
        due.add((2.0, 0))
        for number in range(many):
            due.remove((1.0, number))
        with bytecodes() as count:
            assert due.first == (2.0, 0)
            due.add((3.0, 0))
            due.remove((2.0, 0))
        costs.append(count[0])
    assert costs[0] == costs[1]
