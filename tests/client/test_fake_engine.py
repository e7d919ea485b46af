"""Engines of several ranks without a model: who reads, who writes, and when a chunk counts."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
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
from kvass.types import SCHEDULER, GroupLayout, RankLayout

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


def row_bytes(daemon: Daemon, engine: FakeEngine) -> list[int]:
    """Of each group of the engine's namespace, what the daemon says a row takes."""
    spaces = daemon.status()["namespaces"]
    mine = next(s for s in spaces if s["model"] == engine.identity["model"])
    return [group["row_bytes"] for group in mine["groups"]]


def said(daemon: Daemon) -> Counter[str]:
    """Messages that the daemon has got from engines, by kind."""
    told = Counter(daemon.status()["messages"])
    for name in ("hello", "status", "ping"):
        del told[name]
    return told


def test_a1_one_shared_shard_is_read_by_every_rank_under_one_lease(
    daemon: Daemon, make: Make
) -> None:
    engine = make(MLA)
    assert engine.store(PROMPT) == CHUNKS
    shard = [group.shard_bytes(16) for group in MODEL.groups]
    assert row_bytes(daemon, engine) == shard, "the replicas' bytes are kept once"
    match = engine.match(PROMPT)
    assert match is not None
    assert daemon.status()["leases"] == 1
    assert engine.hand_over(match)
    engine.copy(match)
    assert engine.wait(match) == CHUNKS
    pages = CHUNKS * 4 * (4 + 2)
    assert engine.verify() == MLA.ranks * pages


def test_a3_every_dense_rank_reads_its_own_shard(daemon: Daemon, make: Make) -> None:
    engine = make(DENSE)
    assert engine.store(PROMPT) == CHUNKS
    sizes = [[g.shard_bytes(16) for g in layout.groups] for layout in engine.layouts]
    assert row_bytes(daemon, engine) == [sum(group) for group in zip(*sizes, strict=True)]
    assert engine.load(PROMPT) == CHUNKS
    assert engine.verify() == DENSE.tp * CHUNKS * 4 * (4 + 2)


def test_copies_that_ended_are_kept_no_longer(make: Make) -> None:
    engine = make(DENSE)
    engine.store(PROMPT)
    for _ in range(5):
        assert engine.load(PROMPT) == CHUNKS
        engine.verify()
    gc.collect()
    kept = sum(isinstance(one, Job) for one in gc.get_objects())
    assert kept <= DENSE.ranks, "the last copy of each rank"
    memory = weakref.ref(engine.ranks[1].memory)
    gc.disable()
    engine.kill(1)
    engine.revive(1)
    ended = memory() is None
    gc.enable()
    assert ended, "a dead rank's memory is no garbage"


def test_b3_messages_per_stored_chunk_do_not_grow_with_tp(daemon: Daemon, make: Make) -> None:
    def cost(world: ParallelStrategy) -> Counter[str]:
        engine = make(world)
        before = said(daemon)
        for n in range(3):
            assert engine.store([n, *PROMPT]) == CHUNKS
        after = said(daemon)
        after.subtract(before)
        return +after

    for pp in (1, 2):
        for tp in (1, 2, 4, 8):
            each = {"reserve": 3, "handed_over": 3, "commit": 3 * pp}
            assert cost(ParallelStrategy(tp, pp, replicas=tp)) == each
    assert cost(ParallelStrategy(4, 2))["commit"] == 3 * 8, "the control: dense ranks all write"


@pytest.mark.parametrize("handed_over", [False, True])
def test_the_schedulers_death_cancels_only_what_no_rank_heard_of(
    make: Make, daemon: Daemon, handed_over: bool
) -> None:
    engine = make(DENSE)
    assert engine.store(PROMPT) == CHUNKS
    match, grant = engine.match(PROMPT), engine.reserve([9, *PROMPT])
    assert match is not None
    assert grant is not None
    if handed_over:
        assert engine.hand_over(match, grant)
    engine.kill(SCHEDULER)
    if handed_over:
        for what in (match, grant):
            engine.copy(what)
            assert engine.wait(what) == CHUNKS
    else:
        quiet(daemon)
    engine.revive(SCHEDULER)
    assert engine.store([9, *PROMPT]) == (0 if handed_over else CHUNKS)
    assert engine.load([9, *PROMPT]) == engine.load(PROMPT) == CHUNKS
    assert engine.verify()


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
