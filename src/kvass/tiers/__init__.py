"""Tiers (L2): backends that keep rows beyond the arena and beyond a daemon's life."""

from kvass.tiers.base import Tier
from kvass.tiers.url import open_tier

__all__ = ["Tier", "open_tier"]
