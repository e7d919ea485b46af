"""An engine of several ranks against a real daemon: vLLM's scheduler and aggregation, no model.

The pages' bytes follow from tokens and shard, so a rank that got another's bytes is seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.connectors.vllm import configuration
from kvass.connectors.vllm.configuration import VllmSetup
from kvass.engine.step_work import StepWork
from kvass.testing.daemon import Daemon
from tests.engine import conftest
from tests.engine.conftest import empty
from tests.support.vllm.ranks import CopyGate, StubModelEngine, StubModelRank, making, until
from tests.support.vllm.scheduler import CHUNK, make_configs, read_setup

PROMPT = list(range(100))
CHUNKS: Final = len(PROMPT) // CHUNK
DENSE: Final = ParallelStrategy(tp=2)
STAGES: Final = ParallelStrategy(pp=2)
MLA: Final = ParallelStrategy(tp=2, replicas=2)
GRID: Final = (
    DENSE,
    STAGES,
    MLA,
    ParallelStrategy(tp=4, replicas=2),  # GQA with two KV heads
    ParallelStrategy(tp=2, pp=2),
    ParallelStrategy(tp=2, pp=2, replicas=2),
)

Make = Callable[..., StubModelEngine]


def name(strategy: ParallelStrategy) -> str:
    return f"tp{strategy.tp}-pp{strategy.pp}-replicas{strategy.replicas}"


daemon = conftest.own_daemon


@pytest.fixture
def engine(daemon: Daemon, pages: Iterator[dict[str, Any]]) -> Iterator[Make]:
    """Makes engines, whose pages are in memory of the host or of a fake GPU."""

    def make(strategy: ParallelStrategy, **options: Any) -> StubModelEngine:
        options |= next(pages)
        return StubModelEngine(daemon.socket, daemon, strategy=strategy, **options)

    with making(make) as engine:
        yield engine


def sent(daemon: Daemon, kind: str) -> int:
    """Messages of this kind that sessions have sent so far."""
    return int(daemon.status()["messages"].get(kind, 0))


@pytest.mark.parametrize("strategy", GRID, ids=name)
def test_a3_every_rank_loads_what_its_shard_stored(
    daemon: Daemon, engine: Make, strategy: ParallelStrategy
) -> None:
    a, b = engine(strategy), engine(strategy)
    a.generate("a", PROMPT)
    status = empty(daemon)
    assert status["rows"] == CHUNKS
    memory = sum(a.ranks.all[rank].memory.nbytes for rank in strategy.writers)
    row = memory // a.world.pool.num_gpu_blocks * (CHUNK // a.world.hash_tokens)
    assert status["l1_used_bytes"] == CHUNKS * row, "one copy of each distinct shard"
    request, found = b.load("b", PROMPT)
    assert found == CHUNKS * CHUNK
    b.verify(request, CHUNKS * CHUNK)
    empty(daemon)


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("strategy", [DENSE, STAGES, MLA], ids=name)
def test_one_ranks_failed_load_fails_it_on_all(
    daemon: Daemon, engine: Make, strategy: ParallelStrategy, broken: int
) -> None:
    a, b = engine(strategy), engine(strategy)
    a.generate("a", PROMPT)
    free = b.world.free_blocks
    CopyGate(b.ranks.all[broken], ahead_s=1e6)
    request, found = b.load("b", PROMPT)
    assert found == 0, "everything is computed"
    late = [rank.connector._boundary.counters["load_late"] for rank in b.ranks.all]
    assert late == [int(rank == broken) for rank in range(2)], "the other rank had every byte"
    until(lambda: b.step() and request.is_finished(), "the request's end")
    until(lambda: b.step() and not b.world.scheduler.has_requests(), "its stores")
    assert len(b.loads) == 1
    assert b.world.free_blocks == free
    assert b.world.scheduler.reset_prefix_cache(), "a block is still held"
    empty(daemon)


def test_b3_the_others_report_every_step_all_the_same(engine: Make) -> None:
    """The engine counts all ranks, and frees no block before the last."""
    a = engine(MLA)
    free = a.world.free_blocks
    gate = CopyGate(a.ranks.all[0], shut=True)
    a.world.add("a", PROMPT, max_tokens=1)
    for _ in range(20):
        a.step()
    first, second = a.ranks.all
    assert first.copier._open, "the writer has not stored yet"
    assert not second.copier._open
    assert a.world.free_blocks == free - CHUNKS * CHUNK // a.world.hash_tokens
    gate.open()
    until(lambda: a.step() and a.world.free_blocks == free, "the blocks back")


def test_b5_a_stage_that_never_stores_discards_the_chunk(daemon: Daemon, engine: Make) -> None:
    a, b = engine(STAGES), engine(STAGES)
    CopyGate(a.ranks.all[1], ahead_s=1e6)
    a.generate("a", PROMPT)
    assert daemon.wait_until(quarantined_bytes=0)["rows"] == 0
    assert b.load("b", PROMPT)[1] == 0


# vLLM's V1 runner with a drafter asks for a step's stores when that one has run, so not at all in
# stages that have none, nor where something raised before.


@pytest.mark.parametrize("strategy", [STAGES, ParallelStrategy()], ids=name)
def test_a_step_with_drafts_is_stored_after_its_results_or_in_the_next(
    daemon: Daemon, engine: Make, strategy: ParallelStrategy
) -> None:
    """vLLM collects a step's results, and calls ``wait_for_save`` after the drafter ran (the V1
    runner, and since 0.33 the V2 runner), which earlier stages do not have."""
    a, b = engine(strategy), engine(strategy)
    free = a.world.free_blocks
    for rank in a.ranks.all:
        rank.speculative = True
    a.generate("a", PROMPT)
    assert a.world.free_blocks == free
    assert empty(daemon)["rows"] == CHUNKS
    request, found = b.load("b", PROMPT)
    assert found == CHUNKS * CHUNK
    b.verify(request, CHUNKS * CHUNK)
    a.generate("again", [*PROMPT[:40], *PROMPT])
    assert empty(daemon)["rows"] > CHUNKS


def test_a_store_in_a_step_that_computes_nothing_is_begun_in_the_next(
    daemon: Daemon, engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.30 does not call ``wait_for_save`` in such a step."""
    monkeypatch.setattr(StubModelRank, "saves_empty_steps", False)
    a = engine(ParallelStrategy())
    a.client._reserve_wait_s = 0.0  # the grant comes when nothing is left to compute
    a.generate("a", PROMPT, max_tokens=1)
    assert empty(daemon)["rows"] == CHUNKS


