"""Weights replaced in place: what a rank reads after a flush, and who shares with it then."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import distributed

from tests.sglang.conftest import Backends
from tests.sglang.test_storage import KEYS, store
from tests.support.sglang import fake


def test_after_a_flush_nothing_older_is_read(backends: Backends) -> None:
    pool = fake.HostPool([512])
    backend = backends.make(pool)
    store(backend, pool)
    pool.clear()
    assert pool.cleared == 1
    assert backend.batch_exists(KEYS) == 0
    store(backend, pool)
    assert backend.batch_exists(KEYS) == 8
    assert backends.make().batch_exists(KEYS) == 8, "the pages of the first generation are there"


def test_a_flush_before_the_first_call_counts(backends: Backends) -> None:
    pool = fake.HostPool([512])
    backend = backends.make(pool)
    pool.clear()
    store(backend, pool)
    assert backends.make().batch_exists(KEYS) == 0


def test_a_thread_that_ended_is_a_flush(backends: Backends) -> None:
    pool = fake.HostPool([512])
    backend = backends.make(pool)
    stored = threading.Thread(target=store, args=(backend, pool))
    stored.start()
    stored.join()
    assert backend.batch_exists(KEYS) == 0


@pytest.mark.parametrize("config", [{}, {"is_mla_model": True, "tp_size": 2}], ids=str)
def test_engines_of_one_process_share_nothing_after_as_many_flushes(
    backends: Backends, config: Any
) -> None:
    """Their schedulers have the same parent, side by side or one after the other."""
    pools = fake.HostPool([512]), fake.HostPool([512])
    with world():
        one = backends.make(pools[0], **config)
    with world():
        other = backends.make(pools[1], **config)
    for pool in pools:
        pool.clear()
    store(one, pools[0])
    assert (one.batch_exists(KEYS), other.batch_exists(KEYS)) == (8, 0)


@contextmanager
def world() -> Iterator[None]:
    """The process groups of one SGLang engine, which each of its ranks has."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def mla_ranks(
    backends: Backends, pools: Sequence[Any], ranks: Sequence[tuple[int, int]], again: bool = False
) -> list[Any]:
    """The backends of one MLA engine on two tensor-parallel ranks, each of the rank ``(of its
    process, of its tensor-parallel group)``, with one flush behind them. ``again``: attached at run
    time."""
    made = []
    with world():
        for pool, (rank, tp_rank) in zip(pools, ranks, strict=True):
            with mock.patch.object(distributed, "get_rank", lambda rank=rank: rank):
                config: dict[str, Any] = {"tp_rank": tp_rank, "tp_size": 2, "is_mla_model": True}
                made.append(backends.make(pool, again=again, **config))
    for pool in pools:
        pool.clear()
    return made


def test_ranks_of_an_mla_model_share_after_a_flush(backends: Backends) -> None:
    pools = fake.HostPool([512]), fake.HostPool([512])
    ranks = mla_ranks(backends, pools, [(4, 0), (5, 1)])
    store(ranks[0], pools[0])
    assert ranks[1].batch_exists(KEYS) == 8
    pools[1].clear()
    assert ranks[1].batch_exists(KEYS) == 0


@pytest.mark.parametrize(
    "ranks",
    [[(0, 0), (3, 1)], [(0, 0), (1, 1), (1, 1)]],
    ids=["another data-parallel group", "a rank that began again"],
)
def test_a_rank_that_may_have_seen_other_flushes_does_not_share(
    backends: Backends, ranks: list[tuple[int, int]]
) -> None:
    pools = [fake.HostPool([512]) for _ in ranks]
    made = mla_ranks(backends, pools, ranks)
    store(made[0], pools[0])
    assert made[-1].batch_exists(KEYS) == 0


def test_ranks_that_were_attached_at_run_time_do_not_share(backends: Backends) -> None:
    """Each may have seen another number of flushes since."""
    pools = fake.HostPool([512]), fake.HostPool([512])
    ranks = mla_ranks(backends, pools, [(0, 0), (1, 1)], again=True)
    store(ranks[0], pools[0])
    assert ranks[1].batch_exists(KEYS) == 0


def test_a_rank_that_cannot_count_the_flushes_does_not_share(backends: Backends) -> None:
    pools = fake.HostPool([512]), fake.HostPool([512])
    ranks = mla_ranks(backends, pools, [(0, 0), (1, 1)])
    asked = threading.Thread(target=ranks[1].batch_exists, args=(KEYS,))
    asked.start()
    asked.join()
    pools[0].clear()
    store(ranks[0], pools[0])
    assert ranks[1].batch_exists(KEYS) == 0


def test_ranks_that_cannot_agree_do_not_share(
    backends: Backends, caplog: pytest.LogCaptureFixture
) -> None:
    pools = fake.HostPool([512]), fake.HostPool([512])
    lost = mock.Mock(side_effect=distributed.DistNetworkError("the store is gone"))
    with mock.patch.object(distributed.PrefixStore, "compare_set", lost):
        ranks = mla_ranks(backends, pools, [(0, 0), (1, 1)])
    assert "the store is gone" in caplog.text
    store(ranks[0], pools[0])
    assert [rank.batch_exists(KEYS) for rank in ranks] == [8, 0]


def test_fixed_weights_outlive_a_flush(backends: Backends) -> None:
    pool = fake.HostPool([512])
    backend = backends.make(pool, extra={"kvass.fixed_weights": True})
    store(backend, pool)
    pool.clear()
    assert backend.batch_exists(KEYS) == 8


@pytest.mark.parametrize("again", [False, True])
def test_a_backend_that_is_attached_later_shares_with_nobody(
    backends: Backends, model: Path, again: bool
) -> None:
    """At run time, after SGLang began without one or detached one."""
    pool = fake.HostPool([512])
    backend = backends.make(pool, fake.Engine(model, attached_later=not again), again=again)
    store(backend, pool)
    assert backend.batch_exists(KEYS) == 8
    assert backends.make().batch_exists(KEYS) == 0
