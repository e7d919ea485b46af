"""The Mooncake tier: stores records as objects of a Mooncake Store."""

from kvass.tiers.mooncake.tier import MooncakeTier, open_mooncake

__all__ = ["MooncakeTier", "open_mooncake"]
