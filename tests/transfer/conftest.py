"""The stub of CUDA's driver, compiled once for all files here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transfer.stub_driver import Left, Stub, compile_stub


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_stub(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def stub(compiled: Path, tmp_path: Path) -> Iterator[Stub]:
    """At the end the test's thread has its own context and capture mode, and nothing is left."""
    made = Stub(compiled, tmp_path)
    yield made
    assert made.thread == (0, 0)
    assert made.left == Left()
