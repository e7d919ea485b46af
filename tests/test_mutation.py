"""Breaks made by rule: which there are, and that a file's own tests are what judges them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mutants import SOURCE, Mutant
from tests.support.mutation import judges_of, mutants, survives, survivors

HISTOGRAM = SOURCE / "kvass" / "core" / "histogram.py"

TEXT = '''"""Words."""
def double(x: int = 1) -> int | None:
    assert x > 0
    if x < 3 and known(x):
        log.info("small")
        self.seen += 1
    return x * 2
'''
BREAKS = [
    "2: 1  ->  2",
    "4: x < 3 and known(x)  ->  x < 3 or known(x)",
    "4: x < 3  ->  x <= 3",
    "4: x < 3  ->  x < 4",
    "6: self.seen += 1  ->  pass",
    "6: self.seen += 1  ->  self.seen -= 1",
    "6: self.seen += 1  ->  self.seen += 2",
    "7: x * 2  ->  x + 2",
    "7: x * 2  ->  x * 3",
]


def test_the_breaks_of_a_file_are_these(tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text(TEXT)
    made = mutants(file)
    assert [one.name for one in made] == [f"double.py:{name}" for name in BREAKS]
    texts = [new for one in made for _, _, new in one.edits]
    assert len({*texts, TEXT}) == len(BREAKS) + 1
    assert all("assert x > 0" in text and "log.info('small')" in text for text in texts)


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("layout/spans.py", ["tests/layout/test_spans.py"]),
        ("engine/changes.py", ["tests/engine/test_scheduler_changes.py"]),
        ("core/pending/settlement.py", ["tests/core/scripts/settlement.txt"]),
        ("layout/__init__.py", ["tests/layout"]),
    ],
)
def test_a_file_is_judged_by_its_own_tests(file: str, tests: list[str]) -> None:
    assert judges_of(SOURCE / "kvass" / file) == tests


@pytest.fixture
def tests(tmp_path: Path) -> dict[str, list[str]]:
    """Tests of a histogram: one that looks, one that does not, and one that is always red."""
    bodies = {
        "looking": """
    one = Histogram()
    one.observe(3.0)
    assert (sum(one.counts), one.sum) == (1, 3.0)
""",
        "blind": " Histogram().observe(3.0)\n",
        "red": " assert False\n",
    }
    for name, body in bodies.items():
        text = f"from kvass.core.histogram import Histogram\ndef test():{body}"
        (tmp_path / f"test_{name}.py").write_text(text)
    return {name: [str(tmp_path / f"test_{name}.py")] for name in bodies}


def test_what_the_tests_notice_does_not_survive(tests: dict[str, list[str]]) -> None:
    observe = [one for one in mutants(HISTOGRAM) if one.name >= "histogram.py:21"]
    assert len(observe) == 6
    assert survivors(HISTOGRAM, tests["looking"], observe) == []


def test_tests_that_look_at_nothing_notice_nothing(tests: dict[str, list[str]]) -> None:
    """The negative control."""
    observe = [one for one in mutants(HISTOGRAM) if one.name >= "histogram.py:21"]
    assert survivors(HISTOGRAM, tests["blind"], observe) == [one.name for one in observe]


def test_tests_that_fail_without_a_break_judge_nothing(tests: dict[str, list[str]]) -> None:
    with pytest.raises(ValueError, match="fail without a break"):
        survivors(HISTOGRAM, tests["red"], [])


def test_a_break_that_hangs_is_noticed(tests: dict[str, list[str]]) -> None:
    hangs = Mutant(
        "hangs", edits=[("histogram.py", "self.sum += value * times", "exec('while 1: 1')")]
    )
    assert not survives(hangs, "kvass.core", tests["blind"], most_s=3.0)
