"""What these tests compute beforehand, on all free cores. Each case collects its own result, and
what a run did not select is not computed."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.pool import Pool
from typing import Any

import pytest

from tests.support import processes


@pytest.fixture(scope="module")
def cores() -> Iterator[Pool]:
    with processes.pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """By parameter: its values in the cases of this module that this run selected, in order."""
    found: dict[str, list[Any]] = {}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            for name, value in params.items():
                found.setdefault(name, []).append(value)
    return found
