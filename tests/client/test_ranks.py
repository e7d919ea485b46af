"""Several ranks over real sockets: terms and readers that cannot be, or contradict each other."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvass.client import link
from kvass.client.parallel import ParallelStrategy
from kvass.client.scheduler import SchedulerClient
from kvass.client.worker import WorkerClient
from kvass.messages import Granted, Register, ReserveItem
from kvass.testing.daemon import Daemon, running_daemon
from kvass.types import PAGE, GroupLayout, RankLayout
from tests.support.waiting import eventually

PATIENCE_S, WIDTH, CHUNKS = 10.0, 32, 4
DIGESTS = b"".join(hashlib.sha256(bytes([c])).digest() for c in range(CHUNKS))
DENSE, MLA = ParallelStrategy(2, 2), ParallelStrategy(2, 2, replicas=2)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:  # the real one, in place of the scripted
    with running_daemon(tmp_path, "16MiB") as real:
        yield real


def terms(strategy: ParallelStrategy, name: str = "e", **fields: Any) -> Register:
    """Each stage has a layer of its own."""
    stage = max(strategy.rank, 0) // strategy.tp
    group = GroupLayout("full", 32, (f"layer.{stage}",), (512,))
    layout = None if strategy.rank < 0 else RankLayout((group,))
    terms = strategy.register(name, {"model": "tiny"}, 256, layout)
    return msgspec.structs.replace(terms, **fields)


class Engine:
    """The scheduler and all ranks of a strategy."""

    def __init__(self, socket: str, strategy: ParallelStrategy, name: str = "e") -> None:
        self.strategy = strategy
        self.scheduler = SchedulerClient(
            socket,
            terms(strategy, name),
            readers=strategy.readers,
            reserve_wait_s=PATIENCE_S,
            step_wait_s=PATIENCE_S,
        )
        self.workers = [
            WorkerClient(socket, terms(strategy.at(rank), name)) for rank in strategy.readers
        ]
        self.clients: list[SchedulerClient | WorkerClient] = [self.scheduler, *self.workers]
        for client in self.clients:
            client.start()
            assert eventually(lambda client=client: client.connected)  # type: ignore[misc]

    def reserve(self) -> Granted:
        granted = self.scheduler.reserve([ReserveItem("r", DIGESTS)], WIDTH)
        assert granted is not None
        (grant,) = granted.grants
        assert self.scheduler.handed_over([], [grant.reservation], granted.boot)
        return granted

    def write(self, granted: Granted, rank: int) -> None:
        shard, (grant,) = self.strategy.at(rank).shard, granted.grants
        lease = self.workers[rank].arena(granted.boot, granted.given_s)
        assert lease is not None
        with lease as buffer:
            for chunk, at in enumerate(grant.slots[0].offsets(shard, PAGE).tolist()):
                buffer[at : at + PAGE] = value(shard, chunk)
        self.workers[rank].commit(granted.boot, grant.reservation)

    def close(self) -> None:
        for client in self.clients:
            client.close()


def value(shard: int, chunk: int) -> int:
    return 1 + shard * CHUNKS + chunk


# ---------------------------------------------------------------- terms that cannot be


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@dataclass
class Case:
    wrong: Register
    says: str


def case(at: int, says: str, **wrong: Any) -> Case:
    return Case(terms(MLA.at(at), **wrong), says)


OTHER = RankLayout((GroupLayout("full", 32, ("layer.0",), (1024,)),))
CASES = {
    "rank outside": case(3, "bad_rank: rank: 4 is outside the world of 4", rank=4),
    "ranks above 128": case(3, "bad_rank: ranks: 129 is not in 1..128", ranks=129),
    "shard outside": case(3, "bad_value: shard: 2 is not in 0..1", shard=2),
    "two writers": case(3, "contradiction: writer: rank 2 writes shard 1", writer=True),
    "no writer": case(3, "contradiction: writer: no rank writes shards [1]"),
    "replicas differ": case(3, "contradiction: layout: differs from", layout=OTHER),
    "ranks": case(-1, "contradiction: ranks: 8, but its instance said 4", ranks=8),
    "world size": case(-1, "contradiction: world_size: 4, but its", world_size=4),
    "identity": case(-1, "contradiction: identity[model]: 'n'", identity={"model": "n"}),
}


@pytest.mark.parametrize("name", CASES)
def test_terms_that_cannot_be_are_refused_by_name_and_that_process_runs_uncached(
    daemon: Daemon,
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line, pauses between attempts, nothing stored; with the right terms it is in."""
    monkeypatch.setattr(link, "BACKOFF_LASTING_S", 0.05)
    wrong, says = CASES[name].wrong, CASES[name].says
    ranks = [r for r in MLA.readers if r != wrong.rank and not (r == 3 and wrong.rank != -1)]
    right = {r: terms(MLA.at(r)) for r in ranks}
    if name == "no writer":  # rank 2 says that it does not write, and the last to come learns it
        right[2] = msgspec.structs.replace(right[2], writer=False)
    clients = [WorkerClient(daemon.socket, r) for r in right.values()]
    for client in clients:
        client.start()
        assert eventually(lambda client=client: client.connected)  # type: ignore[misc]
    bad: Any = (SchedulerClient if wrong.rank < 0 else WorkerClient)(daemon.socket, wrong)
    bad.start()
    assert eventually(lambda: bad.counters["failed_refused"] > 2)
    if isinstance(bad, SchedulerClient):
        bad.new_step()
        assert bad.match("q", DIGESTS, WIDTH, 0) is None
        assert bad.reserve([ReserveItem("r", DIGESTS)], WIDTH) is None
    assert not bad.connected
    (line,) = [line for line in warnings(caplog) if says in line]
    assert line.startswith("runs uncached: ")
    assert "\n" not in line
    status = daemon.status()
    assert (status["rows"], status["reservations"], status["pins"]) == (0, 0, 0)
    assert len(status["namespaces"]) == (wrong.rank == -1), "complete only if all ranks are right"
    bad.close()
    for client in clients:
        client.close()
    daemon.wait_until(instances=0)


