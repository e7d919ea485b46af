"""Two processes that share the tests: who is alone is alone, and nobody waits for ever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest

from tests.side_by_side import LONGEST_FIRST, Room, environment_kept, rank

ROOT = Path(__file__).parent.parent
LONG_S = 60.0
SHORT_S = 0.2
"""For what must not happen: nothing comes of waiting longer but certainty."""


class Guest:
    """Somebody in a room of ``folder``, or before its door, with locks as of another process."""

    def __init__(self, pool: ThreadPoolExecutor, folder: Path, *, alone: bool = False) -> None:
        self._go, self.inside = Event(), Event()
        self.gone = pool.submit(self._visit, Room(folder), alone)

    def _visit(self, room: Room, alone: bool) -> None:
        with room.entered(alone=alone):
            self.inside.set()
            assert self._go.wait(LONG_S)

    def leave(self) -> None:
        self._go.set()
        self.gone.result(LONG_S)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_tests_run_together(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    guests = [Guest(pool, tmp_path) for _ in range(2)]
    assert all(guest.inside.wait(LONG_S) for guest in guests)
    for guest in guests:
        guest.leave()


@pytest.mark.parametrize("other_alone", [False, True])
def test_who_is_alone_is_alone(tmp_path: Path, pool: ThreadPoolExecutor, other_alone: bool) -> None:
    first = Guest(pool, tmp_path, alone=True)
    assert first.inside.wait(LONG_S)
    other = Guest(pool, tmp_path, alone=other_alone)
    assert not other.inside.wait(SHORT_S)
    first.leave()
    assert other.inside.wait(LONG_S)
    other.leave()


def test_who_waits_to_be_alone_is_the_next(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with ExitStack() as stack:
        first = Guest(pool, tmp_path)
        stack.callback(first.leave)
        assert first.inside.wait(LONG_S)
        alone = Guest(pool, tmp_path, alone=True)
        assert not alone.inside.wait(SHORT_S)
        late = Guest(pool, tmp_path)
        assert not late.inside.wait(SHORT_S)  # though others are inside, and it could join them
    assert alone.inside.wait(LONG_S)
    assert not late.inside.is_set()
    alone.leave()
    assert late.inside.wait(LONG_S)
    late.leave()


def test_a_test_that_fails_leaves(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Room(tmp_path).entered(alone=True):
        raise KeyError
    with Room(tmp_path).entered(alone=True):
        pass


def test_the_environment_is_kept() -> None:
    before = dict(os.environ)
    with environment_kept():
        os.environ["KVASS_NEW"] = "1"
        os.environ["PATH"] = "elsewhere"
        del os.environ["HOME"]
    assert dict(os.environ) == before


def test_what_is_said_to_be_long_is_there() -> None:
    assert [path for path in LONGEST_FIRST if not (ROOT / path).exists()] == []
    assert rank(f"{LONGEST_FIRST[0]}::test") == 0
    assert rank("tests/test_side_by_side.py") == len(LONGEST_FIRST)
