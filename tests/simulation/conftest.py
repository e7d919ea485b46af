"""What these tests ask again and again, asked on all free cores; each case collects its own answer.

Law of this file: a case's answer is its own. Which core worked it out changes nothing, what a run
did not select is not worked out, and what was raised there is raised in the case.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from tests import side_by_side


def _as_in_pytest() -> None:
    """Warnings of ours are errors there too (``filterwarnings`` of ``pyproject.toml``)."""
    warnings.filterwarnings("error", module=r"kvass|tests\.support")


@pytest.fixture(scope="module")
def cores() -> Iterator[ProcessPoolExecutor]:
    """A process for each core of ours, with nothing of this one's in it."""
    with ProcessPoolExecutor(
        side_by_side.cores(), mp_context=get_context("spawn"), initializer=_as_in_pytest
    ) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """What this run asks of the module: the values of each parameter, in the order of its cases."""
    found: dict[str, list[Any]] = {}
    for item in request.session.items:
        if item.path == request.path and isinstance(item, pytest.Function):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            for name, value in params.items():
                found.setdefault(name, []).append(value)
    return found
