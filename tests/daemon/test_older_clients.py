"""A8, the daemon's side: a client of an earlier or a later minor speaks to a real daemon.

The client here knows nothing of ``messages.py``: it sends maps and reads maps. The earlier one says
the least that a message needs and looks at nothing that came later; the later one says more than
this daemon knows.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, Self

import msgspec
import pytest

from kvass.testing.daemon import Daemon

WAIT_S = 20.0
ROW = 4096
KEYS = b"a" * 32 + b"b" * 32
LEAST_LAYOUT = {
    "groups": [{"kind": "full", "block_tokens": 16, "layers": ["l"], "page_bytes": [ROW]}]
}
UNHEARD_OF: dict[str, Any] = {"later": {"deeply": [1, {"nested": b"x"}]}, "later_too": 2.5}


class Foreigner:
    """One session that speaks maps; ``more`` is added to whatever it says."""

    def __init__(self, path: str, more: dict[str, Any]) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(WAIT_S)
        self._sock.connect(path)
        self._more = more
        self._seqs = itertools.count(1)
        self._fds: list[int] = []
        self.boot = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        for fd in self._fds:
            os.close(fd)

    def greet(self, **said: Any) -> dict[str, Any]:
        welcome = self.ask("hello", clock_s=time.monotonic(), **said)
        self.boot = welcome["boot"]
        return welcome

    def register(self, instance: str, **said: Any) -> dict[str, Any]:
        terms = {"instance": instance, "identity": {"model": "m"}, "chunk_tokens": 16}
        return self.ask("register", **terms, **said)

    def say(self, tag: str, **said: Any) -> None:
        payload = msgspec.msgpack.encode({"t": tag, **said, **self._more})
        self._sock.sendall(struct.pack("<I", len(payload)) + payload)

    def ask(self, tag: str, **said: Any) -> dict[str, Any]:
        """The reply with the request's ``seq``, whatever it is."""
        seq = next(self._seqs)
        self.say(tag, seq=seq, **said)
        while (reply := self.read()).get("seq") != seq:
            pass
        return reply

    def read(self) -> dict[str, Any]:
        head, fds, _, _ = socket.recv_fds(self._sock, 4, 1, socket.MSG_WAITALL)
        assert head, "the daemon hung up"
        self._fds += fds
        length = int.from_bytes(head, "little")
        payload = self._sock.recv(length, socket.MSG_WAITALL)
        message: dict[str, Any] = msgspec.msgpack.decode(payload)
        return message

    def arena(self, size: int) -> mmap.mmap:
        (fd,) = self._fds
        return mmap.mmap(fd, size)


class Engine:
    """A scheduler and its ranks, all of which hold, and share, the one shard."""

    def __init__(
        self, path: str, name: str, more: dict[str, Any], ranks: int = 1, **greeting: Any
    ) -> None:
        # One rank is what `ranks`, `world_size`, `shard` and `writer` mean where they are missing.
        self._said = {"ranks": ranks} if ranks > 1 else {}
        self.scheduler = Foreigner(path, more)
        self.workers = [Foreigner(path, more) for _ in range(ranks)]
        self.scheduler.greet(**greeting)
        self.scheduler.register(name, **self._said)
        for rank, worker in enumerate(self.workers):
            welcome = worker.greet(wants_arena=True)
            reply = worker.register(name, rank=rank, layout=LEAST_LAYOUT, **self._shares(rank))
        self.namespace = reply["namespace"]
        self.memory = self.workers[0].arena(welcome["arena_bytes"])
        self.boot = welcome["boot"]

    def _shares(self, rank: int) -> dict[str, Any]:
        return {**self._said, "writer": rank == 0} if self._said else {}

    def store(self, keys: bytes) -> list[int]:
        """Write 1, 2, ... into the rows of ``keys``; the chunks that were granted."""
        item = {"request": "r", "digests": keys}
        granted = self.scheduler.ask("reserve", items=[item])
        (grant,) = granted["grants"]
        if not grant.get("reservation"):
            return []
        self.scheduler.say("handed_over", boot=self.boot, reservations=[grant["reservation"]])
        for chunk, at in zip(grant["chunks"], places(grant["slots"][0]), strict=True):
            self.memory[at : at + ROW] = bytes([chunk + 1]) * ROW
        self.workers[0].say("commit", boot=self.boot, reservation=grant["reservation"])
        assert self.workers[0].ask("ping")["t"] == "pong"
        return list(grant["chunks"])

    def lookup(self, keys: bytes, **said: Any) -> dict[str, Any]:
        return self.scheduler.ask("lookup", request="q", digests=keys, **said)

    def check(self, matched: dict[str, Any], chunks: int) -> None:
        assert matched["chunks"] == chunks
        for chunk, at in enumerate(places(matched["slots"][0])):
            assert self.memory[at : at + ROW] == bytes([chunk + 1]) * ROW

    def release(self, lease: int, rank: int = 0) -> None:
        worker = self.workers[rank]
        worker.say("release", boot=self.boot, lease=lease, rank=rank)
        assert worker.ask("ping")["t"] == "pong", "a release was refused"

    def close(self) -> None:
        self.memory.close()
        for session in (self.scheduler, *self.workers):
            session.__exit__()


