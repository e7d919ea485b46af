"""An arena that is full still takes every store: room is made when it is asked for."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvass import SchedulerClient, WorkerClient
from kvass.client.scheduler import Match
from kvass.messages import Register, ReserveItem
from kvass.testing.daemon import running_daemon
from kvass.types import GroupLayout, RankLayout
from tests.support.waiting import eventually

MIB: Final = 1 << 20
STORES: Final = 2000
LAYOUT: Final = RankLayout((GroupLayout("full", 32, ("layer",), (MIB // 8,)),))


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def test_two_thousand_stores_into_half_the_room(tmp_path: Path) -> None:
    """2,000 stores of 1 MiB into 1 GiB: none is dropped, and the newest are there, intact."""
    us = Register(instance="one", identity={"model": "m"}, chunk_tokens=256)
    with running_daemon(tmp_path, l1_size="1GiB") as daemon:
        scheduler = SchedulerClient(daemon.socket, us, reserve_wait_s=5, step_wait_s=5)
        worker = WorkerClient(daemon.socket, msgspec.structs.replace(us, rank=0, layout=LAYOUT))
        scheduler.start()
        worker.start()
        assert eventually(lambda: scheduler.connected and worker.connected)
        for number in range(STORES):
            store(scheduler, worker, number)
        status = daemon.wait_until(reservations=0, leases=0, quarantined_bytes=0)
        assert status["counters"]["chunks_granted"] == STORES
        assert status["rows"] >= 0.9 * 1024, "the arena is used, not only turned over"
        for number in range(STORES - 500, STORES):
            assert read(scheduler, worker, number) == number % 251 + 1
        assert read(scheduler, worker, 0) is None, "room was made for something"
        scheduler.close()
        worker.close()


def store(scheduler: SchedulerClient, worker: WorkerClient, number: int) -> None:
    granted = scheduler.reserve([ReserveItem(f"r{number}", key(number))], 32)
    assert granted is not None
    (grant,) = granted.grants
    assert grant.chunks == (0,), f"store {number} was dropped"
    lease = worker.arena(granted.boot)
    assert lease is not None
    scheduler.handed_over([], [grant.reservation], granted.boot)
    with lease as arena:
        (at,) = grant.slots[0].offsets(0, MIB).tolist()
        arena[at : at + MIB] = number % 251 + 1
    worker.commit(granted.boot, grant.reservation)


def read(scheduler: SchedulerClient, worker: WorkerClient, number: int) -> int | None:
    """The one value of the row's bytes; None for a miss."""
    scheduler.new_step()
    match = scheduler.match(f"q{number}", key(number), 32, 0)
    if match is None:
        return None
    assert isinstance(match, Match)
    assert scheduler.take(f"q{number}") is match
    lease = worker.arena(match.boot)
    assert lease is not None
    with lease as arena:
        (at,) = match.slots[0].offsets(0, MIB).tolist()
        (value,) = np.unique(arena[at : at + MIB]).tolist()
    worker.release(match.boot, match.lease)
    return int(value)
