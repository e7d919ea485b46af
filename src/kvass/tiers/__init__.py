"""Tiers (L2): backends that keep rows beyond the arena and beyond a daemon's life."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvass.tiers.url import open_tier

if TYPE_CHECKING:
    from kvass.tiers.base import Tier as Tier

__all__ = ["Tier", "open_tier"]


def __getattr__(name: str) -> Any:
    """``Tier`` is imported when first used: who only reads a tier's URL needs no numpy."""
    if name != "Tier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvass.tiers.base import Tier

    return Tier
