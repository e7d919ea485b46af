"""Daemons for tests. A module shares one where its tests leave it as they found it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvass.testing.daemon import Daemon, running_daemon


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("shared"), lost_engine_grace_s=0.2) as daemon:
        yield daemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, lost_engine_grace_s=0.2) as daemon:
        yield daemon


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tier's. Daemons and processes of tiers find our modules."""
    made = tmp_path / "tier"
    made.mkdir()
    root = str(Path(__file__).parents[2])
    found = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))
    return made
