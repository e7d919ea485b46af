"""Mutants: breaks of a package, made by hand. Each is made in the memory of a process of its own.

A break that nothing notices is a hole in the checks. A break whose text is no longer in the package
is an error.

In a text of breaks each begins with a line ``[file, law N] name``; ``law`` may be missing. After it
come the text that is in that file exactly once, with ``-`` before each line, and what it becomes,
with ``+``; without ``+`` its lines are taken out. ``[file]`` alone begins another edit of the same
break.
"""

from __future__ import annotations

import faulthandler
import io
import os
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Final

import _hypothesis_pytestplugin
import pytest
import pytest_timeout
from hypothesis import Phase, settings

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = ROOT / "src"
TIMEOUT_S: Final = 300.0
_BREAK: Final = re.compile(r"^\[(\w+\.py)(?:, law (\d+))?\] ?(.*)\n((?:[-+].*\n)+)", re.M)


class StaleMutantError(Exception):
    """The package changed: this break does not apply any more, write it anew."""


@dataclass(frozen=True)
class Mutant:
    """``edits``: (file of the package, text that is in it exactly once, what it becomes)."""

    name: str
    law: int = 0
    edits: list[tuple[str, str, str]] = field(default_factory=list)


UNBROKEN: Final = Mutant("unbroken")


def parse(text: str) -> list[Mutant]:
    """The breaks of a text."""
    found: list[Mutant] = []
    for file, law, name, lines in _BREAK.findall(text):
        if name:
            found.append(Mutant(name, int(law or 0)))
        old = "".join(x[1:] for x in lines.splitlines(True) if x.startswith("-"))
        new = "".join(x[1:] for x in lines.splitlines(True) if x.startswith("+"))
        found[-1].edits.append((file, old[:-1], new[:-1]) if new else (file, old, ""))
    return found


def break_package(mutant: Mutant, package: str) -> None:
    """Break what this process imports from now on; it ends if it runs longer than ``TIMEOUT_S``.

    Raises:
        StaleMutantError: a text of the break is not in its file exactly once.
    """
    folder, texts = SOURCE.joinpath(*package.split(".")), dict[str, str]()
    files = {file.name: file for file in folder.rglob("*.py")}
    for file, old, new in mutant.edits:
        text = texts.get(file) or files[file].read_text()
        if (found := text.count(old)) != 1:
            raise StaleMutantError(f"{mutant.name}: found {found} times in {file}: {old!r}")
        texts[file] = text.replace(old, new)
    broken = {
        ".".join(files[file].relative_to(SOURCE).with_suffix("").parts): compile(
            text, files[file], "exec", dont_inherit=True
        )
        for file, text in texts.items()
    }
    assert package not in sys.modules, f"this process has imported {package}"
    whole = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        return broken[fullname] if fullname in broken else whole(self, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)


def unit_tests(*args: str) -> str:
    """The first test that fails; empty if none does."""
    settings.register_profile(  # a failure is enough, no need to make it small
        "once", derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate]
    )
    os.chdir(ROOT)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # to import them all takes half the time
    options = "-x -q -s --tb=no -p no:cacheprovider --hypothesis-profile=once"
    with redirect_stdout(io.StringIO()) as said:  # plugins by name are looked for in all packages
        status = pytest.main([*options.split(), *args], [pytest_timeout, _hypothesis_pytestplugin])
    lines = [x for x in said.getvalue().splitlines() if x.startswith(("FAILED ", "ERROR "))]
    assert bool(lines) == bool(status), said.getvalue()
    return "".join(lines[:1])
