"""A8, the client's side: what a daemon of an earlier or a later minor answers.

The earlier one says the least its messages need, the later one more than this client knows. Either
way everything works, or is a miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvass.client import link, session
from kvass.client.client import Client
from kvass.client.scheduler import Match, SchedulerClient
from kvass.client.worker import WorkerClient
from kvass.errors import Incompatible, KvassError, Refused
from kvass.messages import (
    Abort,
    Commit,
    Error,
    FromClient,
    FromDaemon,
    HandedOver,
    Hello,
    Lookup,
    Ping,
    Pong,
    Register,
    Release,
    Reserve,
    ReserveItem,
)
from kvass.testing.daemon import running_daemon
from kvass.wire.framing import HEADER
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ARENA_BYTES, ScriptedDaemon

KEYS, WIDTH = b"a" * 32 + b"b" * 32, 32
PATIENCE_S = 10.0


def frame(message: FromClient, tag: str, **fields: Any) -> list[bytes]:
    """The answer to ``message``, as a map that this version's encoder did not make."""
    payload = msgspec.msgpack.encode({"t": tag, "seq": message.seq, **fields})
    return [HEADER.pack(len(payload)) + payload]


def script(
    daemon: ScriptedDaemon, welcome: dict[str, Any], given: Callable[[], dict[str, Any]]
) -> None:
    """``daemon`` hits every lookup and grants every reserve; what protocol 1 requires, and more."""
    soon, boot = time.monotonic() + 600, {"boot": daemon.boot}
    daemon.answers |= {
        Hello: lambda m: frame(
            m, "welcome", clock_s=time.monotonic(), arena_bytes=ARENA_BYTES, **boot, **welcome
        ),
        Lookup: lambda m: frame(
            m, "matched", lease=1, chunks=2, deadline_s=soon, **boot, **given()
        ),
        Reserve: lambda m: frame(
            m,
            "granted",
            deadline_s=soon,
            grants=[{"reservation": 2, "chunks": [0], **given()}],
            **boot,
            **given(),
        ),
    }


def least(daemon: ScriptedDaemon) -> None:
    """``daemon`` says what protocol 1 requires, and nothing else."""
    script(daemon, {}, dict)


def later(daemon: ScriptedDaemon) -> None:
    """``daemon`` says more than this client knows."""
    welcome = {
        "limits": {"frame_bytes": 1 << 20, "from_a_later_minor": 7},
        "timing": {"lease_s": 30.5, "from_a_later_minor": 7.5},
        "from_a_later_minor": {"deeply": [1, {"nested": b"x"}]},
    }
    script(daemon, welcome, lambda: {"given_s": time.monotonic(), "from_a_later_minor": [1, None]})


class Engine:
    """A scheduler and its rank."""

    def __init__(self, socket: str, scheduler: Register, worker: Register) -> None:
        self.scheduler = SchedulerClient(
            socket, scheduler, reserve_wait_s=PATIENCE_S, step_wait_s=PATIENCE_S
        )
        self.worker = WorkerClient(socket, worker)

    @property
    def clients(self) -> tuple[Client, Client]:
        return self.scheduler._client, self.worker._client

    def start(self) -> None:
        self.scheduler.start()
        self.worker.start()

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def engine(
    daemon: ScriptedDaemon, registration: Register, worker_registration: Register
) -> Iterator[Engine]:
    engine = Engine(daemon.path, registration, worker_registration)
    yield engine
    engine.close()


def connected(engine: Engine) -> Engine:
    engine.start()
    for client in engine.clients:
        assert eventually(lambda client=client: client.connected)  # type: ignore[misc]
    engine.scheduler.new_step()
    return engine


def test_a8_nobody_copies_what_an_older_daemon_gave(daemon: ScriptedDaemon, engine: Engine) -> None:
    """Without ``given_s`` a rank cannot know that its debts were not settled by an EOF since. It
    does not copy: a failed load, so the engine computes, and a store that is aborted."""
    least(daemon)
    scheduler, worker = connected(engine).scheduler, engine.worker
    found = scheduler.match("r", KEYS, WIDTH, 0)
    assert isinstance(found, Match)
    assert (found.first, found.chunks, found.given_s) == (0, 2, 0.0)
    assert scheduler.take("r") is found
    assert scheduler.handed_over([found.lease], [], found.boot)
    assert worker.arena(found.boot, found.given_s) is None
    worker.release(found.boot, found.lease)
    assert [(m.lease, m.rank) for m in daemon.got(Release)] == [(1, 0)]

    scheduler.new_step()
    granted = scheduler.reserve([ReserveItem("r", KEYS)], WIDTH)
    assert granted is not None
    assert granted.given_s == 0.0
    assert scheduler.handed_over([], [2], granted.boot)
    assert worker.arena(granted.boot, granted.given_s) is None
    worker.abort(granted.boot, 2)
    assert [(m.reservation, m.rank) for m in daemon.got(Abort)] == [(2, 0)]
    assert [m.leases + m.reservations for m in daemon.got(HandedOver, 2)] == [(1,), (2,)]
    assert [client.counters["connects"] for client in engine.clients] == [1, 1]


def test_a8_what_is_not_said_is_what_it_always_was(daemon: ScriptedDaemon, engine: Engine) -> None:
    least(daemon)
    welcome = connected(engine).clients[1].connect(PATIENCE_S)
    assert (welcome.protocol, welcome.features, welcome.populated_bytes) == (1, (), 0)
    assert welcome.limits.frame_bytes == 4 << 20
    assert welcome.timing.lease_s == 60.0


