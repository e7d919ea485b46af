"""The connection: comes, goes, comes back; never in the way."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvass.client import connection as client_connection
from kvass.client import reconnecting
from kvass.client.client import Client
from kvass.client.reconnecting import Reconnecting
from kvass.client.requests import MAX_UNANSWERED
from kvass.errors import (
    ConfigError,
    ErrorCode,
    Incompatible,
    KvassError,
    Refused,
    RemoteError,
    TimedOut,
    Unavailable,
)
from kvass.messages import (
    Abort,
    Error,
    FromDaemon,
    Hello,
    Lookup,
    Ping,
    Pong,
    Register,
    Registered,
    Release,
)
from kvass.wire import framing
from kvass.wire.channel import Channel
from tests.support.waiting import eventually
from tests.support.wire.scripted_daemon import ScriptedDaemon

BOUND_S = 0.25
"""No call that does not ask to wait takes longer than this."""


def took(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


def boot_of(client: Client) -> bytes | None:
    """Of the daemon that it is connected to now."""
    connection = client.connection
    return None if connection is None else connection.boot


def test_call(daemon: ScriptedDaemon) -> None:
    with Client(daemon.path) as client:
        assert client.connection is None
        assert client.status() == {"leases": 0}
        assert client.clear(everything=True) == 0
        assert client.connected
    assert eventually(lambda: daemon.eofs == 1)


@pytest.mark.alone
def test_an_absent_daemon_is_said_at_once(tmp_path: Path) -> None:
    with Client(str(tmp_path / "none.sock")) as client:
        with pytest.raises(Unavailable, match="no daemon at"):
            client.call(Ping(), 60)
        assert took(lambda: client.submit(Ping())) < BOUND_S
        assert client.submit(Ping()) == 0
        assert not client.post(Release(boot=b"b" * 16, lease=1))
    assert took(client.close) < BOUND_S
    with Client("x" * 200) as client, pytest.raises(ConfigError):
        client.call(Ping())


@pytest.mark.parametrize("place", ["os.eventfd", "threading.Thread.start"])
def test_no_room_to_begin_is_an_absent_daemon(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_: object) -> None:
        raise (OSError if place == "os.eventfd" else RuntimeError)("none left")

    with Client(daemon.path) as client:
        with monkeypatch.context() as patched:
            patched.setattr(place, full)
            assert client.submit(Ping()) == 0
            with pytest.raises(Unavailable, match="cannot begin to connect: none left"):
                client.call(Ping(), 60)
        client.call(Ping())


def test_a_default_folder_of_another_user_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    path = str(tmp_path / f"kvass-{os.geteuid()}" / "kvass.sock")
    with Client(path) as client, pytest.raises(Unavailable, match="no daemon at"):
        client.call(Ping())
    Path(path).parent.mkdir(mode=0o700)
    with ScriptedDaemon(Path(path)) as daemon:
        with Client(path) as client:
            client.call(Ping())
        stranger = os.geteuid() + 1
        theirs = tmp_path / f"kvass-{stranger}"
        Path(path).parent.rename(theirs)  # to that user, this one is another
        monkeypatch.setattr("os.geteuid", lambda: stranger)
        refused = pytest.raises(ConfigError, match="another user")
        with Client(f"{theirs}/kvass.sock") as client, refused:
            client.call(Ping())
        assert len(daemon.got(Hello)) == 1  # the first one's


@pytest.mark.alone
def test_a_suspended_daemon_costs_no_call_more_than_its_bound(daemon: ScriptedDaemon) -> None:
    with Client(daemon.path) as client:
        boot = client.connect(5).boot
        daemon.reading.clear()
        with pytest.raises(TimedOut):
            client.call(Ping(), 0.05)
        big = Lookup(request="r", digests=bytes(32 * 512))
        slowest_s = 0.0
        seqs = []
        for _ in range(2 * MAX_UNANSWERED):
            began_s = time.monotonic()
            seqs.append(client.submit(big))
            client.post(Abort(boot=boot, reservation=1))
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        assert slowest_s < BOUND_S
        assert sum(seq > 0 for seq in seqs) < MAX_UNANSWERED  # bounded
        assert seqs[-1] == 0
        assert len(daemon.got(Abort, 0)) == 0

        daemon.reading.set()  # it lives: nothing one-way was lost
        assert len(daemon.got(Abort, 2 * MAX_UNANSWERED)) == 2 * MAX_UNANSWERED
        for seq in filter(None, seqs):
            assert client.wait(seq, 5) is not None
        client.call(Ping())


@pytest.mark.parametrize("wants_arena", [False, True])
def test_reconnects_and_registers_again(
    daemon: ScriptedDaemon, registration: Register, wants_arena: bool
) -> None:
    with Client(daemon.path, registration, wants_arena=wants_arena) as client:
        old = client.connect(5).boot
        seq = client.submit(Lookup(request="r", digests=b""))
        daemon.restart()
        # Nobody calls anything: the thread notices by itself.
        assert eventually(lambda: boot_of(client) not in (None, old))
        assert len(daemon.got(Register)) == 2
        connection = client.connection
        assert connection is not None
        assert connection.registered_s < time.monotonic()
        with pytest.raises(Unavailable):  # asked of another life
            client.wait(seq, 5)
        assert not client.post(Release(boot=old, lease=1))
        assert client.post(Release(boot=daemon.boot, lease=2))
        assert [m.lease for m in daemon.got(Release)] == [2]


def test_an_incomplete_registration_is_kept_back_until_it_is_complete(
    daemon: ScriptedDaemon, registration: Register
) -> None:
    client = Client(daemon.path, registration, incomplete=True)
    client.start()
    client.poll()
    assert not client.submit(Ping())
    with pytest.raises(TimedOut):
        client.connect(0.05)
    assert daemon.received == []
    client.complete({"weights": "w"})
    client.connect(5)
    (sent,) = [one for one in daemon.received if isinstance(one, Register)]
    assert sent.identity == {"model": "tiny", "weights": "w"}
    client.close()
    late = Client(daemon.path, registration, incomplete=True)
    late.close()
    late.complete({})
    assert late._thread is None, "what is closed does not connect any more"


@pytest.mark.parametrize(
    "harm",
    [
        *(b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc"),
        *(b"\x0e\0\0\0\x81\xa1t\xaaunheard_of", Pong(seq=77)),
    ],
    ids=["no frame", "no message", "unheard of", "unasked"],
)
def test_a_daemon_that_breaks_the_protocol_loses_that_connection_alone(
    daemon: ScriptedDaemon, registration: Register, harm: FromDaemon | bytes
) -> None:
    with Client(daemon.path, registration, wants_arena=True) as client:
        client.call(Ping())
        daemon.push(harm)
        assert eventually(lambda: client.counters["lost"] == 1)
        assert eventually(lambda: client.connected)
        client.call(Ping())
        assert client.counters["connects"] == 2


@pytest.mark.parametrize("answers", [(Registered,), (Pong, Pong)], ids=["other kind", "twice"])
def test_a_wrong_answer_ends_the_connection(
    daemon: ScriptedDaemon, answers: tuple[type[Any], ...]
) -> None:
    daemon.answers[Ping] = lambda m: [answer(seq=m.seq) for answer in answers]
    with Client(daemon.path, wants_arena=True) as client:  # then its thread reads whatever comes
        client.connect(5)
        seq = client.submit(Ping())
        assert eventually(lambda: client.poll() or client.counters["lost"] == 1)  # type: ignore[func-returns-value]
        with pytest.raises(Unavailable):
            client.wait(seq, 0)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"protocol": 99}, Incompatible, "chose protocol 99"),
        ({"clock_s": 5.0}, Incompatible, "CLOCK_MONOTONIC"),
        ({"clock_s": float("nan")}, Incompatible, "CLOCK_MONOTONIC"),
        ({"boot": b"short"}, RemoteError, "a boot id of 5 bytes"),
        ({"arena_bytes": 1 << 40}, RemoteError, "cannot be mapped"),
    ],
)
def test_a_bad_welcome_is_no_connection(
    daemon: ScriptedDaemon, change: dict[str, Any], error: type[KvassError], text: str
) -> None:
    daemon.welcome = lambda welcome: msgspec.structs.replace(welcome, **change)
    with Client(daemon.path, wants_arena=True) as client:
        with pytest.raises(error, match=text):
            client.call(Ping())
        daemon.welcome = lambda welcome: welcome
        if error is RemoteError:  # it may pass
            assert eventually(lambda: client.connected)


def refuse(code: ErrorCode) -> Callable[[object], list[FromDaemon]]:
    return lambda m: [Error(seq=getattr(m, "seq", 0), code=code, text="no\nand no", fatal=True)]


@pytest.mark.parametrize(
    ("code", "longest_s"),
    [
        ("rank_taken", reconnecting.BACKOFF_MAX_S),
        ("limit", reconnecting.BACKOFF_LASTING_S),
    ],
)
def test_a_refusal_is_said_once_and_one_by_a_limit_is_tried_again_ever_later(
    daemon: ScriptedDaemon,
    registration: Register,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    code: ErrorCode,
    longest_s: float,
) -> None:
    """A limit may be one of a field that will never be smaller, or of places that become free."""
    pauses: list[float] = []

    def pause(self: Reconnecting, seconds: float, tried: object) -> None:
        if self._path == daemon.path:  # not a client that another test left
            pauses.append(seconds)
        with self.lock:
            self.lock.wait(0.005)

    monkeypatch.setattr(Reconnecting, "_pause", pause)
    answer = daemon.answers[Register]
    daemon.answers[Register] = refuse(code)
    with Client(daemon.path, registration) as client:
        client.start()
        assert eventually(lambda: len(pauses) > 16)
        assert pauses[:3] == [0.01, 0.02, 0.04]
        assert pauses[15] == longest_s
        assert len(said(caplog, code)) == 1
        daemon.answers[Register] = refuse("bad_value")
        assert eventually(lambda: len(said(caplog, "bad_value")) == 1)
        daemon.answers[Register] = refuse(code)
        assert eventually(lambda: len(said(caplog, code)) == 2)
        pauses.clear()
        daemon.restart()  # another daemon is asked anew
        assert eventually(lambda: 0.01 in pauses)
        daemon.answers[Register] = answer
        assert eventually(lambda: client.connected)


@pytest.mark.parametrize("steady", [True, False])
def test_a_daemon_that_was_there_is_looked_for_often_at_first(
    daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch, steady: bool
) -> None:
    """It may be back soon with all that it had. The control: one that was there for a moment."""
    pauses: list[float] = []

    def pause(self: Reconnecting, seconds: float, tried: object) -> None:
        if self._path == daemon.path:  # not a client that another test left
            pauses.append(seconds)
        with self.lock:
            self.lock.wait(0.005)

    monkeypatch.setattr(Reconnecting, "_pause", pause)
    monkeypatch.setattr(reconnecting, "STEADY_S", 0.0 if steady else 1000.0)
    monkeypatch.setattr(reconnecting, "QUICK_S", 1000.0)
    with Client(daemon.path) as client:
        client.connect(5)
        daemon.kill()
        assert eventually(lambda: len(pauses) > 16)
        assert pauses[15] == (reconnecting.QUICK_PAUSE_S if steady else 0.5)
        monkeypatch.setattr(time, "monotonic", lambda real=time.monotonic: real() + 2000.0)
        assert eventually(lambda: pauses[-1] == reconnecting.BACKOFF_MAX_S)


def said(caplog: pytest.LogCaptureFixture, code: str) -> list[str]:
    """The lines about a refusal."""
    return [r.getMessage() for r in caplog.records if f"runs uncached: {code}" in r.getMessage()]


@pytest.mark.parametrize("code", ["too_large", "contradiction"])
def test_a_daemon_in_the_place_of_one_that_refused_is_found_soon(
    daemon: ScriptedDaemon,
    registration: Register,
    monkeypatch: pytest.MonkeyPatch,
    code: ErrorCode,
) -> None:
    monkeypatch.setattr(reconnecting, "BACKOFF_MIN_S", 30)
    monkeypatch.setattr(reconnecting, "BACKOFF_MAX_S", 0.05)
    answer = daemon.answers[Register]
    daemon.answers[Register] = refuse(code)
    with Client(daemon.path, registration) as client:
        with pytest.raises(Refused, match=code):
            client.connect(5)
        daemon.kill()
        time.sleep(0.15)  # nobody is there when it looks
        daemon.answers[Register] = answer
        daemon.restart()
        assert eventually(lambda: client.connected)


def test_refusals_of_one_way_messages_are_counted_and_logged_once(
    daemon: ScriptedDaemon, registration: Register, caplog: pytest.LogCaptureFixture
) -> None:
    with Client(daemon.path, registration) as client:
        client.connect(5)
        for _ in range(3):
            daemon.push(Error(code="unknown_lease", text="one\nline"))
        client.call(Ping())
        assert client.counters["refused_unknown_lease"] == 3
        logged = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(logged) == 1
        assert "\n" not in logged[0]


def test_a_forked_child_opens_its_own(daemon: ScriptedDaemon) -> None:
    with Client(daemon.path) as client:
        client.call(Ping())
        inherited = client.connection
        assert inherited is not None
        fd = inherited.channel.fileno()
        child = os.fork()
        if not child:
            status = 1
            try:
                closed = False
                try:
                    os.fstat(fd)
                except OSError:
                    closed = True
                client.call(Ping(), 10)
                status = 0 if closed and client.connection is not inherited else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert client.connection is inherited  # nobody shut it down
        client.call(Ping())
        assert len(daemon.got(Hello)) == 2
        assert eventually(lambda: daemon.eofs == 1)  # the child's own


def test_the_thread_ends_after_close(daemon: ScriptedDaemon) -> None:
    client = Client(daemon.path)
    client.call(Ping())
    client.close()
    client.close()
    assert eventually(lambda: daemon.eofs == 1)
    assert not client.connected
    assert client.submit(Ping()) == 0
    with pytest.raises(TimedOut):
        client.connect(0.05)
    assert len(daemon.got(Hello)) == 1


def test_a_refusal_that_came_before_we_said_hello_is_told() -> None:
    """The daemon refuses a user, and closes, as soon as it accepts."""
    near, far = socket.socketpair()
    near.setblocking(False)
    with far:
        far.sendall(framing.encode(Error(code="forbidden", text="uid 7 may not connect")))
    connection = client_connection.DaemonConnection(Channel(near), "a path")
    with pytest.raises(Refused, match="forbidden: uid 7 may not connect"):
        client_connection._greet(connection, wants_arena=False)
    with pytest.raises(Unavailable):  # nothing is left to be told
        client_connection._greet(connection, wants_arena=False)
    connection.end()
