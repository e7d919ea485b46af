"""Breaks of the core, made by hand (``breaks.txt``), and which check notices each.

``python -m tests.simulation.mutants`` writes ``noticed.txt``: which check noticed each break first.
With parts of names after it, it judges only those breaks. A break is shown first to the check that
noticed it last time, because that is quick. A story of a script is named after its file. If
``noticed.txt`` is out of date, other checks follow.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support import processes
from tests.support.mutants import ROOT, UNBROKEN, Mutant, break_package, parse, unit_tests

NOTICED = Path(__file__).with_name("noticed.txt")
"""Of each break, in the order of ``breaks.txt``, a line ``name | check``."""
MUTANTS = parse(Path(__file__).with_name("breaks.txt").read_text())


# ---------------------------------------------------------------- checking


def simulate(seeds: Iterable[int]) -> str:
    """The first seed that fails, and how; empty if none does."""
    from tests.support.simulation.simulator import run_seed  # imports the core

    return next(filter(None, map(run_seed, seeds)), "").partition("\n")[0]


def notice(mutant: Mutant) -> str:
    """The first check that notices, quickest first; empty if none does. Breaks this process."""
    break_package(mutant, "kvass.core")
    seeds, tests = previous_checks(mutant)
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
    return [simulate(range(3)), unit_tests("tests/core/scripts/row_allocator.txt")]


def previous_checks(mutant: Mutant) -> tuple[list[int], list[str]]:
    """The seed, and the test, that ``noticed.txt`` names for a break."""
    check = noticed().get(mutant.name, "")
    seed = re.match(r"seed (\d+):", check)
    test = re.fullmatch(r"`(test_\w+)`", check)
    story = re.fullmatch(r"`(\w+\.txt): (.+)`", check)
    tests = [
        f"{file}::{test[1]}"
        for file in (ROOT / "tests" / "core").glob("test_*.py")
        if test and f"def {test[1]}(" in file.read_text()
    ]
    if story and f"== {story[2]}\n" in (text := ROOT / "tests/core/scripts" / story[1]).read_text():
        tests.append(f"{text}::{story[2]}")
    return [int(seed[1])] if seed else [], tests


# ---------------------------------------------------------------- what noticed them


def noticed() -> dict[str, str]:
    """The check that noticed each break first, as ``noticed.txt`` has it."""
    return dict(line.split(" | ", 1) for line in NOTICED.read_text().splitlines())


def _check(printed: str) -> str:
    """The check that noticed a break, from the first line that it printed; ``-`` if none did."""
    seed = re.match(r"seed (\d+) failed: \w+: (?:(law \d+)|(.{0,48}))", printed)
    if seed:
        return f"seed {seed[1]}: {seed[2] or seed[3]}".replace("|", "/")
    if not printed:
        return "-"
    file, _, name = printed.partition(" ")[2].partition(" - ")[0].strip().partition("::")
    return f"`{Path(file).name}: {name}`" if file.endswith(".txt") else f"`{name.split('[')[0]}`"


def _judge(mutant: Mutant) -> str:
    """The check that noticed a break first; ``-`` if none did."""
    check = _check(notice(mutant))
    print(f"{mutant.name} | {check}", flush=True)  # noqa: T201
    return check


def main(parts: list[str]) -> int:
    """Write ``noticed.txt``; 1 if a break went unnoticed.

    ``parts``: parts of names; only these breaks are judged. None: all are.
    """
    chosen = [m for m in MUTANTS if not parts or any(part in m.name for part in parts)]
    with processes.pool(1) as pool:
        judged = pool.map(_judge, chosen, chunksize=1)
    checks = noticed() if parts else {}
    checks.update((m.name, check) for m, check in zip(chosen, judged, strict=True))
    lines = [f"{m.name} | {checks[m.name]}\n" for m in MUTANTS if m.name in checks]
    NOTICED.write_text("".join(lines))
    missed = [m.name for m, check in zip(chosen, judged, strict=True) if check == "-"]
    print(f"{len(chosen)} breaks, unnoticed: {missed or 'none'}")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
