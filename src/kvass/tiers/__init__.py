"""Tiers (L2): stores behind the arena. They keep rows after eviction and after the daemon ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvass.tiers.url import open_tier

if TYPE_CHECKING:
    from kvass.tiers.base import Tier as Tier

__all__ = ["Tier", "open_tier"]


def __getattr__(name: str) -> Any:
    """Import ``Tier`` when it is first used, because code that only reads tier URLs has no
    numpy."""
    if name != "Tier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvass.tiers.base import Tier

    return Tier
