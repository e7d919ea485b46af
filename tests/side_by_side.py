"""Tests in several processes at once (``make test`` runs two): who gets which file, and when.

Law of this file: it says where and when a test runs, never which tests run or what they see.

A file's tests stay together, in their order: its fixtures are made once, and what its cases compute
beforehand is computed once. Files that share engines stay together too. Long ones are begun first,
so that none is left over at the end. A test marked ``alone`` runs while no other test does: it sees
a clock, and a busy neighbour must not decide it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

SHARING: Final = tuple(
    f"tests/engine/test_{name}.py"
    for name in ("engines_come_and_go", "never_in_the_way", "ranks", "right", "tiers")
)
"""These share the engines of ``tests/engine/conftest.py``, so one process gets them all."""

LONGEST_FIRST: Final = (*SHARING, "tests/engine", "tests/simulation", "tests/tiers", "tests/gpu")
"""What begins first, in this order; the rest follows as collected."""


def rank(nodeid: str) -> int:
    """When a test has its turn: the lower, the earlier."""
    turns = (n for n, first in enumerate(LONGEST_FIRST) if nodeid.startswith(first))
    return next(turns, len(LONGEST_FIRST))


def company(nodeid: str) -> str:
    """Tests of one company run in one process."""
    file = nodeid.split("::", 1)[0]
    return "engines" if file in SHARING else file


def cores() -> int:
    """This process's share of the machine's."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))


def scheduler(config: Any, log: Any) -> Any:
    """xdist's scheduler, but that companies stay together and begin in the order of ``rank``."""
    from xdist.scheduler import LoadScopeScheduling  # not there where tests run without xdist

    class ByCompany(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return company(nodeid)

    config.option.loadscopereorder = False  # by the number of tests, which says nothing of time
    return ByCompany(config, log)


@contextmanager
def environment_kept() -> Iterator[None]:
    """Whatever comes first in a process: vLLM's scheduler, made in a test, preloads a library of
    torch into every process that is started after it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class Room:
    """Where tests run: together, or one alone. Who waits to be alone lets nobody else in.

    By flock(2), so that a process that dies is out of it. Explicitly let go: a forked child has the
    same locks.
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
