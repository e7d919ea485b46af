"""The client and the real daemon: bytes stored and read back, suspended, killed, reborn."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvass.client import reconnecting
from kvass.client.connection import open_connection
from kvass.client.endpoint import Endpoint
from kvass.client.health import troubles
from kvass.client.lookups import Match
from kvass.client.scheduler import SchedulerClient
from kvass.client.worker import WorkerClient
from kvass.errors import Unavailable
from kvass.messages import Granted, Register, ReserveItem
from kvass.testing.daemon import Daemon, running_daemon
from tests.support.waiting import eventually

WIDTH, CHUNKS = 32, 4
PATIENCE_S = 20.0


class Engine:
    """A scheduler and its one worker, as a connector holds them."""

    def __init__(self, socket: str, scheduler: Register, worker: Register) -> None:
        self.scheduler = SchedulerClient(
            socket, scheduler, reserve_wait_s=PATIENCE_S, step_wait_s=PATIENCE_S
        )
        self.worker = WorkerClient(socket, worker)
        assert worker.layout is not None
        self.row_bytes = worker.layout.groups[0].shard_bytes(worker.chunk_tokens)
        self.scheduler.start()
        self.worker.start()

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    @property
    def connected(self) -> bool:
        return self.scheduler.connected and self.worker.connected

    def store(self, prompt: str) -> bool:
        """Store every chunk of ``prompt``; whether the daemon granted and took them."""
        item = ReserveItem(request=prompt, digests=digests(prompt))
        granted = self.scheduler.reserve([item], WIDTH)
        if granted is None or not granted.grants[0].reservation:
            return False
        grant = granted.grants[0]
        lease = self.worker.arena(granted.boot)
        if lease is None:  # registered, it does not know yet
            self.scheduler.abort(granted.boot, grant.reservation)
            return False
        self.scheduler.handed_over([], [grant.reservation], granted.boot)
        with lease as buffer:
            offsets = grant.slots[0].offsets(0, self.row_bytes).tolist()
            for chunk, at in zip(grant.chunks, offsets, strict=True):
                buffer[at : at + self.row_bytes] = value(prompt, chunk)
        self.worker.commit(granted.boot, grant.reservation)
        return True

    def load(self, prompt: str) -> bool:
        """Whether ``prompt`` is there, all of it; its bytes must be right."""
        self.scheduler.new_step()
        found = self.scheduler.match(prompt, digests(prompt), WIDTH, 0)
        if not isinstance(found, Match):
            return False
        assert self.scheduler.take(prompt) is found
        lease = self.worker.arena(found.boot)
        if lease is None:
            self.scheduler.release(found.boot, found.lease)
            return False
        with lease as buffer:
            for chunk, at in enumerate(found.slots[0].offsets(0, self.row_bytes).tolist()):
                got = np.unique(buffer[at : at + self.row_bytes]).tolist()
                assert got == [value(prompt, chunk)]
        self.worker.release(found.boot, found.lease)
        return bool(found.chunks == CHUNKS)


def digests(prompt: str) -> bytes:
    return b"".join(hashlib.sha256(f"{prompt}{c}".encode()).digest() for c in range(CHUNKS))


def value(prompt: str, chunk: int) -> int:
    return hashlib.sha256(f"{prompt}{chunk}".encode()).digest()[0]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:  # the real one, in place of the scripted
    with running_daemon(tmp_path, "16MiB") as real:
        yield real


@pytest.fixture
def engine(
    daemon: Daemon, registration: Register, worker_registration: Register
) -> Iterator[Engine]:
    engine = Engine(daemon.socket, registration, worker_registration)
    assert eventually(lambda: engine.connected)
    yield engine
    engine.close()


def quiet(daemon: Daemon) -> None:
    daemon.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0)


def test_what_is_stored_is_read_back(daemon: Daemon, engine: Engine) -> None:
    assert not engine.load("a")
    assert engine.store("a")
    assert eventually(lambda: engine.load("a"))
    assert not engine.load("b")
    assert not engine.store("a")  # held already
    quiet(daemon)
    assert engine.scheduler.clear(10)
    assert not engine.load("a")


def test_two_thousand_aborted_lookups_leave_no_pin(daemon: Daemon, engine: Engine) -> None:
    assert engine.store("a")
    assert eventually(lambda: engine.load("a"))
    scheduler = engine.scheduler
    scheduler.lookups.budget_s = PATIENCE_S
    for i in range(2_000):
        scheduler.step.wait_s = PATIENCE_S * (i % 2)  # every other one is given up at once
        scheduler.new_step()
        found = scheduler.match(f"r{i}", digests("a"), WIDTH, 0)
        assert found is not None
        if i == 1_001:  # the negative control: what is not settled does hold pins
            assert daemon.status()["pins"] >= CHUNKS
        scheduler.give_back(f"r{i}")
    quiet(daemon)
    assert scheduler.counters["hits"] + scheduler.counters["late_replies"] == 2_001
    assert scheduler.counters["late_replies"] > 0
    assert scheduler.counters["lost"] == 0


def reconnect(client: Endpoint) -> None:
    """The connection ends and another begins, while the daemon lives on."""
    connection = client.connection
    assert connection is not None
    client.fault(connection, "a test")
    assert eventually(lambda: client.connection not in (None, connection))


def reserve(engine: Engine, prompt: str) -> Granted:
    item = ReserveItem(request=prompt, digests=digests(prompt))
    granted = engine.scheduler.reserve([item], WIDTH)
    assert granted is not None
    assert granted.grants[0].reservation
    return granted


def test_a_rank_that_came_back_does_not_copy_what_was_given_before(engine: Engine) -> None:
    granted = reserve(engine, "a")
    still = engine.worker.arena(granted.boot, granted.given_s)
    assert still is not None, "the control: nothing happened between"
    still.close()
    reconnect(engine.worker)
    assert engine.worker.arena(granted.boot, granted.given_s) is None, "its EOF freed the slots"
    assert eventually(lambda: engine.store("b"))


def test_what_a_lost_connection_gave_is_not_handed_over(engine: Engine) -> None:
    granted = reserve(engine, "a")
    reconnect(engine.scheduler)
    assert not engine.scheduler.handed_over([], [granted.grants[0].reservation], granted.boot)
    granted = reserve(engine, "b")
    assert engine.scheduler.handed_over([], [granted.grants[0].reservation], granted.boot)


def test_a_daemon_that_does_not_read_is_not_presumed_to_know(
    daemon: Daemon, engine: Engine
) -> None:
    granted = reserve(engine, "a")
    connection = engine.scheduler.connection
    assert connection is not None
    daemon.suspend()
    while not connection.channel.wants_write:
        engine.scheduler.release(granted.boot, 1)
    assert not engine.scheduler.handed_over([], [granted.grants[0].reservation], granted.boot)
    assert not engine.scheduler.connected
    daemon.resume()
    assert eventually(lambda: daemon.status()["reservations"] == 0)


class Door:
    """Before ``open_connection``: registered clients of the ranks in ``shut`` do not get in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shut: set[int] = set()
        self._open = open_connection
        monkeypatch.setattr(reconnecting, "open_connection", self)

    def __call__(self, path: str, registration: Register | None, **options: Any) -> Any:
        if registration is not None and registration.rank in self.shut:
            raise Unavailable("a test")
        return self._open(path, registration, **options)


