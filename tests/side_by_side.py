"""Tests in several processes at once (``make test`` runs two): which share a process, and when.

pytest-xdist hands out the groups that this file forms (``--dist loadgroup``), in the order in which
they come. What it cannot do is to keep all other tests from running beside one that sees a clock
(marked ``alone``): ``Room`` does that.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

SHARING: Final = tuple(
    f"tests/engine/test_{name}.py"
    for name in ("engines_come_and_go", "never_in_the_way", "ranks", "right", "tiers")
)
"""These share the engines of ``tests/engine/conftest.py``, so they are one group."""

LONGEST_FIRST: Final = (*SHARING, "tests/engine", "tests/simulation", "tests/tiers", "tests/gpu")
"""What begins first, in this order, so that no long file is left over at the end."""


def rank(nodeid: str) -> int:
    """The lower, the earlier a test begins."""
    ranks = (n for n, first in enumerate(LONGEST_FIRST) if nodeid.startswith(first))
    return next(ranks, len(LONGEST_FIRST))


def group(items: list[pytest.Item]) -> None:
    """Order the tests, and make a group of each file: its fixtures are made once."""
    items.sort(key=lambda item: rank(item.nodeid))
    for item in items:
        name = "engines" if item.nodeid.startswith(SHARING) else "/".join(item.path.parts[-2:])
        item.add_marker(pytest.mark.xdist_group(name))


class Room:
    """Where tests run: together, or one alone. While one waits to be alone, no other enters.

    Locks of flock(2) end with their process. A forked child has them too, so they are released
    explicitly.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT
        self._door, self._inside = (os.open(folder / x, flags) for x in ("door", "inside"))

    @contextmanager
    def entered(self, *, alone: bool) -> Iterator[None]:
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._inside, fcntl.LOCK_UN)
