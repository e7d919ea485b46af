"""Breaks of the core, made by hand, and which check notices each.

Law of this file: a break that nothing notices is a hole in the checks, and a break whose text is no
longer in the core says so instead of passing.

``python -m tests.simulation.mutants`` runs every break against every check and writes
``docs/mutants.md``, or with parts of names after it only the rows of those; the test beside it
only asks that something notices. What the page says noticed a break is asked first: it is an order
of asking and no more, so a page that is out of date costs time and hides nothing.
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
from pathlib import Path

from tests.simulation import breaks_room, breaks_settlement, breaks_tiers
from tests.simulation.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "mutants.md"


class StaleMutantError(Exception):
    """The core changed: this break does not apply any more, write it anew."""


UNBROKEN = Mutant("unbroken", 0, ())

OF_L1 = [*breaks_settlement.BREAKS, *breaks_room.BREAKS]
OF_TIERS = breaks_tiers.BREAKS
MUTANTS = [*OF_L1, *OF_TIERS]


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
for seed in {seeds}:
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


def simulate(path: Path, seeds: Iterable[int], validate: bool = True) -> str:
    """The first seed that fails, and how."""
    return _run(path, "-c", _SEEDS.format(seeds=[*seeds], validate=validate))


def unit_tests(path: Path, *args: str) -> str:
    """The tests that fail, a line each."""
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no")
    return _run(path, *pytest, "--hypothesis-profile=once", *args)


_LAWS = ["tests/core", "--ignore=tests/core/test_model.py", "--ignore=tests/core/test_fuzz.py"]


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
    seed = re.search(r"\| (?:simulator, )?seed (\d+):", row)
    test = re.search(r"`(test_\w+)`", row)
    files = [*(ROOT / "tests" / "core").glob("test_*.py")] if test else []
    tests = [f"{f}::{test[1]}" for f in files if test and f"def {test[1]}(" in f.read_text()]
    return [int(seed[1])] if seed else [], tests


# ---------------------------------------------------------------- the table


def _seed(told: str) -> str:
    found = re.match(r"seed (\d+) failed: \w+: (?:(law \d+)|(.{0,48}))", told)
    return f"seed {found[1]}: {found[2] or found[3]}".replace("|", "/") if found else "-"


def _test(told: str) -> str:
    """The name of a test in pytest's line about it."""
    return f"`{told.split('::')[1].split(' ')[0].split('[')[0]}`"


def _row(mutant: Mutant) -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = broken_copy(mutant, Path(folder))
        sim, alone = simulate(path, range(300)), simulate(path, range(300), validate=False)
        told = laws(path).splitlines()
        model = unit_tests(path, "tests/core/test_model.py")
        fuzz = unit_tests(path, "tests/core/test_fuzz.py")
    units = f"{len(told)}: {_test(told[0])}" if told else "-"
    cells = [
        mutant.name,
        str(mutant.law),
        _seed(sim),
        _seed(alone),
        units,
        "yes" if model else "-",
        "yes" if fuzz else "-",
    ]
    return bool(sim or told or model or fuzz), f"| {' | '.join(cells)} |"


def _row_of_tiers(mutant: Mutant) -> tuple[bool, str]:
    told = notice(mutant)
    by = f"simulator, {_seed(told)}" if told.startswith("seed ") else _test(told) if told else "-"
    return bool(told), f"| {mutant.name} | {mutant.law} | {by} |"


def _judge(mutant: Mutant) -> tuple[bool, str]:
    """Whether anything noticed a break, and its row."""
    noticed, row = (_row_of_tiers if mutant in OF_TIERS else _row)(mutant)
    print(row, flush=True)  # noqa: T201
    return noticed, row


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

_HEAD_OF_TIERS = """
## Promotion, flushing, epochs

These are judged as `tests/simulation/test_mutants.py` judges all of them: by the first check that
notices, of what this page says, twelve seeds, the unit tests, and three hundred seeds.

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
    TABLE.parent.mkdir(exist_ok=True)
    tables = ((_HEAD, OF_L1), (_HEAD_OF_TIERS, OF_TIERS))
    lines = (h + "".join(f"{rows[m.name]}\n" for m in of if m.name in rows) for h, of in tables)
    TABLE.write_text("".join(lines))
    missed = [m.name for m, (caught, _) in zip(chosen, judged, strict=True) if not caught]
    print(f"{len(chosen)} breaks, unnoticed: {missed or 'none'}")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
