"""A8, the client's side: what a daemon of a later minor or of another protocol answers.

What an earlier one does not say is frozen in ``tests/golden``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvass.client import connection
from kvass.client.client import Client
from kvass.client.lookups import Match
from kvass.errors import Incompatible, Refused
from kvass.messages import (
    CLEAR_TENANT,
    Commit,
    Error,
    FromClient,
    FromDaemon,
    Hello,
    Lookup,
    Ping,
    Pong,
    Register,
    Reserve,
    ReserveItem,
)
from kvass.testing.daemon import running_daemon
from kvass.wire.framing import HEADER
from tests.client.test_real_daemon import Engine
from tests.support.wire.scripted_daemon import ARENA_BYTES, ScriptedDaemon

KEYS, WIDTH = b"a" * 32 + b"b" * 32, 32
PATIENCE_S = 10.0


def frame(message: FromClient, tag: str, **fields: Any) -> list[bytes]:
    """The answer to ``message``, as a map that this version's encoder did not make."""
    payload = msgspec.msgpack.encode({"t": tag, "seq": message.seq, **fields})
    return [HEADER.pack(len(payload)) + payload]


def later(daemon: ScriptedDaemon) -> None:
    """``daemon`` hits every lookup, grants every reserve, and says more than this client knows."""
    now, boot, more = time.monotonic(), {"boot": daemon.boot}, {"from_a_later_minor": [1, None]}
    given = {"given_s": now + 60, "deadline_s": now + 600, **boot, **more}
    welcome = {
        "limits": {"frame_bytes": 1 << 20, **more},
        "timing": {"lease_s": 30.5, **more},
        "arena_bytes": ARENA_BYTES,
        **boot,
        **more,
    }
    grant = {"reservation": 2, "chunks": [0], **more}
    daemon.answers |= {
        Hello: lambda m: frame(m, "welcome", clock_s=time.monotonic(), **welcome),
        Lookup: lambda m: frame(m, "matched", lease=1, chunks=2, **given),
        Reserve: lambda m: frame(m, "granted", grants=[grant], **given),
    }


def test_a8_what_a_later_daemon_adds_is_ignored(
    daemon: ScriptedDaemon, registration: Register, worker_registration: Register
) -> None:
    later(daemon)
    engine = Engine(daemon.path, registration, worker_registration)
    scheduler, worker = engine.scheduler, engine.worker
    worker.connect(PATIENCE_S)
    welcome = scheduler.connect(PATIENCE_S)
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
    assert scheduler.counters["connects"] == worker.counters["connects"] == 1
    engine.close()


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


# ---------------------------------------------------------------- ranges that do not meet


@pytest.mark.parametrize("ours", [(2, 3), (0, 0)])
def test_a8_a_client_out_of_range_is_refused_by_the_real_daemon(
    tmp_path: Path,
    registration: Register,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ours: tuple[int, int],
) -> None:
    monkeypatch.setattr(connection, "PROTOCOL_MIN", ours[0])
    monkeypatch.setattr(connection, "PROTOCOL_MAX", ours[1])
    with running_daemon(tmp_path) as real, Client(real.socket, registration) as client:
        with pytest.raises(Incompatible, match=rf"1\.\.1.*{ours[0]}\.\.{ours[1]}"):
            client.call(Ping())
        assert client.submit(Ping()) == 0
    lines = [line for r in caplog.records if "speaks protocol" in (line := r.getMessage())]
    assert len(lines) == 1
    monkeypatch.undo()
    with running_daemon(tmp_path) as real, Client(real.socket, registration) as client:
        client.call(Ping())  # the control


def test_a_daemon_without_a_feature_works_with_a_client_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This feature is made up."""
    monkeypatch.setattr(connection, "FEATURES", ("made_up", CLEAR_TENANT))
    with running_daemon(tmp_path, "1MiB") as daemon, Client(daemon.socket) as client:
        assert client.connect(PATIENCE_S).features == (CLEAR_TENANT,)
        assert isinstance(client.call(Ping(), PATIENCE_S), Pong)
