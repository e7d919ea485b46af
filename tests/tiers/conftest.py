"""Folders and disk tiers of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.tiers.disk import DiskTier

OpenDisk = Callable[..., DiskTier]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tier"
    made.mkdir(mode=0o755)
    return made


@pytest.fixture
def open_disk(folder: Path) -> Iterator[OpenDisk]:
    """Opens the tier in ``folder``; closes what the test leaves."""
    opened: list[DiskTier] = []

    def open_(capacity: int = 64 << 20, **options: Any) -> DiskTier:
        opened.append(DiskTier(folder, capacity, **options))
        return opened[-1]

    yield open_
    for tier in opened:
        tier.close()
