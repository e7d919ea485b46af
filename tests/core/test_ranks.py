"""Engines of many ranks: one lease for many readers, one shard for many ranks, stages in one row.

``world`` is a complete engine of a ``ParallelStrategy``: under MLA the ranks of a tensor group hold
one shard, which the first of them writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kvass import messages as m
from kvass.client.parallel import ParallelStrategy
from kvass.types import MAX_RANKS, PAGE
from tests.core.rig import WIDTH, Engine, Rig, digests, layout

MLA = [ParallelStrategy(2, 1, replicas=2), ParallelStrategy(4, 2, replicas=4)]
DENSE = [ParallelStrategy(2), ParallelStrategy(2, 4)]
GQA = [ParallelStrategy(4, 1, replicas=2)]


def world(rig: Rig, strategy: ParallelStrategy, instance: str = "e") -> Engine:
    terms = (instance, {"model": "m"}, 16)
    scheduler = rig.open()
    rig.ask(scheduler, strategy.register(*terms))
    workers = [rig.open() for _ in strategy.readers]
    for rank, session in enumerate(workers):
        reply = rig.ask(session, strategy.at(rank).register(*terms, layout(1)))
    assert reply.namespace
    return Engine(rig, scheduler, workers, reply.namespace)


def store(engine: Engine, strategy: ParallelStrategy, *names: object) -> Any:
    """Only the writers say anything."""
    grant = engine.begin(*names)
    for rank in strategy.writers:
        engine.commit(grant.reservation, rank)
    return grant


def release_all(engine: Engine, lease: int, ranks: Iterable[int]) -> None:
    for rank in ranks:
        assert engine.release(lease, rank) == []


def held(rig: Rig) -> tuple[int, ...]:
    return rig.gauge("leases", "pins")


@pytest.fixture
def rig() -> Rig:
    return Rig(pages=256)


@pytest.mark.parametrize("strategy", MLA, ids=str)
def test_a_shared_shard_is_read_by_every_rank_under_one_lease(
    rig: Rig, strategy: ParallelStrategy
) -> None:
    e = world(rig, strategy)
    grant = store(e, strategy, "a", "b")
    assert rig.gauge("l1_used_bytes") == (2 * strategy.world_size * PAGE,), "one copy, not tp"
    found = e.lookup("a", "b", readers=strategy.readers)
    e.hand_over(leases=(found.lease,))
    for rank in strategy.readers:
        assert held(rig) == (1, 2), f"rank {rank} finds its rows gone"
        shard = strategy.at(rank).shard
        written = grant.slots[0].offsets(shard, PAGE).tolist()
        assert found.slots[0].offsets(shard, PAGE).tolist() == written
        assert e.release(found.lease, rank) == []
    assert held(rig) == (0, 0)


@pytest.mark.parametrize("replicas", [1, 2], ids=["dense", "mla"])
def test_a_lease_waits_for_the_readers_of_its_own_engine_only(rig: Rig, replicas: int) -> None:
    strategy = ParallelStrategy(2, 1, replicas=replicas)
    engines = [world(rig, strategy, f"e{i}") for i in range(4)]
    assert len({e.namespace for e in engines}) == 1
    store(engines[0], strategy, "a")
    for e in engines:
        lease = e.lookup("a", readers=strategy.readers).lease
        e.hand_over(leases=(lease,))
        e.release(lease, 0)
        assert held(rig) == (1, 1)
        e.release(lease, 1)  # the two of its own engine are all it takes
        assert held(rig) == (0, 0)


@pytest.mark.parametrize(
    ("readers", "says"),
    [
        ((), "1..128 ranks, not 0"),
        ((-1,), "rank -1 is outside"),
        ((0, -5), "rank -5 is outside"),
        ((2,), "rank 2 is outside the world of 2"),
        ((0, 128), "rank 128 is outside"),
        (tuple(range(MAX_RANKS + 1)), "1..128 ranks, not 129"),
        ((0, 1, 0), "name each rank once"),
    ],
)
def test_impossible_readers_are_refused_and_nothing_is_pinned(
    rig: Rig, readers: tuple[int, ...], says: str
) -> None:
    e = world(rig, ParallelStrategy(2))
    e.store("a")
    reply = e.lookup("a", readers=readers)
    assert (reply.code, reply.fatal) == ("bad_rank", False)
    assert reply.text.startswith("readers: ")
    assert says in reply.text
    assert held(rig) == (0, 0)
    assert e.lookup("a", readers=(0, 1)).lease, "the session goes on"


def test_as_many_readers_as_the_limit_are_accepted() -> None:
    strategy = ParallelStrategy(MAX_RANKS, 1, replicas=MAX_RANKS)
    rig = Rig()
    e = world(rig, strategy)
    store(e, strategy, "a")
    lease = e.lookup("a", readers=strategy.readers).lease
    e.hand_over(leases=(lease,))
    release_all(e, lease, strategy.readers[1:])
    assert held(rig) == (1, 1)
    release_all(e, lease, (0,))
    assert held(rig) == (0, 0)


@pytest.mark.parametrize("strategy", [*MLA, *DENSE, *GQA], ids=str)
def test_a_lookup_past_a_gap_pins_only_the_run_before_it_for_all_readers(
    rig: Rig, strategy: ParallelStrategy
) -> None:
    e = world(rig, strategy)
    store(e, strategy, "a", "b")
    store(e, strategy, "d", "e")
    assert rig.gauge("rows") == (4,), "the control: they are there, past the gap"
    found = e.lookup("a", "b", "c", "d", "e", readers=strategy.readers)
    assert found.chunks == 2
    assert held(rig) == (1, 2)
    found_past = e.lookup("c", "d", readers=strategy.readers)
    assert (found_past.chunks, found_past.lease) == (0, 0)
    e.hand_over(leases=(found.lease,))
    release_all(e, found.lease, strategy.readers)
    assert held(rig) == (0, 0)


@pytest.mark.parametrize("strategy", [*MLA, *DENSE], ids=str)
def test_releasing_without_reading_unpins_exactly_what_the_lookup_pinned(
    rig: Rig, strategy: ParallelStrategy
) -> None:
    e = world(rig, strategy)
    store(e, strategy, "a", "b", "c")
    other = e.lookup("a", readers=strategy.readers).lease
    lease = e.lookup("a", "b", "c", "x", readers=strategy.readers).lease
    assert held(rig) == (2, 4)
    for _ in range(3):  # an aborted request; whoever says it again changes nothing
        assert e.give_back(lease) == []
        assert held(rig) == (1, 1)
    release_all(e, lease, strategy.readers)  # ranks that never heard of the abort
    assert held(rig) == (1, 1)
    e.give_back(other)
    assert held(rig) == (0, 0)
    assert e.holds("a", "b", "c") == 3


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2])
def test_under_mla_the_messages_of_a_store_do_not_grow_with_tp(tp: int, pp: int) -> None:
    rig, strategy = Rig(pages=256), ParallelStrategy(tp, pp, replicas=tp)
    e = world(rig, strategy)
    before = dict(rig.status["messages"])
    store(e, strategy, *range(8))
    after = rig.status["messages"]
    said = {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}
    assert said == {"reserve": 1, "handed_over": 1, "commit": pp}
    assert rig.gauge("rows", "reservations") == (8, 0)
    assert e.holds(*range(8)) == 8


def test_a_commit_of_a_rank_that_does_not_write_changes_nothing(rig: Rig) -> None:
    strategy = ParallelStrategy(4, 1, replicas=4)
    e = world(rig, strategy)
    grant = e.begin("a")
    for rank in (1, 2, 3):
        assert e.commit(grant.reservation, rank) == []
        assert e.abort(grant.reservation, rank) == []
    assert rig.gauge("rows", "reservations", "quarantined_bytes") == (0, 1, 0)
    e.commit(grant.reservation, 0)
    assert rig.gauge("rows", "reservations") == (1, 0)


@pytest.mark.parametrize("strategy", [*MLA, *DENSE, *GQA, ParallelStrategy(1, 4)], ids=str)
def test_a_chunk_is_ready_only_when_every_pipeline_stage_has_committed(
    rig: Rig, strategy: ParallelStrategy
) -> None:
    e = world(rig, strategy)
    grant = e.begin("a", "b")
    for rank in strategy.writers:
        assert e.holds("a", "b") == 0, f"readable before rank {rank} wrote"
        e.commit(grant.reservation, rank)
    assert e.holds("a", "b") == 2


@pytest.mark.parametrize("how", ["dies", "aborts", "is late"])
def test_a_pipeline_stage_that_never_commits_discards_the_rows_of_all(rig: Rig, how: str) -> None:
    strategy = ParallelStrategy(1, 4)
    e = world(rig, strategy)
    grant = e.begin("a", "b")
    for rank in (0, 1, 3):
        e.commit(grant.reservation, rank)
    if how == "dies":
        rig.lose(e.workers[2])
    elif how == "aborts":
        e.abort(grant.reservation, 2)
    else:
        rig.wait(rig.machine.state.config.timing.reserve_s)
        e.commit(grant.reservation, 2)
    rig.wait(rig.machine.state.config.timing.dma_grace_s)
    assert rig.gauge("rows", "reservations", "quarantined_bytes") == (0, 0, 0)
    if how != "dies":
        assert e.holds("a", "b") == 0
        store(e, strategy, "a", "b")
        assert e.holds("a", "b") == 2


def test_the_shards_of_a_stage_have_the_size_of_its_own_layers(rig: Rig) -> None:
    strategy, terms = ParallelStrategy(1, 2), ("e", {"model": "m"}, 16)
    scheduler = rig.open()
    rig.ask(scheduler, strategy.register(*terms))
    for rank, pages in enumerate((1, 3)):
        session = rig.open()
        rig.ask(session, strategy.at(rank).register(*terms, layout(pages)))
    item = m.ReserveItem(request="r", digests=digests("a"))
    (grant,) = rig.ask(scheduler, m.Reserve(seq=3, items=[item], width=WIDTH)).grants
    assert grant.reservation
    (group,) = rig.status["namespaces"][0]["groups"]
    assert (group["row_bytes"], group["used_bytes"]) == (4 * PAGE, 4 * PAGE)
