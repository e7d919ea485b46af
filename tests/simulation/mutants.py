"""Breaks of the core, made by hand (``breaks.txt``), and which check notices each.

``python -m tests.simulation.mutants`` writes ``docs/mutants.md``: what noticed each break first.
With parts of names after it, it judges only those breaks again. What the page says noticed a break
is asked first, because that is quick. A page that is out of date costs time and hides nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support import processes
from tests.support.mutants import ROOT, UNBROKEN, Mutant, break_package, parse, unit_tests

TABLE = ROOT / "docs" / "mutants.md"
MUTANTS = parse(Path(__file__).with_name("breaks.txt").read_text())


# ---------------------------------------------------------------- checking


def simulate(seeds: Iterable[int]) -> str:
    """The first seed that fails, and how; empty if none does."""
    from tests.support.simulation.simulator import run_seed  # imports the core

    return next(filter(None, map(run_seed, seeds)), "").partition("\n")[0]


def notice(mutant: Mutant) -> str:
    """The first check that notices, quickest first; empty if none does. Breaks this process."""
    break_package(mutant, "kvass.core")
    seeds, tests = noted(mutant)
    return (
        (unit_tests(*tests) if tests else "")
        or simulate(seeds)
        or simulate(range(12))
        or unit_tests("tests/core")
        or simulate(range(300))
    )


def unblamed() -> list[str]:
    """What two checks say of a core that is not broken."""
    break_package(UNBROKEN, "kvass.core")
    return [simulate(range(3)), unit_tests("tests/core/test_room.py")]


def noted(mutant: Mutant) -> tuple[list[int], list[str]]:
    """What the page says noticed a break: a seed, and a test. A seed's life is another one as soon
    as the simulator draws one number more, so the test is asked first."""
    row = _known().get(mutant.name, "")
    seed = re.search(r"\| seed (\d+):", row)
    test = re.search(r"`(test_\w+)`", row)
    tests = [
        f"{file}::{test[1]}"
        for file in (ROOT / "tests" / "core").glob("test_*.py")
        if test and f"def {test[1]}(" in file.read_text()
    ]
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

Each line is a break of `kvass/core`, made by hand, and the check that noticed it first: a test of
`tests/core`, or a seed of the simulator and what that seed found.

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
    with processes.pool(1) as pool:
        judged = pool.map(_judge, chosen, chunksize=1)
    rows = _known() if parts else {}
    rows.update((m.name, row) for m, (_, row) in zip(chosen, judged, strict=True))
    TABLE.write_text(_HEAD + "".join(f"{rows[m.name]}\n" for m in MUTANTS if m.name in rows))
    missed = [m.name for m, (caught, _) in zip(chosen, judged, strict=True) if not caught]
    print(f"{len(chosen)} breaks, unnoticed: {missed or 'none'}")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
