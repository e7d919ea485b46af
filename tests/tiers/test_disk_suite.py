"""The disk tier is a tier: past the page cache and through it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvass.testing import TierSuite
from kvass.testing.tier_suite import ROOM, MakeTier
from kvass.tiers.disk import DiskTier
from kvass.tiers.disk.segment import SegmentFile


class TestDisk(TierSuite):
    @pytest.fixture
    def make_tier(self, folder: Path) -> MakeTier:
        return lambda: DiskTier(folder, ROOM)


class TestBufferedDisk(TierSuite):
    """Where the file system knows no O_DIRECT; with one thread."""

    @pytest.fixture
    def make_tier(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> MakeTier:
        monkeypatch.setattr(SegmentFile, "_go_direct", lambda self: None)
        return lambda: DiskTier(folder, ROOM, threads=1)
