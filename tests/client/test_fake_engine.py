"""Engines of several ranks without a model: who reads, who writes, and when a chunk counts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.errors import UsageError
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import FakeEngine, spread
from kvass.testing.pages import WrongPageError
from kvass.transfer.base import Job
from kvass.types import GroupLayout, RankLayout

MODEL = RankLayout(
    (
        GroupLayout("full", 4, ("a", "b", "c", "d"), (48, 1200, 64, 1000)),
        GroupLayout("full", 8, ("e", "f", "g", "h"), (96, 96, 96, 96)),
    )
)
CHUNKS = 4
PROMPT = range(CHUNKS * 16)

DENSE = ParallelStrategy(tp=2, pp=2)
MLA = ParallelStrategy(tp=4, pp=1, replicas=4)

Make = Callable[..., FakeEngine]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("d"), "16MiB", lost_engine_grace_s=0.2) as real:
        yield real


@pytest.fixture
def make(daemon: Daemon) -> Iterator[Make]:
    """Makes engines, and closes them; then nothing may be held."""
    made: list[FakeEngine] = []

    def make(world: ParallelStrategy, **options: Any) -> FakeEngine:
        made.append(FakeEngine(daemon.socket, world, spread(world, MODEL), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    quiet(daemon)


def quiet(daemon: Daemon) -> None:
    """Nothing is held by anybody, long before any lease or reservation lapses."""
    daemon.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0)


# ---------------------------------------------------------------- the engine itself


def test_wrong_bytes_of_one_writer_are_noticed(make: Make) -> None:
    engine = make(DENSE)
    what = engine.reserve(PROMPT)
    assert what is not None
    engine.ranks[2].memory.regions[0][:] ^= 1
    assert engine.hand_over(what)
    engine.copy(what)
    assert engine.wait(what) == CHUNKS
    assert engine.load(PROMPT) == CHUNKS
    with pytest.raises(WrongPageError, match="shard 2"):
        engine.verify()


def test_a_rank_that_reads_anothers_shard_is_noticed(make: Make) -> None:
    engine = make(ParallelStrategy(tp=2))  # two shards of one size: nothing else tells them apart
    assert engine.store(PROMPT) == CHUNKS
    match = engine.match(PROMPT)
    assert match is not None
    assert engine.hand_over(match)
    engine.ranks[0].memory.shard = 1
    engine.copy(match)
    engine.ranks[0].memory.shard = 0
    assert engine.wait(match) == CHUNKS
    with pytest.raises(WrongPageError, match="shard 0"):
        engine.verify()


def test_rows_of_two_engines_of_one_model_are_shared(make: Make) -> None:
    first, second = (make(DENSE, identity={"model": "shared"}) for _ in range(2))
    assert first.store(PROMPT) == CHUNKS
    assert second.store(PROMPT) == 0
    assert second.load([*PROMPT, 1, 2, 3]) == CHUNKS
    assert second.verify()
    assert second.load([1, *PROMPT]) == 0


def test_what_does_not_fit_the_world_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="4 layouts"):
        FakeEngine(str(tmp_path / "no"), MLA, spread(DENSE, MODEL))
    with pytest.raises(UsageError, match="8 stages"):
        spread(ParallelStrategy(pp=8), MODEL)
    thirds = [layout.groups[0].layers for layout in spread(ParallelStrategy(pp=3), MODEL)]
    assert thirds == [("a",), ("b",), ("c", "d")]


def test_copies_that_ended_are_kept_no_longer(make: Make) -> None:
    gc.collect()
    before = sum(isinstance(one, Job) for one in gc.get_objects())
    engine = make(DENSE)
    engine.store(PROMPT)
    for _ in range(5):
        assert engine.load(PROMPT) == CHUNKS
        engine.verify()
    gc.collect()
    kept = sum(isinstance(one, Job) for one in gc.get_objects())
    assert kept <= before + DENSE.ranks, "the last copy of each rank"
    memory = weakref.ref(engine.ranks[1].memory)
    gc.disable()
    engine.kill(1)
    engine.revive(1)
    ended = memory() is None
    gc.enable()
    assert ended, "a dead rank's memory is no garbage"
