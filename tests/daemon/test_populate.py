"""Populating with several threads: the mark has no gap below it, and an error ends all of them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvass.arena.memory import SLICE_BYTES
from kvass.daemon import populate
from kvass.daemon.populate import MARKS, Populating, thread_cpus
from kvass.testing.daemon import running_daemon
from tests.support.waiting import eventually

CPUS = os.sched_getaffinity(0)


class Pages:
    """An arena that notes which slices are populated; ``act`` may wait or fail."""

    page_bytes = 4096

    def __init__(self, slices: int, act: Callable[[int], None] = lambda number: None) -> None:
        self.size = slices * SLICE_BYTES - 4096
        self.there = set[int]()
        self._act = act

    def populate(self, lo: int, hi: int) -> None:
        assert lo % SLICE_BYTES == 0
        assert hi == min(lo + SLICE_BYTES, self.size)
        self._act(lo // SLICE_BYTES)
        self.there.add(lo // SLICE_BYTES)


class Told:
    def __init__(self, pages: Any, threads: int) -> None:
        self.marks = list[int]()
        self.failed = list[tuple[int, OSError]]()
        self._pages = pages
        fail = lambda lo, error: self.failed.append((lo, error))  # noqa: E731
        self.work = Populating(pages, self.mark, fail, [CPUS] * threads)

    def mark(self, populated: int) -> None:
        below = range(-(-populated // SLICE_BYTES))
        assert self._pages.there >= {*below}, "there is a gap below the mark"
        self.marks.append(populated)


@pytest.fixture(autouse=True)
def no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate, "by_node", lambda arena: {0: arena.size})


def test_a_slow_slice_holds_the_mark_and_not_the_others() -> None:
    go = threading.Event()
    pages = Pages(9, lambda number: None if number != 2 else void(go.wait(60)))
    told = Told(pages, 3)
    told.work.start()
    assert eventually(lambda: pages.there == {*range(9)} - {2})
    assert told.marks[-1:] == [2 * SLICE_BYTES]
    go.set()
    assert eventually(lambda: told.work.by_node == {0: pages.size})
    told.work.stop()
    assert told.marks == sorted(told.marks)
    assert told.marks[-1] == pages.size
    assert not told.failed


def void(_: object) -> None:
    """For a call in a lambda."""


def test_a_large_arena_tells_few_marks() -> None:
    """Each mark is a message to each session that maps the arena."""
    pages = Pages(40 * MARKS + 1)
    told = Told(pages, 1)
    told.work.start()
    assert eventually(lambda: bool(told.work.by_node))
    told.work.stop()
    assert MARKS // 2 < len(told.marks) <= MARKS + 2
    assert told.marks[-1] == pages.size


def test_a_sandbox_that_refuses_a_priority_does_not_keep_pages_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "nice", refused)
    monkeypatch.setattr(os, "sched_setaffinity", refused)
    pages = Pages(4)
    told = Told(pages, threads=2)
    told.work.start()
    assert eventually(lambda: told.marks[-1:] == [pages.size])
    told.work.stop()


def test_the_first_byte_that_lacks_memory_is_told_once() -> None:
    """The thread at a later slice fails first."""
    later = threading.Event()

    def act(number: int) -> None:
        if number == 4:
            later.set()
        if number == 3:
            later.wait(60)
        if number >= 3:
            raise OSError(errno.ENOSPC, "none")

    pages = Pages(200, act)
    told = Told(pages, 2)
    told.work.start()
    assert eventually(lambda: bool(told.failed))
    told.work.stop()
    ((lo, error),) = told.failed
    assert (lo, error.errno) == (3 * SLICE_BYTES, errno.ENOSPC)
    assert pages.there == {0, 1, 2}
    assert told.work.by_node == {}


def test_stop_waits_for_the_slices_that_were_begun() -> None:
    begun, go = threading.Event(), threading.Event()

    def act(_: int) -> None:
        begun.set()
        go.wait(60)

    pages = Pages(100, act)
    told = Told(pages, 2)
    told.work.start()
    begun.wait(60)
    threading.Timer(0.05, go.set).start()
    told.work.stop()
    assert len(pages.there) <= 2
    assert not told.failed


@pytest.mark.parametrize(
    ("cpus", "nodes", "expected"),
    [
        (2, {0: {0, 1}}, [{0, 1}]),
        (16, {0: {*range(16)}}, [{*range(16)}] * 4),
        (16, {0: {*range(8)}, 1: {*range(8, 16)}, 2: set()}, [{*range(8)}, {*range(8, 16)}] * 2),
        (256, {0: {*range(128)}, 1: {*range(128, 256)}}, None),
        (4, {0: set()}, [{0, 1, 2, 3}]),
        (4, {0: {90, 91}}, [{0, 1, 2, 3}]),
    ],
)
def test_threads_are_a_quarter_of_the_cpus_spread_over_the_nodes(
    cpus: int,
    nodes: dict[int, set[int]],
    expected: list[set[int]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cpus)})
    monkeypatch.setattr(populate, "nodes", lambda: nodes)
    found = thread_cpus()
    assert found == (expected or [nodes[0], nodes[1]] * 8)


def test_a_daemon_of_several_threads_populates_all_and_says_where_it_lies(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from kvass.daemon import loop\n"
        "loop.thread_cpus = lambda: [os.sched_getaffinity(0)] * 4\n"
        "from kvass.cli.main import main\n"
        "sys.exit(main())"
    )
    size = 200 << 20
    with running_daemon(tmp_path, "200MiB", program=("-c", script)) as daemon:
        status = daemon.wait_until(l1_populated_bytes=size)
        assert eventually(lambda: bool(daemon.status()["l1_node_bytes"])) or _no_move_pages()
        there = daemon.status()["l1_node_bytes"]
        assert not there or sum(there.values()) == pytest.approx(size, rel=0.01)
        assert status["sessions"] == 1


def _no_move_pages() -> bool:
    from kvass.arena.memory import create
    from kvass.arena.nodes import by_node

    arena = create(4096)
    arena.buffer[0] = 1
    return not by_node(arena)