@contextmanager
def as_the_runner_ends_a_pass(connector: Any) -> Iterator[None]:
    try:
        yield
    finally:
        connector.start_load_kv(None)
        connector.get_transfer_results(set())


@pytest.mark.parametrize("raising", ["forward", "drafter"])
def test_what_a_step_that_raised_computed_is_not_stored_in_the_next(
    daemon: Daemon, engine: Make, raising: str
) -> None:
    a = engine(STAGES)
    free = a.world.free_blocks
    a.world.add("a", PROMPT, max_tokens=1)
    output, work = a.world.schedule()
    assert len(work.stores) == 1
    for one in (rank.connector for rank in a.ranks.all):
        one.handle_preemptions(work)
        one.bind_connector_metadata(work)
        with suppress(ZeroDivisionError), as_the_runner_ends_a_pass(one):
            assert raising == "drafter" or 1 / 0
    a.world.finish(output)
    until(lambda: a.step() and a.world.free_blocks == free, "the blocks back")
    assert empty(daemon)["rows"] == 0
    assert sent(daemon, "commit") == (raising == "drafter"), "the first stage's"


@pytest.mark.parametrize(
    ("one", "other"),
    [(DENSE, MLA), (DENSE, STAGES), (DENSE, ParallelStrategy())],
    ids=["replicated", "stages", "alone"],
)
def test_b2_another_parallel_shape_is_another_namespace(
    engine: Make, one: ParallelStrategy, other: ParallelStrategy
) -> None:
    engine(one).generate("a", PROMPT)
    assert engine(other).load("b", PROMPT)[1] == 0
    assert engine(one).load("c", PROMPT)[1] == CHUNKS * CHUNK


