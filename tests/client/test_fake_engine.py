"""Engines of several ranks without a model: who reads, who writes, and when a chunk counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.errors import UsageError
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.fake_engine import FakeEngine, spread
from kvass.testing.fake_rank import MakeMover
from kvass.testing.pages import WrongPageError
from kvass.transfer.host import HostMover
from kvass.types import SCHEDULER, GroupLayout, RankLayout
from tests.support.gpu.engine_mover import EngineGpus

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
STAGES = ParallelStrategy(tp=2, pp=4, replicas=2)

Make = Callable[..., FakeEngine]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running_daemon(tmp_path_factory.mktemp("d"), "16MiB", dma_grace_s=0.2) as real:
        yield real


@pytest.fixture(params=["host", "cuda"])
def make(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes engines, and closes them; then nothing may be held. Their pages are in memory of the
    host, or of a fake GPU that computes late, and copies late and in parts."""
    made: list[FakeEngine] = []
    gpus = EngineGpus()

    def make(world: ParallelStrategy, **options: Any) -> FakeEngine:
        mover: MakeMover = gpus if request.param == "cuda" else HostMover
        if "identity" in options:  # the daemon outlives the test
            options["identity"] = {**options["identity"], "mover": request.param}
        layouts = spread(world, MODEL)
        made.append(FakeEngine(daemon.socket, world, layouts, mover=mover, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    gpus.check_closed()
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


# ---------------------------------------------------------------- reading


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


def test_a2_readers_are_those_of_the_lookup_and_not_whoever_registered(
    daemon: Daemon, make: Make
) -> None:
    """Four engines of two ranks: eight workers of one model, and two readers of each lease."""
    world = ParallelStrategy(tp=2, replicas=2)
    engines = [make(world, identity={"model": "a2"}) for _ in range(4)]
    assert engines[0].store(PROMPT) == CHUNKS
    for engine in engines:
        match = engine.match(PROMPT)
        assert match is not None
        assert engine.hand_over(match)
        for rank in world.readers:
            assert daemon.status()["leases"] == 1, "until the second has read"
            engine.copy(match, [rank])
            engine.wait_ranks(match, [rank])
        assert engine.wait(match) == CHUNKS
        assert daemon.status()["leases"] == 0
        assert engine.verify()


def test_a3_every_dense_rank_reads_its_own_shard(daemon: Daemon, make: Make) -> None:
    engine = make(DENSE)
    assert engine.store(PROMPT) == CHUNKS
    sizes = [[g.shard_bytes(16) for g in layout.groups] for layout in engine.layouts]
    assert row_bytes(daemon, engine) == [sum(group) for group in zip(*sizes, strict=True)]
    assert engine.load(PROMPT) == CHUNKS
    assert engine.verify() == DENSE.tp * CHUNKS * 4 * (4 + 2)


def test_a6_the_last_reader_frees_it_and_no_other(daemon: Daemon, make: Make) -> None:
    engine = make(MLA)
    assert engine.store(PROMPT) == CHUNKS
    match = engine.match(PROMPT)
    assert match is not None
    assert engine.hand_over(match)
    for rank in reversed(MLA.readers):
        status = daemon.status()
        assert (status["leases"], status["pins"]) == (1, CHUNKS * len(MODEL.groups))
        engine.copy(match, [rank])
        engine.wait_ranks(match, [rank])
        engine.ranks[rank].client.release(match.boot, match.id)  # said twice, it counts once
        engine.flush([rank])
    assert engine.wait(match) == CHUNKS
    status = daemon.status()
    assert (status["leases"], status["pins"]) == (0, 0)
    assert engine.verify()
    assert engine.load(PROMPT) == CHUNKS, "released is not evicted"


def test_a7_a_match_nobody_loads_is_given_back_whole(daemon: Daemon, make: Make) -> None:
    engine = make(DENSE)
    assert engine.store(PROMPT) == CHUNKS
    match = engine.match(PROMPT)
    assert match is not None
    engine.give_back(match)
    quiet(daemon)
    assert engine.load(PROMPT) == CHUNKS


# ---------------------------------------------------------------- writing


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


def test_b5_a_chunk_counts_only_when_every_stage_has_it(daemon: Daemon, make: Make) -> None:
    engine = make(STAGES)
    layers = [layout.groups[0].layers for layout in engine.layouts]
    assert layers == [("a",), ("b",), ("c",), ("d",)]
    what = engine.reserve(PROMPT)
    assert what is not None
    assert what.ranks == (0, 2, 4, 6)
    assert engine.hand_over(what)
    for rank in what.ranks:
        assert engine.match(PROMPT) is None
        engine.copy(what, [rank])
        engine.wait_ranks(what, [rank])
    assert engine.wait(what) == CHUNKS
    assert engine.load(PROMPT) == CHUNKS
    assert engine.verify()


def test_b5_a_stage_that_dies_takes_its_chunks_with_it(daemon: Daemon, make: Make) -> None:
    engine = make(STAGES)
    what = engine.reserve(PROMPT)
    assert what is not None
    assert engine.hand_over(what)
    engine.copy(what, what.ranks[:-1])
    engine.kill(what.ranks[-1])
    assert engine.wait(what) == 0
    engine.revive(what.ranks[-1])
    quiet(daemon)
    assert engine.load(PROMPT) == 0
    assert engine.store(PROMPT) == CHUNKS
    assert engine.load(PROMPT) == CHUNKS
    assert engine.verify()


def test_a_rank_that_is_no_writer_publishes_nothing(daemon: Daemon, make: Make) -> None:
    engine = make(MLA)
    what = engine.reserve(PROMPT)
    assert what is not None
    assert engine.hand_over(what)
    for rank in (1, 2, 3):
        engine.ranks[rank].client.commit(what.boot, what.id)
    engine.flush(MLA.readers)
    assert engine.match(PROMPT) is None
    engine.copy(what)
    assert engine.wait(what) == CHUNKS
    assert engine.load(PROMPT) == CHUNKS


def test_the_schedulers_death_cancels_what_no_rank_heard_of(daemon: Daemon, make: Make) -> None:
    engine = make(DENSE)
    assert engine.store(PROMPT) == CHUNKS
    match, grant = engine.match(PROMPT), engine.reserve([9, *PROMPT])
    assert match is not None
    assert grant is not None
    engine.kill(SCHEDULER)
    quiet(daemon)
    engine.revive(SCHEDULER)
    assert engine.store([9, *PROMPT]) == CHUNKS
    assert engine.load(PROMPT) == CHUNKS
    assert engine.verify()


def test_the_schedulers_death_leaves_what_its_ranks_know_of(daemon: Daemon, make: Make) -> None:
    engine = make(DENSE)
    assert engine.store(PROMPT) == CHUNKS
    match, grant = engine.match(PROMPT), engine.reserve([9, *PROMPT])
    assert match is not None
    assert grant is not None
    assert engine.hand_over(match, grant)
    engine.kill(SCHEDULER)
    for what in (match, grant):
        engine.copy(what)
        assert engine.wait(what) == CHUNKS
    engine.revive(SCHEDULER)
    assert engine.load([9, *PROMPT]) == CHUNKS
    assert engine.verify() == 2 * DENSE.tp * CHUNKS * 4 * (4 + 2)


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
