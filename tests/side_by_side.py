"""Tests in several processes at once (``make test`` runs three): which share a process, and when.

pytest-xdist hands out the groups that this file forms, in the order in which they come. Its own
``--dist loadgroup`` marks tests by an attribute that pytest 9.2 no longer has. It also cannot keep
other tests from running beside one that sees a clock (marked ``alone``): ``Room`` does that.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

_FOLDER: Final = pytest.StashKey[Path]()

SHARING: Final = tuple(
    f"tests/engine/test_{name}.py"
    for name in (
        *("engines_come_and_go", "events", "in_step", "lora", "never_in_the_way", "nodes", "pairs"),
        *("ranks", "right", "tenants", "tiers", "verification"),
    )
)
"""These share the engines of ``tests/engine/conftest.py``, so they are one group: another process
would start each engine again."""

LONGEST_FIRST: Final = (
    *(*SHARING, "tests/test_soak.py"),
    *("tests/engine", "tests/simulation", "tests/tiers", "tests/gpu"),
)
"""What begins first, in this order, so that no long file is left over at the end. The soak needs
little CPU, so it runs beside the start of engines, and before tests that run alone."""


def rank(nodeid: str) -> int:
    """The lower, the earlier a test begins."""
    ranks = (n for n, first in enumerate(LONGEST_FIRST) if nodeid.startswith(first))
    return next(ranks, len(LONGEST_FIRST))


def group(nodeid: str) -> str:
    """Tests of a group run in one process: those of a file, whose fixtures are made once."""
    return "engines" if nodeid.startswith(SHARING) else nodeid.split("::", 1)[0]


def folder(config: pytest.Config) -> Path:
    """That all processes of the run share."""
    if _FOLDER not in config.stash:
        if hasattr(config, "workerinput"):  # its own is in it
            config.stash[_FOLDER] = Path(config.option.basetemp).parent
        else:
            made = tempfile.TemporaryDirectory()
            config.add_cleanup(made.cleanup)
            config.stash[_FOLDER] = Path(made.name)
    return config.stash[_FOLDER]


def scheduler(config: Any, log: Any) -> Any:
    """xdist's scheduler of these groups."""
    from xdist.scheduler import LoadScopeScheduling  # not there where tests run without xdist

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False  # it would order by the number of tests
    return ByGroup(config, log)


class Room:
    """Where tests run: together, or one alone. While one waits to be alone, no other enters. A
    process whose next test is to be alone, too, stays: else that one waits for others again.

    Locks of flock(2) end with their process. A forked child has them too, so they are released
    explicitly.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT
        self._door, self._inside = (os.open(folder / x, flags) for x in ("door", "inside"))
        self._stayed = False

    @contextmanager
    def entered(self, *, alone: bool, stays: bool = False) -> Iterator[None]:
        """``stays``: the next test of this process is alone, too."""
        if not self._stayed:
            fcntl.flock(self._door, fcntl.LOCK_EX)
            try:
                fcntl.flock(self._inside, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            finally:
                fcntl.flock(self._door, fcntl.LOCK_UN)
        self._stayed = alone and stays
        try:
            yield
        finally:
            if not self._stayed:
                fcntl.flock(self._inside, fcntl.LOCK_UN)
