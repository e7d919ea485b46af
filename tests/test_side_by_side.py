"""Several processes share the tests: one that is marked alone is alone, and none waits for ever."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from tests.side_by_side import LONGEST_FIRST, Room, group, rank

ROOT = Path(__file__).parent.parent
LONG_S, SHORT_S = 60.0, 0.2


class Visit:
    """A test in the room of ``folder`` or at its door, with locks as of another process."""

    def __init__(self, pool: ThreadPoolExecutor, folder: Path, *, alone: bool = False) -> None:
        self._go, self.inside = Event(), Event()
        self.over = pool.submit(self._run, Room(folder), alone)

    def _run(self, room: Room, alone: bool) -> None:
        with room.entered(alone=alone):
            self.inside.set()
            assert self._go.wait(LONG_S)

    def leave(self) -> None:
        self._go.set()
        self.over.result(LONG_S)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_a_test_that_is_alone_is_alone(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    first, second = Visit(pool, tmp_path), Visit(pool, tmp_path)
    assert first.inside.wait(LONG_S)
    assert second.inside.wait(LONG_S)  # these two run together
    alone = Visit(pool, tmp_path, alone=True)
    assert not alone.inside.wait(SHORT_S)
    late = Visit(pool, tmp_path)
    first.leave()
    assert not late.inside.wait(SHORT_S)  # it could join the second, but another waits to be alone
    second.leave()
    assert alone.inside.wait(LONG_S)
    assert not late.inside.wait(SHORT_S)
    alone.leave()
    assert late.inside.wait(LONG_S)
    late.leave()


def test_who_is_alone_twice_waits_once(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    room = Room(tmp_path)
    with room.entered(alone=True, stays=True):
        late = Visit(pool, tmp_path)
    assert not late.inside.wait(SHORT_S)
    with room.entered(alone=True):
        pass
    assert late.inside.wait(LONG_S)
    late.leave()


def test_a_test_that_fails_leaves(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Room(tmp_path).entered(alone=True):
        raise KeyError
    with Room(tmp_path).entered(alone=True):
        pass


def test_what_is_said_to_be_long_is_there() -> None:
    assert [path for path in LONGEST_FIRST if not (ROOT / path).exists()] == []
    assert rank(f"{LONGEST_FIRST[0]}::test") == 0
    assert rank("tests/test_side_by_side.py") == len(LONGEST_FIRST)


def test_whatever_uses_the_shared_engines_shares_a_process() -> None:
    files = sorted((ROOT / "tests/engine").glob("test_*.py"))
    uses = [one for one in files if re.search(r"\b[ab]: EngineProcess", one.read_text())]
    assert len(uses) > 3
    assert [one.name for one in uses if group(f"tests/engine/{one.name}::test") != "engines"] == []


def test_a_file_stays_in_one_process() -> None:
    """By what a run of two processes says of itself."""
    run = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "2",
        "-v",
        "-p",
        "no:cacheprovider",
        "tests/layout",
    ]
    said = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    ran = set(re.findall(r"^\[(gw\d)\].* (tests/\S+\.py)::", said, re.MULTILINE))
    files = [file for _, file in ran]
    assert len(files) == len(set(files)) > 2, said
    assert len({worker for worker, _ in ran}) == 2
