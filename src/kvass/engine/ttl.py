"""The values of ``kvass.ttl``: for how long a client wants its rows to stay (docs/hints.md)."""

from __future__ import annotations

import re
from typing import Any, Final

_TIME: Final = re.compile(r"([1-9][0-9]{0,4})([smh])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
LONGEST_S: Final = 86_400


def ttl_seconds(ttl: Any) -> float | None:
    """The seconds that ``ttl`` stands for: a number up to a day, or a text like ``5m``. None: it
    has no such meaning."""
    if isinstance(ttl, str) and (match := _TIME.fullmatch(ttl)):
        ttl = int(match[1]) * _SECONDS[match[2]]
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 <= ttl <= LONGEST_S:
        return None
    return float(ttl)