def test_a8_what_a_later_daemon_adds_is_ignored(daemon: ScriptedDaemon, engine: Engine) -> None:
    later(daemon)
    scheduler, worker = connected(engine).scheduler, engine.worker
    welcome = engine.clients[0].connect(PATIENCE_S)
    assert (welcome.limits.frame_bytes, welcome.limits.keys_per_message) == (1 << 20, 32_768)
    assert (welcome.timing.lease_s, welcome.timing.reserve_s) == (30.5, 60.0)
    assert isinstance(scheduler.match("r", KEYS, WIDTH, 0), Match)
    found = scheduler.take("r")
    assert found is not None
    lease = worker.arena(found.boot, found.given_s)
    assert lease is not None
    lease.close()
    worker.release(found.boot, found.lease)
    granted = scheduler.reserve([ReserveItem("r", KEYS)], WIDTH)
    assert granted is not None
    worker.commit(granted.boot, granted.grants[0].reservation)
    assert [m.reservation for m in daemon.got(Commit)] == [2]
    assert [client.counters["connects"] for client in engine.clients] == [1, 1]


def test_a8_an_unheard_of_code_is_a_refusal_like_any(
    daemon: ScriptedDaemon, registration: Register
) -> None:
    def no(message: FromClient) -> list[FromDaemon]:
        return [Error(seq=message.seq, code="over\nquota", text="later")]

    daemon.answers[Ping] = no
    with Client(daemon.path, registration) as client:
        with pytest.raises(Refused, match=r"over\?quota: later"):
            client.call(Ping())
        daemon.push(Error(code="over_quota"))
        daemon.answers[Ping] = lambda m: [Pong(seq=m.seq)]
        client.call(Ping())
        assert client.counters["refused_over_quota"] == 1
        assert client.counters["connects"] == 1


def test_a8_an_unheard_of_message_costs_its_connection_and_not_more(
    daemon: ScriptedDaemon, registration: Register
) -> None:
    """A daemon that keeps the promise sends none: we named no feature that has it."""
    with Client(daemon.path, registration, wants_arena=True) as client:
        client.call(Ping())
        daemon.push(*frame(Ping(), "unheard_of", later=1))
        assert eventually(lambda: client.counters["connects"] == 2)
        client.call(Ping())
        assert client.counters["lost"] == 1


# ---------------------------------------------------------------- ranges that do not meet


def test_a8_a_daemon_out_of_range_is_logged_once_and_everything_is_a_miss(
    daemon: ScriptedDaemon,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(link, "BACKOFF_LASTING_S", 0.02)  # many attempts, still one line
    said = "this daemon speaks protocol 7..9, you 1..1: install matching versions"
    daemon.answers[Hello] = lambda m: [
        Error(seq=m.seq, code="incompatible_version", text=said, fatal=True)
    ]
    engine.start()
    daemon.got(Hello, 2)
    for _ in range(20):
        engine.scheduler.new_step()
        assert engine.scheduler.match("r", KEYS, WIDTH, 0) is None
        assert engine.scheduler.reserve([ReserveItem("r", KEYS)], WIDTH) is None
        assert engine.worker.arena(daemon.boot) is None
    for client in engine.clients:
        assert eventually(lambda client=client: client.counters["failed_incompatible"] > 3)  # type: ignore[misc]
    lines = [line for r in caplog.records if "speaks protocol" in (line := r.getMessage())]
    assert len(lines) == 2, "one of the scheduler's process, one of the rank's"
    for line in lines:
        assert "7..9" in line
        assert "1 to 1" in line
        assert "uncached" in line
        assert "\n" not in line


@pytest.mark.parametrize("ours", [(2, 3), (0, 0)])
def test_a8_a_client_out_of_range_is_refused_by_the_real_daemon(
    tmp_path: Path,
    registration: Register,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ours: tuple[int, int],
) -> None:
    monkeypatch.setattr(session, "PROTOCOL_MIN", ours[0])
    monkeypatch.setattr(session, "PROTOCOL_MAX", ours[1])
    with running_daemon(tmp_path) as real, Client(real.socket, registration) as client:
        with pytest.raises(Incompatible, match=rf"1\.\.1.*{ours[0]}\.\.{ours[1]}"):
            client.call(Ping())
        assert client.submit(Ping()) == 0
        assert client.counters["failed_incompatible"] == 1, "it will not change its mind soon"
    lines = [line for r in caplog.records if "speaks protocol" in (line := r.getMessage())]
    assert len(lines) == 1
    monkeypatch.undo()
    with running_daemon(tmp_path) as real, Client(real.socket, registration) as client:
        client.call(Ping())  # the control


def test_a8_after_the_upgrade_the_engine_is_cached_again(
    daemon: ScriptedDaemon, registration: Register
) -> None:
    greet = daemon.answers[Hello]
    daemon.answers[Hello] = lambda m: [
        Error(seq=m.seq, code="incompatible_version", text="2..2", fatal=True)
    ]
    with Client(daemon.path, registration) as client:
        with pytest.raises(KvassError):
            client.call(Ping())
        daemon.answers[Hello] = greet
        daemon.restart()  # in the place of the old one: found long before the pause is over
        assert eventually(lambda: client.connected, link.BACKOFF_LASTING_S / 2)
