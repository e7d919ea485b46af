"""Several ranks over real sockets: what cannot be, or contradicts another rank, runs uncached.

``tests/core/test_contradictions.py`` has all that the daemon refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvass.client import endpoint
from kvass.client.parallel import ParallelStrategy
from kvass.client.scheduler import SchedulerClient
from kvass.client.worker import WorkerClient
from kvass.messages import Register, ReserveItem
from kvass.testing.daemon import Daemon, running_daemon
from kvass.types import GroupLayout, RankLayout
from tests.support.waiting import eventually

MLA = ParallelStrategy(2, 2, replicas=2)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:  # the real one, in place of the scripted
    with running_daemon(tmp_path, "16MiB") as real:
        yield real


def terms(strategy: ParallelStrategy, **fields: Any) -> Register:
    """Each stage has a layer of its own."""
    stage = max(strategy.rank, 0) // strategy.tp
    group = GroupLayout("full", 32, (f"layer.{stage}",), (512,))
    layout = None if strategy.rank < 0 else RankLayout((group,))
    terms = strategy.register("e", {"model": "tiny"}, 256, layout)
    return msgspec.structs.replace(terms, **fields)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("rank", "wrong", "says"),
    [
        (3, {"rank": 4}, "bad_rank: rank: 4 is outside the world of 4"),
        (3, {"writer": True}, "contradiction: writer: rank 2 writes shard 1"),
        (-1, {"identity": {"model": "n"}}, "contradiction: identity[model]: 'n'"),
    ],
)
def test_terms_that_cannot_be_are_refused_by_name_and_that_process_runs_uncached(
    daemon: Daemon,
    rank: int,
    wrong: dict[str, Any],
    says: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, pauses between attempts, nothing stored."""
    monkeypatch.setattr(endpoint, "BACKOFF_LASTING_S", 0.05)
    others = [r for r in MLA.readers if r != rank]
    clients = [WorkerClient(daemon.socket, terms(MLA.at(r))) for r in others]
    for client in clients:
        client.start()
        client.connect(10)
    make = SchedulerClient if rank < 0 else WorkerClient
    bad: Any = make(daemon.socket, terms(MLA.at(rank), **wrong))
    bad.start()
    assert eventually(lambda: bad.counters["failed_refused"] > 2)
    if isinstance(bad, SchedulerClient):
        bad.new_step()
        assert bad.match("q", bytes(32), 32, 0) is None
        assert bad.reserve([ReserveItem("r", bytes(32))], 32) is None
    assert not bad.connected
    (line,) = [line for line in warnings(caplog) if says in line]
    assert line.startswith("runs uncached: ")
    assert "\n" not in line
    assert len(daemon.status()["namespaces"]) == (rank == -1), "complete only if all are right"
    for client in (bad, *clients):
        client.close()
    daemon.wait_until(instances=0)


def test_two_live_workers_of_one_rank(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """The second waits for the first to go, without hurry; a restarted process is such a second."""
    one = ParallelStrategy(rank=0)
    first, second = (WorkerClient(daemon.socket, terms(one)) for _ in range(2))
    first.connect(10)
    second.start()
    assert eventually(lambda: second.counters["failed_refused"] >= 3)
    assert not second.connected
    (line,) = [line for line in warnings(caplog) if "rank_taken" in line]
    assert "rank 0 of instance 'e' is alive already" in line
    first.close()
    assert eventually(lambda: second.connected)
    second.close()
