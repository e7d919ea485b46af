"""What a check of ``kvass doctor`` returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

from kvass.cli.report import size as in_units

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a check: a fact, what kvass will use, what that costs, and what to do about it.

    ``error``: the daemon cannot serve here. ``warning``: an engine does not start or runs uncached,
    or kvass is slower than this machine allows. ``note``: it may matter, or could not be read.
    """

    level: Level
    found: str
    used: str = ""
    cost: str = ""
    do: str = ""


ok: Final = partial(Finding, "ok")
note: Final = partial(Finding, "note")
warning: Final = partial(Finding, "warning")
error: Final = partial(Finding, "error")


def shown(size: float | None) -> str:
    if size is None:
        return "unknown"
    return "unlimited" if size == math.inf else in_units(size).replace(".0 ", " ")
