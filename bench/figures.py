"""How figures of several measurements are put together."""

from __future__ import annotations

from typing import Any


def add(figures: dict[str, Any], more: dict[str, Any], suffix: str = "") -> None:
    """Put ``more`` to ``figures``, with one ``bytes_equal`` for all of them."""
    same = more.pop("bytes_equal") and figures.get("bytes_equal", True)
    figures |= {f"{name}{suffix}": figure for name, figure in more.items()}
    figures["bytes_equal"] = same
