"""What ``python -m bench.agents`` plays, and its figures; real engines are started by
``tests/engine/test_benchmarks.py``."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench import agents
from bench.agents import MODES, Fleet

FLEET = Fleet("tiny", sessions=4, steps=3, tokens=64, pause_s=8.0)


def test_all_modes_have_the_same_pauses_and_only_hints_differ() -> None:
    steps = agents.steps_of(FLEET)
    assert len(steps) == 12
    assert [s.at_s for s in steps] == sorted(s.at_s for s in steps)
    of = [step for step in steps if step.session == 2]
    assert all(a.next_s == b.at_s and 4 <= b.at_s - a.at_s <= 12 for a, b in pairwise(of))
    said = {mode: agents.hints(mode, of[0], "x") for mode in MODES}
    pause_s = of[1].at_s - of[0].at_s
    assert said["none"] is said["all"] is None
    assert said["fetch"] == {"kvass.session": "x", "kvass.then": "10m"}
    assert agents.hints("ttl", of[2], "x") == {"kvass.session": "x", "kvass.ttl": 0}
    assert said["then"] == {"kvass.session": "x", "kvass.then": f"{round(pause_s)}s"}
    assert said["ttl"] is not None
    assert int(said["ttl"]["kvass.ttl"][:-1]) >= 1.5 * pause_s


def test_a_prompt_goes_on_from_the_one_before_it_in_its_own_run_alone() -> None:
    first, second, other = (FLEET.prompt(1, n, run) for n, run in ((1, "a"), (2, "a"), (2, "b")))
    assert second[: len(first)] == first
    assert len(second) == 64 + 2 * agents.RESULT
    assert other[:64] == first[:64]
    assert other[64:] != second[64:]
    assert FLEET.prompt(2, 0, "a") != first[:64]


def test_ratios_are_of_one_round() -> None:
    found = {
        "none": [{"p99_s": 2.0}, {"p99_s": 9.0}, {"p99_s": 1.0}],
        "all": [{"p99_s": 1.0}, {"p99_s": 3.0}, {"p99_s": 2.0}],
    }
    figures = agents.summary(found)
    assert figures["none"] == {"p99_s": pytest.approx(2.0), "p99_vs_all": pytest.approx(2.0)}
    assert "| none | 2 | 2 |" in agents.markdown(figures)
