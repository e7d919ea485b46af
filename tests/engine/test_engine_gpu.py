"""Engines over a fake GPU: that tests which run on it would notice a mover, or an engine, that does
not wait; and a device that dies.

What runs on it says so: ``pages`` and ``GPU`` (conftest), ``gpu=True`` of a real engine. The same
controls in a real engine are in ``test_right.py``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.engine import copier
from kvass.engine.boundary import Boundary
from kvass.engine.step_work import StepWork, Store
from kvass.layout.describe import GroupPlanes, Plane
from kvass.testing.daemon import Daemon, running_daemon
from kvass.transfer.base import Outcome
from kvass.transfer.device import Stream
from kvass.types import PAGE, Slots
from tests.engine.conftest import GPU
from tests.support.gpu.engine_mover import Break, EngineMover
from tests.support.vllm.ranks import StubModelEngine, making, until

PROMPT: Final = list(range(100))
BREAKS: Final[tuple[Break, ...]] = ("unordered", "hasty")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, lost_engine_grace_s=0.5) as one:
        yield one


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Callable[[], StubModelEngine]]:
    """Makes engines to whose ranks all of the arena is known to be populated, and so is pinned: the
    copies of what is not wait on the host."""
    with making(lambda: StubModelEngine(daemon.socket, daemon, **GPU)) as make:

        def populated() -> StubModelEngine:
            made = make()
            connection = made.copier._client.connection
            until(lambda: connection.watermark == connection.welcome.arena_bytes, "the arena")
            return made

        yield populated


def fake(engine: StubModelEngine) -> Any:
    return engine.rank.connector.mover.fake


# ---------------------------------------------------------------- what would be noticed


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("how", BREAKS)
def test_copies_that_do_not_wait_are_noticed(
    engine: Callable[[], StubModelEngine], how: Break, kind: str
) -> None:
    a, b = engine(), engine()
    wrong = a if kind == "store" else b
    wrong.copier._verifier = None  # it would notice first, and end the engine's cache
    fake(wrong).break_(how)
    b.tolerant = True
    store_and_load(a, b)
    assert "rank 0" in b.wrong
    fake(wrong).break_("")
    fake(wrong).violations.clear()


def store_and_load(a: StubModelEngine, b: StubModelEngine) -> Any:
    a.generate("a", PROMPT)
    request, found = b.load("b", PROMPT)
    assert found == 96
    return request


def test_other_calls_on_the_engines_thread_end_the_engine(
    engine: Callable[[], StubModelEngine],
) -> None:
    a = engine()
    with fake(a).engine_thread():
        fake(a).idle(Stream(fake(a).compute))
    with pytest.raises(AssertionError, match="idle on the engine's thread"):
        a.step()
    fake(a).violations.clear()


# ---------------------------------------------------------------- a device that dies


def test_a_device_that_dies_amid_a_store_costs_the_cache_alone(
    daemon: Daemon, engine: Callable[[], StubModelEngine], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine goes on. Nobody gets the slots that were being written while its process lives,
    not even when the engine is closed."""
    a, b = engine(), engine()
    a.daemon = None
    fake(a).stopped = True
    a.world.tolerant = True
    request = a.world.add("a", PROMPT)
    until(lambda: a.step() and fake(a).copied, "the store to begin")
    fake(a).kill(steps=3)
    until(lambda: a.step() and request.is_finished(), "the request's end")
    until(lambda: a.step() and not a.world.scheduler.has_requests(), "its store's end")
    assert a.rank.connector._boundary.counters["store_lost"] == 1
    assert "the GPU failed kvass" in caplog.text
    assert a.world.scheduler.reset_prefix_cache(), "no block is held"
    assert (before := daemon.status())["reservations"] == 1, "the daemon was told nothing"
    assert b.load("b", PROMPT)[1] == 0
    a.close()
    assert daemon.status()["l1_used_bytes"] == before["l1_used_bytes"] > 0


# ---------------------------------------------------------------- what a lost copy may still use


class Storage:
    """What a KV tensor lies in."""

    def __init__(self) -> None:
        self.bytes = np.zeros(8 * PAGE, np.uint8)


class Client:
    """A worker's client that has one arena and counts what it is told."""

    def __init__(self) -> None:
        self.arenas: list[Any] = []
        self.told: list[str] = []

    def arena(self, *of: Any) -> Any:
        buffer = np.frombuffer(mmap(-1, 8 * PAGE), np.uint8)
        arena = SimpleNamespace(
            buffer=buffer, populated=8 * PAGE, prepare=lambda *_: None, close=lambda: None
        )
        self.arenas.append(arena)
        return self.arenas[-1]

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.told.append(name)


def end_with(outcome: Outcome) -> tuple[bool, bool]:
    """A store ends so, the worker is gone: whether the pages' storage and the arena still are."""
    storage, client = Storage(), Client()
    planes = GroupPlanes(0, (Plane(0, PAGE, PAGE),), blocks=8, chunk_blocks=2)
    setup: Any = SimpleNamespace(strategy=ParallelStrategy())
    side = copier.Copier(setup, 0, Boundary())
    mover = EngineMover([storage.bytes], [planes])
    side._mover, side._planes, side._owners = mover, (planes,), (storage,)
    side._client = client  # type: ignore[assignment]
    mover.fake.stopped = True
    if outcome == "failed":
        mover.fake.plans.fail["wait"] = {0, 1}
    slots = Slots(((0,),), b"\0\0", (0).to_bytes(4, "little"))
    stores = [Store(1, b"boot", i, 0.0, 1e12, (slots,), ((2 * i, 2 * i + 1),)) for i in (1, 2)]
    side.store(StepWork(1, [], stores))
    pages, arena = weakref.ref(storage), weakref.ref(client.arenas[0].buffer)
    fake = mover.fake
    until(lambda: len(fake.copied) == 2 or outcome == "failed", "the copies to begin")
    if outcome == "lost":
        fake.kill()
    fake.stopped = False
    side.close()
    side.results()
    report = side.take_report()
    assert report is not None
    assert report.steps == {1: 1}, "the engine hears of the step all the same"
    said = {"done": ["commit", "commit"], "failed": ["abort", "abort"], "lost": []}
    assert client.told == [*said[outcome], "close"]
    del storage, side, mover, client
    gc.collect()
    return pages() is not None, arena() is not None


def test_memory_that_a_lost_copy_may_still_use_is_never_let_go_of() -> None:
    before = len(copier._lost)
    assert end_with("done") == (False, False)
    assert end_with("failed") == (False, False)
    assert len(copier._lost) == before
    assert end_with("lost") == (True, True)
    assert len(copier._lost) == before + 1, "once, however many copies were lost"
