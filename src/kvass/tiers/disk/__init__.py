"""The disk tier: stores records in segment files of one folder."""

from kvass.tiers.disk.tier import DiskTier, open_disk

__all__ = ["DiskTier", "open_disk"]
