"""Breaks of the core, made by hand (``breaks.txt``), and which check notices each.

A break that nothing notices is a hole in the checks. A break whose text is no longer in the core is
an error.

``python -m tests.simulation.mutants`` writes ``docs/mutants.md``: what noticed each break first.
With parts of names after it, it judges only those breaks again. The test beside it asks that
something notices each break. What the page says noticed a break is asked first, because that is
quick. A page that is out of date costs time and hides nothing.

A break in ``breaks.txt`` is a line ``[file of kvass/core, law N] name``, then the text that is in
that file exactly once, with ``-`` before each line, then what it becomes, with ``+``; without
``+`` its lines are taken out. ``[file]`` alone begins another edit of the same break.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "mutants.md"


class StaleMutantError(Exception):
    """The core changed: this break does not apply any more, write it anew."""


@dataclass(frozen=True)
class Mutant:
    """``edits``: (file under ``kvass/core``, text that is in it exactly once, what it becomes)."""

    name: str
    law: int
    edits: list[tuple[str, str, str]] = field(default_factory=list)


def parse(text: str) -> list[Mutant]:
    """The breaks in a text like ``breaks.txt``."""
    found: list[Mutant] = []
    for file, law, name, lines in _BREAK.findall(text):
        if name:
            found.append(Mutant(name, int(law)))
        old = "".join(x[1:] for x in lines.splitlines(True) if x.startswith("-"))
        new = "".join(x[1:] for x in lines.splitlines(True) if x.startswith("+"))
        found[-1].edits.append((file, old[:-1], new[:-1]) if new else (file, old, ""))
    return found


_BREAK = re.compile(r"^\[(\w+\.py)(?:, law (\d+)\] (.+)|\])\n((?:[-+].*\n)+)", re.M)

UNBROKEN = Mutant("unbroken", 0)
MUTANTS = parse((Path(__file__).parent / "breaks.txt").read_text())


# ---------------------------------------------------------------- breaking


def broken_copy(mutant: Mutant, into: Path) -> Path:
    """A copy of the package with the break in it; what to put first on ``PYTHONPATH``."""
    package = into / "kvass"
    shutil.copytree(ROOT / "src" / "kvass", package, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in mutant.edits:
        path = package / "core" / file
        text = path.read_text()
        if text.count(old) != 1:
            found = text.count(old)
            raise StaleMutantError(f"{mutant.name}: found {found} times in core/{file}: {old!r}")
        path.write_text(text.replace(old, new))
    return into


# ---------------------------------------------------------------- checking

_SEEDS = """
import sys
from tests.support.simulation.simulator import run_seed
for seed in {seeds}:
    told = run_seed(seed)
    if told is not None:
        print(told.splitlines()[0])
        sys.exit(1)
"""


def _run(path: Path, *command: str) -> str:
    """What a check of the package at ``path`` found; empty if all was well."""
    env = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    if done.returncode == 0:
        return ""
    lines = [x for x in done.stdout.splitlines() if x.startswith(("seed ", "FAILED ", "ERROR "))]
    assert lines, f"{command} could not run:\n{done.stdout}\n{done.stderr}"
    return "\n".join(lines)


def simulate(path: Path, seeds: Iterable[int]) -> str:
    """The first seed that fails, and how."""
    return _run(path, "-c", _SEEDS.format(seeds=[*seeds]))


def unit_tests(path: Path, *args: str) -> str:
    """The tests that fail, a line each."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no")
    return _run(path, *pytest, "--hypothesis-profile=once", *args)


_LAWS = ["tests/core", "--ignore=tests/core/test_fuzz.py"]


def laws(path: Path, *args: str) -> str:
    """The tests of the core's laws that fail."""
    return unit_tests(path, *args, *_LAWS)


def notice(mutant: Mutant) -> str:
    """The first check that notices, quickest first; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        path = broken_copy(mutant, Path(folder))
        seeds, tests = noted(mutant)
        return (
            (unit_tests(path, "-x", *tests) if tests else "")
            or (simulate(path, seeds) if seeds else "")
            or simulate(path, range(12))
            or laws(path, "-x")
            or simulate(path, range(300))
        )


def noted(mutant: Mutant) -> tuple[list[int], list[str]]:
    """What the page says noticed a break: a seed, and a test. A seed's life is another one as soon
    as the simulator draws one number more, so the test is asked first."""
    row = _known().get(mutant.name, "")
    seed = re.search(r"\| seed (\d+):", row)
    test = re.search(r"`(test_\w+)`", row)
    files = [*(ROOT / "tests" / "core").glob("test_*.py")] if test else []
    tests = [f"{f}::{test[1]}" for f in files if test and f"def {test[1]}(" in f.read_text()]
    return [int(seed[1])] if seed else [], tests


# ---------------------------------------------------------------- the table


def _by(told: str) -> str:
    """What noticed a break, from the first line that a check printed."""
    seed = re.match(r"seed (\d+) failed: \w+: (?:(law \d+)|(.{0,48}))", told)
    if seed:
        return f"seed {seed[1]}: {seed[2] or seed[3]}".replace("|", "/")
    return f"`{told.split('::')[1].split(' ')[0].split('[')[0]}`" if told else "-"


def _judge(mutant: Mutant) -> tuple[bool, str]:
    """Whether anything noticed a break, and its row."""
    told = notice(mutant)
    row = f"| {mutant.name} | {mutant.law} | {_by(told)} |"
    print(row, flush=True)  # noqa: T201
    return bool(told), row


_HEAD = """# Breaking the core on purpose

Each line is a break made by hand in a copy of `kvass/core`, and the check that noticed it first: a
test of `tests/core`, or a seed of the simulator and what that seed found.

`python -m tests.simulation.mutants` writes this page. `make test` asks for every break that some
check notices it.

| break | law | first noticed by |
|---|---|---|
"""


def _known() -> dict[str, str]:
    """The rows that the page has, by break."""
    rows = [x for x in TABLE.read_text().splitlines() if x.startswith("| ")]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def main(parts: list[str]) -> int:
    """Write the table; 1 if anything went unnoticed. ``parts``: of names, to judge only those."""
    chosen = [m for m in MUTANTS if not parts or any(part in m.name for part in parts)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        judged = list(pool.map(_judge, chosen))
    rows = _known() if parts else {}
    rows.update((m.name, row) for m, (_, row) in zip(chosen, judged, strict=True))
    TABLE.write_text(_HEAD + "".join(f"{rows[m.name]}\n" for m in MUTANTS if m.name in rows))
    missed = [m.name for m, (caught, _) in zip(chosen, judged, strict=True) if not caught]
    print(f"{len(chosen)} breaks, unnoticed: {missed or 'none'}")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