def test_two_live_workers_of_one_rank(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """The second waits for the first to go, without hurry; a restarted process is such a second."""
    one = ParallelStrategy(rank=0)
    first, second = (WorkerClient(daemon.socket, terms(one)) for _ in range(2))
    first.start()
    assert eventually(lambda: first.connected)
    second.start()
    assert eventually(lambda: second.counters["failed_refused"] >= 3)
    assert not second.connected
    (line,) = [line for line in warnings(caplog) if "rank_taken" in line]
    assert "rank 0 of instance 'e' is alive already" in line
    first.close()
    assert eventually(lambda: second.connected)
    second.close()


def test_a4_readers_that_cannot_be_are_misses_and_one_line(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(daemon.socket, MLA)
    granted = engine.reserve()
    for rank in MLA.writers:
        engine.write(granted, rank)
    daemon.wait_until(rows=CHUNKS)
    engine.scheduler.close()
    daemon.wait_until(sessions=5)  # four ranks and who asks
    for readers in [(), (-1,), (4,), tuple(range(129)), (0, 0)]:
        caplog.clear()
        bad = SchedulerClient(daemon.socket, terms(MLA), readers=readers, step_wait_s=PATIENCE_S)
        bad.start()
        assert eventually(lambda bad=bad: bad.connected)  # type: ignore[misc]
        for request in "abc":
            bad.new_step()
            assert bad.match(request, DIGESTS, WIDTH, 0) is None
            bad.settle(request)
        assert bad.counters["refused_bad_rank"] == 3
        assert bad.counters["connects"] == 1
        (line,) = [line for line in warnings(caplog) if "refused" in line]
        assert "readers: " in line
        status = daemon.status()
        assert (status["leases"], status["pins"], status["rows"]) == (0, 0, CHUNKS)
        bad.close()
        daemon.wait_until(sessions=5)
    engine.close()


def test_a_rank_that_comes_back_with_another_layout_is_another_namespace(daemon: Daemon) -> None:
    engine = Engine(daemon.socket, DENSE)
    granted = engine.reserve()
    for rank in DENSE.writers:
        engine.write(granted, rank)
    daemon.wait_until(rows=CHUNKS)
    engine.workers[3].close()
    changed = WorkerClient(daemon.socket, terms(DENSE.at(3), layout=OTHER))
    changed.start()
    assert eventually(lambda: len(daemon.status()["namespaces"]) == 2)
    engine.scheduler.new_step()
    assert engine.scheduler.match("q", DIGESTS, WIDTH, 0) is None, "other bytes, another name"
    assert daemon.status()["rows"] == CHUNKS
    changed.close()
    engine.close()