def test_b2_decode_context_parallelism_makes_blocks_longer(daemon: Daemon, engine: Make) -> None:
    """A block id stands for the tokens of all its ranks; each rank's page is as long as ever."""
    a, b = engine(DENSE, dcp=2), engine(DENSE, dcp=2)
    a.generate("a", PROMPT)
    assert a.world.hash_tokens == CHUNK
    page = a.rank.memory.nbytes // a.world.pool.num_gpu_blocks
    assert empty(daemon)["l1_used_bytes"] == CHUNKS * 2 * page
    request, found = b.load("b", PROMPT)
    assert found == CHUNKS * CHUNK
    b.verify(request, CHUNKS * CHUNK)
    assert engine(DENSE).load("c", PROMPT)[1] == 0, "blocks of its own"


def test_b1_the_strategy_is_read_from_the_engines_configuration() -> None:
    for strategy in GRID:
        found = read_setup(*make_configs(strategy=strategy))
        assert found.strategy == strategy
    config, caches = make_configs(strategy=DENSE, dcp=2)
    one = read_setup(config, caches)
    config.parallel_config.cp_kv_cache_interleave_size = 8
    other = read_setup(config, caches)
    assert [group.block_tokens for group in one.groups] == [CHUNK]
    assert one.identity != other.identity


def test_b1_data_parallel_ranks_are_instances_of_their_own() -> None:
    """... that share a namespace: vLLM gives each an ``engine_id`` of its own."""
    from vllm.v1.engine.utils import _apply_dp_identity_suffix

    config, caches = make_configs(engine_id="one")
    found = []
    for rank in range(2):
        config.kv_transfer_config.engine_id = "one"
        _apply_dp_identity_suffix(config, rank)
        found.append(configuration.read_setup(config, caches))
    first, second = found
    assert isinstance(first, VllmSetup)
    assert isinstance(second, VllmSetup)
    assert first.instance != second.instance
    assert first.identity == second.identity


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_cannot_reach_the_daemon_leaves_the_engine_uncached(
    daemon: Daemon, engine: Make, absent: int
) -> None:
    """As one on another machine: what is stored there is nobody's, so nothing is."""
    a, b = engine(DENSE), engine(DENSE)
    a.generate("a", PROMPT)
    b.ranks.all[absent].copier._client.close()
    daemon.wait_until(sessions=3 + 2 + 1)  # a's, what is left of b's, and the one that asks
    assert b.load("b", PROMPT)[1] == 0
    b.generate("c", PROMPT[::-1])
    assert empty(daemon)["rows"] == CHUNKS


# ---------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    ("said", "workers", "field"),
    [
        (ParallelStrategy(), DENSE, "identity[parallel]"),
        (DENSE, ParallelStrategy(), "identity[parallel]"),
        (MLA, DENSE, "world_size"),
        (DENSE, STAGES, "identity[parallel]"),
    ],
    ids=["fewer", "more", "replicas", "shape"],
)
def test_a_scheduler_that_contradicts_its_workers_runs_uncached(
    daemon: Daemon,
    said: ParallelStrategy,
    workers: ParallelStrategy,
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = StubModelEngine(daemon.socket, strategy=said, workers=workers)
    try:
        until(lambda: field in caplog.text, "the refusal")
        request = engine.generate("a", PROMPT)
        assert request.num_tokens == len(PROMPT) + 2
        assert engine.world.scheduler.reset_prefix_cache()
        assert engine.load("b", PROMPT)[1] == 0
        status = empty(daemon)
        assert status["rows"] == 0
        refusals = [r for r in caplog.records if "refused" in r.getMessage()]
        assert all(r.levelno >= logging.WARNING for r in refusals)
    finally:
        engine.close()


def test_a_rank_outside_the_world_leaves_the_engine_uncached(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    config, caches = make_configs({"kvass.socket": daemon.socket}, strategy=DENSE)
    config.parallel_config.rank = 2
    rank = StubModelRank(config, caches)
    assert rank.copier is None
    assert "rank 2: a world of 2 has 0..1" in caplog.text
    assert not rank.run(StepWork()).finished_recving
    rank.close()
