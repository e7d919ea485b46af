"""What a check returns, and how sizes are written in it."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, what kvass will use of it, what that costs, and what to do about it.

    ``error``: the daemon cannot serve here. ``warning``: somebody runs uncached, or slower than
    this machine allows. ``note``: it may matter, or could not be read.
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

NOTHING: Final = "nothing: the daemon cannot serve"


def shown(size: int) -> str:
    """A size for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f}".removesuffix(".0") + " " + unit
    return f"{size} B"


def limit_shown(limit: int, size: bool = False) -> str:
    """A limit for people."""
    if limit == resource.RLIM_INFINITY:
        return "unlimited"
    return shown(limit) if size else str(limit)