@pytest.mark.parametrize("ranks", [{-1}, {-1, 0}], ids=["scheduler", "whole engine"])
def test_a_clear_nobody_heard_is_made_up_for_after_the_reconnect(
    daemon: Daemon, engine: Engine, ranks: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.store("old")
    assert eventually(lambda: engine.load("old"))
    scheduler, door = engine.scheduler, Door(monkeypatch)
    clients = {-1: scheduler, 0: engine.worker}
    for rank in ranks:
        reconnect(clients[rank])
    assert eventually(lambda: engine.load("old")), "the control: a lost connection loses no row"

    door.shut = set(ranks)
    for rank in ranks:
        connection = clients[rank].connection
        assert connection is not None
        clients[rank].fault(connection, "a test")
    assert not scheduler.clear(0.05)
    assert not engine.load("old")
    assert not engine.store("meanwhile")
    assert daemon.status()["rows"] == CHUNKS

    door.shut = ranks - {-1}
    assert eventually(lambda: scheduler.connected)
    for _ in range(20 if door.shut else 0):  # without its ranks it has no namespace to clear
        assert not engine.load("old")
        time.sleep(0.01)
        assert not scheduler.answering
    door.shut = set()
    assert eventually(lambda: engine.connected)

    def confirmed() -> bool:
        assert not engine.load("old")
        return scheduler.answering

    assert eventually(confirmed)
    assert not engine.load("old")
    assert daemon.status()["rows"] == 0
    assert engine.store("new")
    assert eventually(lambda: engine.load("new"))


def test_an_engine_that_runs_uncached_says_so_to_each_daemon(
    daemon: Daemon, engine: Engine
) -> None:
    """Its hits would end, and ``kvass status`` would say OK."""
    assert engine.store("a")
    assert troubles(daemon.status()) == []
    engine.scheduler.tell_uncached("copies are wrong")
    assert engine.scheduler.registration is not None
    says = [f"engine {engine.scheduler.registration.instance} runs uncached: copies are wrong"]
    assert eventually(lambda: troubles(daemon.status()) == says)
    assert daemon.status()["rows"] == CHUNKS, "it is in its namespace as before"
    assert engine.scheduler.clear(10)
    assert daemon.status()["rows"] == 0
    daemon.restart()
    assert eventually(lambda: engine.connected)
    assert eventually(lambda: troubles(daemon.status()) == says)


def test_an_engine_logs_when_its_daemon_is_there_gone_and_back(
    daemon: Daemon, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each time, in the scheduler's process; a worker's lines are for debugging."""
    caplog.set_level(logging.INFO, "kvass.client")
    for _ in range(2):
        daemon.kill()
        assert eventually(lambda: not engine.scheduler.connected)
        assert not engine.load("none")
        daemon.start()
        assert eventually(lambda: engine.connected)
    events = [r.getMessage() for r in caplog.records if "connect" in r.getMessage()]
    assert [re.sub(r"\d+\.\d s", "N s", line) for line in events] == [
        lost := events[0],
        again
        := f"connected to the daemon at {daemon.socket} again after N s; 1 lookups were not asked "
        "meanwhile",
        lost,
        again,
    ]
    assert lost.endswith("; requests run uncached")
