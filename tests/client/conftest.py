"""A scripted daemon, and registrations to meet it with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvass.messages import Register
from kvass.types import GroupLayout, RankLayout
from tests.support.wire.scripted_daemon import ScriptedDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ScriptedDaemon]:
    with ScriptedDaemon(tmp_path / "kvass.sock") as scripted:
        yield scripted


@pytest.fixture
def registration() -> Register:
    return Register(instance="engine", identity={"model": "tiny"}, chunk_tokens=256)


@pytest.fixture
def worker_registration() -> Register:
    group = GroupLayout(kind="full", block_tokens=32, layers=("l0",), page_bytes=(512,))
    return Register(
        instance="engine",
        identity={"model": "tiny"},
        chunk_tokens=256,
        rank=0,
        layout=RankLayout(groups=(group,)),
    )
