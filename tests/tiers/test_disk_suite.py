"""The disk tier is a tier: past the page cache and through it, with one thread and with many."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvass.testing import TierSuite
from kvass.testing.tier_suite import ROOM, MakeTier
from kvass.tiers.disk import DiskTier


class TestDisk(TierSuite):
    @pytest.fixture
    def make_tier(self, folder: Path) -> MakeTier:
        return lambda: DiskTier(folder, ROOM)


class TestBufferedDisk(TierSuite):
    @pytest.fixture
    def make_tier(self, folder: Path) -> MakeTier:
        return lambda: DiskTier(folder, ROOM, direct=False)


class TestDiskThatTrustsWhatItProved(TierSuite):
    @pytest.fixture
    def make_tier(self, folder: Path) -> MakeTier:
        return lambda: DiskTier(folder, ROOM, verify_always=False, threads=1)
