"""What was measured: rows of samples, with the reason where there are none."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import msgspec

from bench.engine import rotated
from kvass.cli.bench.rig import say
from kvass.errors import KvassError
from tests.support.vllm.process import EngineDied


class Row(msgspec.Struct):
    """One figure; ``more`` is better, or less. ``samples``: by system, in the order in which they
    were taken; ``loads``: the machine's 1-minute load at each. ``trouble``: why a system has none.
    """

    part: str
    name: str
    what: str
    unit: str
    more: bool
    samples: dict[str, list[float]] = {}
    trouble: dict[str, str] = {}
    loads: list[float] = []

    def add(self, system: str, value: float) -> None:
        self.samples.setdefault(system, []).append(value)
        self.loads.append(os.getloadavg()[0])

    def median(self, system: str) -> float:
        return median(self.samples[system])

    def spread(self, system: str) -> tuple[float, float]:
        """The quartiles; of fewer than 4 samples the lowest and the highest."""
        values = self.samples[system]
        if len(values) < 4:
            return min(values), max(values)
        low, _, high = quantiles(values, n=4, method="inclusive")
        return low, high


class Results(msgspec.Struct):
    """A run. ``machine``: what it ran on; ``versions``: of what was compared; ``repetitions``: how
    many times engines were started."""

    machine: dict[str, str]
    versions: dict[str, str]
    rounds: int
    began: str
    rows: list[Row] = []
    minutes: float = 0.0
    repetitions: int = 1

    def row(self, part: str, name: str, what: str, unit: str, *, more: bool = False) -> Row:
        self.rows.append(Row(part, name, what, unit, more))
        return self.rows[-1]

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))


@contextmanager
def attempt(system: str, *rows: Row) -> Iterator[None]:
    """What fails is written into these rows, unless they have a figure or a reason already."""
    try:
        yield
    except (KvassError, EngineDied, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        reason = re.sub(r"^engine process \d+ |; the end of its log:$", "", reason)[:240]
        say(f"nothing more of {system} here: {reason}")
        for row in rows:
            row.trouble.setdefault(system, reason)


def in_turns(systems: Sequence[str], rounds: int, *rows: Row) -> Iterator[tuple[int, str]]:
    """(round, system): another one first in each round; who failed in ``rows`` is left out."""
    for number in range(rounds):
        for system in rotated(list(systems), number):
            if not any(system in row.trouble for row in rows):
                yield number, system


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