def places(slots: dict[str, Any]) -> list[int]:
    """Offsets in the arena of shard 0, as ``types.Slots`` defines them."""
    sets = struct.unpack(f"<{len(slots['set_']) // 2}H", slots["set_"])
    numbers = struct.unpack(f"<{len(slots['slot']) // 4}I", slots["slot"])
    extents = slots["extents"]
    return [extents[s][0] + n * ROW for s, n in zip(sets, numbers, strict=True)]


@pytest.fixture(params=[{}, UNHEARD_OF], ids=["says less", "says more"])
def more(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.fixture
def engine(shared: Daemon, more: dict[str, Any]) -> Iterator[Engine]:
    engine = Engine(shared.socket, "foreign", more)
    yield engine
    engine.scheduler.ask("clear")
    engine.close()
    shared.wait_until(instances=0, leases=0, reservations=0, rows=0)


def test_a8_another_minor_stores_looks_up_and_releases(shared: Daemon, engine: Engine) -> None:
    assert len(engine.namespace) == 32
    assert engine.lookup(KEYS).get("chunks", 0) == 0
    assert engine.store(KEYS) == [0, 1]
    assert engine.store(KEYS) == []
    matched = engine.lookup(KEYS)
    engine.check(matched, 2)
    assert shared.status()["pins"] == 2
    engine.release(matched["lease"])
    assert shared.status()["pins"] == 0


def test_a8_a_scheduler_of_another_minor_gives_back(shared: Daemon, engine: Engine) -> None:
    engine.store(KEYS)
    lease = engine.lookup(KEYS)["lease"]
    engine.scheduler.say("release", boot=engine.boot, lease=lease)
    item = {"request": "r", "digests": b"c" * 32}
    (grant,) = engine.scheduler.ask("reserve", items=[item])["grants"]
    engine.scheduler.say("abort", boot=engine.boot, reservation=grant["reservation"])
    engine.scheduler.ask("ping")
    status = shared.status()
    assert (status["pins"], status["reservations"]) == (0, 0)


def test_a8_a_missing_reader_list_is_exactly_rank_0(shared: Daemon, more: dict[str, Any]) -> None:
    engine = Engine(shared.socket, "two ranks", more, ranks=2)
    engine.store(KEYS)
    for said, releases in (
        ({}, {0: 0}),
        ({}, {1: 1, 0: 0}),  # rank 1 owes nothing, so it settles nothing
        ({"readers": None}, {0: 0}),
        ({"readers": [0, 1]}, {0: 1, 1: 0}),
    ):
        lease = engine.lookup(KEYS, **said)["lease"]
        for rank, left in releases.items():
            engine.release(lease, rank)
            assert shared.status()["leases"] == left
    engine.scheduler.ask("clear")
    engine.close()
    shared.wait_until(instances=0, rows=0)


def test_a8_old_and_new_clients_share_rows(shared: Daemon) -> None:
    less, later = (Engine(shared.socket, f"e{i}", m) for i, m in enumerate([{}, UNHEARD_OF]))
    assert less.namespace == later.namespace
    less.store(KEYS)
    matched = later.lookup(KEYS)
    later.check(matched, 2)
    later.release(matched["lease"])
    less.scheduler.ask("clear")
    less.close()
    later.close()
    shared.wait_until(instances=0, rows=0)


def test_a8_what_this_daemon_cannot_know_ends_that_session_alone(
    shared: Daemon, engine: Engine
) -> None:
    """A new message needs a feature that the welcome named; whoever says it regardless, loses."""
    with Foreigner(shared.socket, {}) as visitor:
        visitor.greet()
        visitor.say("prefetch", seq=2, digests=KEYS)
        error = visitor.read()
        assert (error["code"], error["fatal"]) == ("bad_message", True)
    with Foreigner(shared.socket, {}) as visitor:
        visitor.greet()
        group = {**LEAST_LAYOUT["groups"][0], "kind": "unheard_of"}
        visitor.say("register", seq=2, instance="i", identity={}, chunk_tokens=16, rank=0,
                    layout={"groups": [group]})  # fmt: skip
        error = visitor.read()
        assert (error["code"], error["fatal"]) == ("bad_message", True)
        assert "unheard_of" in error["text"]
        assert "kind" in error["text"]
    assert engine.store(KEYS) == [0, 1]
