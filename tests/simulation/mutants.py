"""Breaks of the core, made by hand, and which check notices each.

Law of this file: a break that nothing notices is a hole in the checks, and a break whose text is no
longer in the core says so instead of passing.

``python -m tests.simulation.mutants`` runs every break against every check and writes
``docs/mutants.md``, or with parts of names after it only the rows of those; the test beside it
only asks that something notices.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.simulation import breaks_custody, breaks_room, breaks_tiers
from tests.simulation.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "mutants.md"


class StaleMutantError(Exception):
    """The core changed: this break does not apply any more, write it anew."""


UNBROKEN = Mutant("unbroken", 0, ())

MUTANTS = [*breaks_custody.BREAKS, *breaks_room.BREAKS, *breaks_tiers.BREAKS]


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
from kvass.testing.simulator import run_seed
for seed in range({seeds}):
    told = run_seed(seed, validate={validate})
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


def simulate(path: Path, seeds: int, validate: bool = True) -> str:
    """The first seed that fails, and how."""
    return _run(path, "-c", _SEEDS.format(seeds=seeds, validate=validate))


def unit_tests(path: Path, *args: str) -> str:
    """The tests that fail, a line each."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no")
    return _run(path, *pytest, *args)


_LAWS = ["tests/core", "--ignore=tests/core/test_model.py", "--ignore=tests/core/test_fuzz.py"]


def notice(mutant: Mutant) -> str:
    """The first check that notices, quickest first; empty if none does."""
    with tempfile.TemporaryDirectory() as folder:
        path = broken_copy(mutant, Path(folder))
        return simulate(path, 12) or unit_tests(path, "-x", *_LAWS) or simulate(path, 300)


# ---------------------------------------------------------------- the table


def _seed(told: str) -> str:
    found = re.match(r"seed (\d+) failed: \w+: (?:(law \d+)|(.{0,48}))", told)
    return f"seed {found[1]}: {found[2] or found[3]}".replace("|", "/") if found else "-"


def _row(mutant: Mutant) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = broken_copy(mutant, Path(folder))
        sim, alone = simulate(path, 300), simulate(path, 300, validate=False)
        laws = unit_tests(path, *_LAWS).splitlines()
        model = unit_tests(path, "--hypothesis-profile=once", "tests/core/test_model.py")
        fuzz = unit_tests(path, "--hypothesis-profile=once", "tests/core/test_fuzz.py")
    first = laws[0].split("::")[1].split(" ")[0].split("[")[0] if laws else ""
    units = f"{len(laws)}: `{first}`" if laws else "-"
    cells = [
        mutant.name,
        str(mutant.law),
        _seed(sim),
        _seed(alone),
        units,
        "yes" if model else "-",
        "yes" if fuzz else "-",
    ]
    print("|", " | ".join(cells), "|", flush=True)  # noqa: T201
    return bool(sim or laws or model or fuzz), f"| {' | '.join(cells)} |"


_HEAD = """# Breaking the core on purpose

Each line is a break made by hand in a copy of `kvass/core`, and what noticed it. *Simulator*: the
first of 300 seeds that failed, with `validate()` after every event. *Witness alone*: the same with
`validate()` off, so that only what clients can see is judged. *Tests of laws*: how many of
`tests/core` failed, and the first. *Dictionary*, *fuzz*: the two Hypothesis tests.

`python -m tests.simulation.mutants` writes this page; `make test` asks for every break that some
check notices it.

| break | law | simulator | witness alone | tests of laws | dictionary | fuzz |
|---|---|---|---|---|---|---|
"""


def _known() -> dict[str, str]:
    """The rows that the page has, by break."""
    rows = [x for x in TABLE.read_text().splitlines() if x.startswith("| ")]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def main(parts: list[str]) -> int:
    """Write the table; 1 if anything went unnoticed. ``parts``: of names, to judge only those."""
    chosen = [m for m in MUTANTS if not parts or any(part in m.name for part in parts)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        judged = list(pool.map(_row, chosen))
    rows = _known() if parts else {}
    rows.update((m.name, row) for m, (_, row) in zip(chosen, judged, strict=True))
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(_HEAD + "\n".join(rows[m.name] for m in MUTANTS if m.name in rows) + "\n")
    missed = [m.name for m, (caught, _) in zip(chosen, judged, strict=True) if not caught]
    print(f"{len(chosen)} breaks, unnoticed: {missed or 'none'}")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
