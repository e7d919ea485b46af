"""Folders, disk tiers and servers of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvass.tiers.disk import DiskTier

OpenDisk = Callable[..., DiskTier]
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One of the module's ``SERVER``, which no test breaks."""
    with closing(request.module.SERVER()) as made:
        yield made


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers that a test may break, and opens tiers: what makes one, and its arguments."""
    with ExitStack() as ending:
        yield lambda kind, *options, **more: ending.enter_context(closing(kind(*options, **more)))


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
