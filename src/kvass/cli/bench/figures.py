"""Figures: how they are made of times, put together, and printed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times as fast as theirs ours is: the median of the rounds' ratios."""
    return median(b / a for a, b in zip(ours, theirs, strict=True))


def percentiles_us(times: Sequence[float]) -> dict[str, float]:
    """The median and the 99th percentile of seconds, in microseconds."""
    p50, p99 = np.percentile(np.array(times) * 1e6, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def add(figures: dict[str, Any], more: dict[str, Any], prefix: str = "", suffix: str = "") -> None:
    """Put ``more`` to ``figures``, with one ``bytes_equal`` for all of them."""
    same = more.pop("bytes_equal") and figures.get("bytes_equal", True)
    figures |= {f"{prefix}{name}{suffix}": figure for name, figure in more.items()}
    figures["bytes_equal"] = same


def table(figures: dict[str, Any]) -> str:
    """The figures as lines for a person."""
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            flat |= {f"{name} {part}": one for part, one in value.items()}
        else:
            flat[name] = value
    width = max(map(len, flat))
    return "\n".join(f"{name:<{width}}  {_shown(value):>12}" for name, value in flat.items())


def _shown(value: bool | str | float | None) -> str:
    """One figure, in as many digits as mean something."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)
