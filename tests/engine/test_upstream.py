"""``make test-upstream`` compares vLLM's own tests with and without kvass. What is explained, and
nothing else, may differ: one test more is red, and one test less."""

from __future__ import annotations

from tests.support.upstream.__main__ import differences, unexplained
from tests.support.upstream.explained import CONNECTORS, EXPLAINED

LISTED = [CONNECTORS + name for names in EXPLAINED.values() for name in names]
ALONE = {**dict.fromkeys(LISTED, "passed"), f"{CONNECTORS}a.py::other": "passed"}
BESIDE = ALONE | dict.fromkeys(LISTED, "failed")


def test_a_difference_is_explained() -> None:
    found = differences(ALONE, BESIDE)
    assert len(found) == len(LISTED) == len(set(LISTED))
    assert unexplained(found, ALONE) == []


def test_one_more_difference_is_seen() -> None:
    found = differences(ALONE, BESIDE | {f"{CONNECTORS}a.py::other": "skipped"})
    assert unexplained(found, ALONE) == [
        f"{CONNECTORS}a.py::other: passed alone, skipped with kvass",
    ]


def test_a_difference_that_is_gone_is_seen() -> None:
    found = differences(ALONE, BESIDE | {LISTED[0]: "passed"})
    assert unexplained(found, ALONE) == [f"{LISTED[0]}: is listed as different, and is not"]


def test_a_test_that_is_not_run_differs() -> None:
    missing = {name: outcome for name, outcome in BESIDE.items() if name in LISTED}
    assert unexplained(differences(ALONE, missing), ALONE) == [
        f"{CONNECTORS}a.py::other: passed alone, not run with kvass",
    ]
