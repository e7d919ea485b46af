"""A file of ratios that later runs are compared with.

Ratios differ from run to run, because of where memory lies, and of what else the machine does. So a
baseline has the medians of ``RUNS`` runs. A ratio may be lower than its median by ``DEVIATIONS``
times the median deviation of the runs; one bad run does not change that. It may always be lower by
the share ``TOLERANCE``. If a ratio is lower than that, everything is measured ``RUNS_AGAIN`` times
more, and the medians count.

Measured on two cores with a load of 20: most runs were within 6 % of the median, those of the disk
within 14 %, and one in ten was 35 % below.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import msgspec

from kvass.errors import ConfigError

RUNS: Final = 5
RUNS_AGAIN: Final = 2
TOLERANCE: Final = 0.15
DEVIATIONS: Final = 4

Figures = dict[str, Any]


class Ratio(msgspec.Struct, frozen=True):
    """A ratio of the baseline. ``ratio``: its median; ``least``: the lowest value that is
    accepted."""

    ratio: float
    least: float


class Baseline(msgspec.Struct, frozen=True):
    """The content of a baseline file. ``settings``: those with which the ratios were measured."""

    kvass_bench: Literal[1]
    settings: dict[str, str | int]
    ratios: dict[str, Ratio]

    def fallen(self, figures: Figures) -> list[str]:
        """A line for each ratio that fell too far."""
        return [
            f"{name} fell by {1 - now / one.ratio:.0%}: it is {now:.3f}, was {one.ratio:.3f} "
            f"and may be {one.least:.3f}"
            for name, one in self.ratios.items()
            if (now := figures.get(name, 0.0)) < one.least
        ]


def read(path: Path, settings: dict[str, str | int]) -> Baseline:
    """The baseline in a file. Raises ``ConfigError`` for one that is not of these ``settings``."""
    try:
        baseline = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except OSError as error:
        raise ConfigError(f"--check {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--check {path}: no baseline of kvass bench: {error}") from None
    for name, value in settings.items():
        if (theirs := baseline.settings.get(name)) != value:
            raise ConfigError(f"--check {path}: its {name} is {theirs}, and here it is {value}")
    return baseline


def write(path: Path, settings: dict[str, str | int], runs: Sequence[Figures]) -> None:
    """Replace ``path`` by a baseline of these runs. Raises ``ConfigError``."""
    ratios = {}
    for name in ratio_names(runs[0]):
        values = [run[name] for run in runs]
        middle = median(values)
        deviation = median(abs(value - middle) for value in values)
        allowed = max(TOLERANCE * middle, DEVIATIONS * deviation)
        ratios[name] = Ratio(round(middle, 3), round(max(0.0, middle - allowed), 3))
    encoded = msgspec.json.encode(Baseline(1, settings, ratios))
    try:
        path.write_bytes(msgspec.json.format(encoded) + b"\n")
    except OSError as error:
        raise ConfigError(f"--write-baseline {path}: {error.strerror}") from error


def ratio_names(figures: Figures) -> list[str]:
    return [name for name in figures if "_vs_" in name]


def merged(runs: Sequence[Figures]) -> Figures:
    """The last run's figures, with the medians of all runs' ratios."""
    medians = {name: median(run[name] for run in runs) for name in ratio_names(runs[0])}
    return runs[-1] | medians | {"bytes_equal": all(run["bytes_equal"] for run in runs)}
