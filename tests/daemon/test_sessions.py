"""What a session may do to a real daemon: anything, and only to itself."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvass.daemon import peer_process
from kvass.daemon.peer_process import PeerProcess, process_behind
from kvass.messages import (
    Clear,
    Cleared,
    Commit,
    Error,
    Explain,
    HandedOver,
    Ping,
    Pong,
    Status,
    StatusReply,
    Welcome,
)
from kvass.testing.daemon import Daemon, running_daemon
from kvass.types import Limits
from kvass.wire import framing
from tests.support.wire.raw_session import RawSession, engine


@pytest.fixture
def bystander(shared: Daemon) -> Iterator[RawSession]:
    """A session that must not notice what another one does."""
    with RawSession(shared.socket).greet() as peer:
        yield peer
        peer.ask(Ping(), Pong)
    shared.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0, sessions=1)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\0\0\0\0", "bad_frame"),
        (b"\xff\xff\xff\xff", "bad_frame"),
        (b"GET / HTTP/1.1\r\n\r\n", "bad_frame"),
        (b"\x05\0\0\0hello", "bad_message"),
        (framing.HEADER.pack(10) + b"\x81\xa1t\xa6nosuch", "bad_message"),
        (framing.HEADER.pack(19) + b"\x82\xa1t\xa4ping\xa3seq\xa5wrong!!", "bad_message"),
        (framing.encode(Welcome()), "bad_message"),
        (framing.encode(Ping(seq=1)), "bad_message"),  # Hello was not said
    ],
)
def test_bad_stream_ends_its_own_session_with_one_clear_line(
    shared: Daemon, bystander: RawSession, data: bytes, code: str
) -> None:
    before = shared.status()["counters"].get(f"ended_{code}", 0)
    with RawSession(shared.socket) as peer:
        peer.raw(data)
        (error,) = peer.rest()
        assert isinstance(error, Error)
        assert (error.code, error.fatal) == (code, True)
        assert error.text.isprintable()
    assert shared.status()["counters"][f"ended_{code}"] == before + 1


def test_what_came_before_the_bad_frame_counts(shared: Daemon, bystander: RawSession) -> None:
    with RawSession(shared.socket).greet() as peer:
        peer.raw(framing.encode(Ping(seq=7)) + b"\0\0\0\0" + framing.encode(Ping(seq=8)))
        pong, error = peer.rest()
        assert pong == Pong(seq=7)
        assert isinstance(error, Error)


def test_stream_that_ends_inside_a_frame_is_told_and_counted(
    shared: Daemon, bystander: RawSession
) -> None:
    with RawSession(shared.socket).greet() as peer:
        peer.raw(framing.encode(Ping(seq=7))[:5])
        peer.sock.shutdown(socket.SHUT_WR)
        (error,) = peer.rest()
        assert isinstance(error, Error)
        assert "inside a frame" in error.text


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=200), max_size=5), st.booleans())
def test_any_bytes_leave_the_daemon_well(
    shared: Daemon, pieces: list[bytes], greeted: bool
) -> None:
    with RawSession(shared.socket) as peer:
        if greeted:
            peer.greet().register("fuzz")
        try:
            for piece in pieces:
                peer.raw(piece)
        except OSError:  # it hung up on us
            pass
    with RawSession(shared.socket).greet() as peer:
        peer.ask(Ping(), Pong)


def anonymous_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def test_client_that_never_reads_costs_a_bounded_amount(daemon: Daemon) -> None:
    with RawSession(daemon.socket).greet() as good, RawSession(daemon.socket).greet() as peer:
        peer.sock.settimeout(20)
        question = framing.encode(Status(seq=1)) * 100_000
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            peer.sock.sendall(question)
        good.ask(Ping(), Pong)
        assert daemon.status()["counters"]["ended_limit"] == 1
    assert anonymous_kib(daemon.pid) < 80 << 10


def test_peer_that_stops_reading_keeps_its_slots_until_eof(daemon: Daemon) -> None:
    """Law 3: a failed *write* to a peer proves nothing about what the peer writes."""
    with engine(daemon.socket) as (scheduler, worker):
        scheduler.reserve("a")
        worker.sock.shutdown(socket.SHUT_RD)
        worker.raw(framing.encode(Ping(seq=1)) * 10)
        time.sleep(0.3)  # longer than lost_engine_grace_s
        status = daemon.status()
        assert (status["reservations"], status["sessions"]) == (1, 3)
    daemon.wait_until(reservations=0, instances=0, quarantined_bytes=0)


def test_faulty_session_that_owes_commits_is_half_closed(daemon: Daemon) -> None:
    with engine(daemon.socket) as (scheduler, worker):
        granted = scheduler.reserve("a")
        scheduler.channel.send(
            HandedOver(boot=granted.boot, reservations=(granted.grants[0].reservation,))
        )
        scheduler.ask(Ping(), Pong)
        worker.raw(b"\0\0\0\0")
        error = worker.rest()[-1]  # watermarks may come before it
        assert isinstance(error, Error)
        commit = Commit(boot=granted.boot, reservation=granted.grants[0].reservation)
        worker.raw(framing.encode(commit))  # dropped: its stream is not trusted any more
        time.sleep(0.3)  # longer than lost_engine_grace_s: it is EOF that counts
        status = daemon.status()
        assert status["sessions"] == 3
        assert status["reservations"] or status["quarantined_bytes"]
        worker.close()
        status = daemon.wait_until(sessions=2, reservations=0, quarantined_bytes=0)
        assert status["rows"] == 0


def hold_everything(path: str) -> None:
    """Take leases and a reservation, and stop."""
    with engine(path) as (scheduler, worker):
        granted = scheduler.reserve("ab")
        worker.channel.send(Commit(boot=granted.boot, reservation=granted.grants[0].reservation))
        worker.ask(Ping(), Pong)
        assert scheduler.lookup("a").lease
        assert scheduler.lookup("ab").lease
        scheduler.reserve("cd")
        os.kill(os.getpid(), signal.SIGSTOP)


def start_holding(daemon: Daemon) -> int:
    """A process that holds leases and a reservation; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            hold_everything(daemon.socket)
        finally:
            os._exit(1)
    os.waitpid(pid, os.WUNTRACED)
    status = daemon.status()
    assert (status["leases"], status["reservations"]) == (2, 1)
    return pid


BLIND = (
    "-c",
    "from kvass.cli.main import main; import kvass.daemon.loop as loop, sys;"
    "loop.process_behind = lambda sock, pid: None; sys.exit(main())",
)
"""A daemon on a kernel without pidfds."""


def test_debts_of_a_killed_process_are_settled_at_its_end(tmp_path: Path) -> None:
    """Not by the clock: the grace is far longer than the test. A daemon that cannot see the end
    has nothing else to go by."""
    (tmp_path / "blind").mkdir()
    with (
        running_daemon(tmp_path / "blind", "4MiB", BLIND, lost_engine_grace_s=3600) as blind,
        running_daemon(tmp_path, "4MiB", lost_engine_grace_s=3600) as daemon,
    ):
        for pid in [start_holding(blind), start_holding(daemon)]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        daemon.wait_until(leases=0, reservations=0, pins=0, quarantined_bytes=0)
        held = blind.wait_until(leases=0, pins=0, instances=0)
        assert held["reservations"] == 1
        assert held["quarantined_bytes"] > 0


@pytest.mark.parametrize("how", ["EOF", "exit"])
def test_a_process_that_lives_on_is_told_from_one_that_exits(how: str) -> None:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.dup2(theirs.fileno(), 3)
        os.closerange(4, 1024)
        if how == "EOF":
            os.close(3)
            signal.pause()
        os._exit(0)
    theirs.close()
    process = PeerProcess(os.pidfd_open(pid), pid)
    try:
        with ours:
            assert ours.recv(1) == b""
        assert process.exiting == (how == "exit")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert process.exiting
    process.close()


def test_the_process_behind_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        with listener.accept()[0] as sock:
            for pid in [os.getpid(), 0]:  # 0: of another PID namespace
                if (process := process_behind(sock, pid)) is not None:  # Linux 6.5
                    assert not process.exiting
                    process.close()
            monkeypatch.setattr(peer_process, "_SO_PEERPIDFD", 9999)  # an older kernel
            process = process_behind(sock, os.getpid())
            assert process is not None
            assert not process.exiting
            process.close()
            assert process_behind(sock, 0) is None
            monkeypatch.setattr(os, "pidfd_open", lambda pid: os.close(-1))  # and an even older one
            assert process_behind(sock, os.getpid()) is None


def test_nobody_waits_for_a_dead_engines_slots(tmp_path: Path) -> None:
    """Neither who stores the same, under the same name too, nor a clear, nor the daemon's end."""
    with running_daemon(tmp_path, lost_engine_grace_s=3600) as daemon:
        with engine(daemon.socket) as (scheduler, worker):
            granted = scheduler.reserve("ab")
            ids = (granted.grants[0].reservation,)
            scheduler.channel.send(HandedOver(boot=granted.boot, reservations=ids))
            scheduler.ask(Ping(), Pong)
        held = daemon.wait_until(instances=0)["quarantined_bytes"]
        assert held > 0
        with engine(daemon.socket) as (scheduler, worker):
            (grant,) = scheduler.reserve("ab").grants
            assert grant.chunks == (0, 1)
            worker.channel.send(Commit(boot=granted.boot, reservation=grant.reservation))
            worker.ask(Ping(), Pong)
            assert scheduler.lookup("ab").chunks == 2
            assert scheduler.ask(Clear(), Cleared).rows == 2
        daemon.wait_until(quarantined_bytes=held, reservations=1)
        assert daemon.stop() == 0


HASTY = (
    "-c",
    "from kvass.cli.main import main; import kvass.daemon.main as daemon, sys\n"
    "from msgspec.structs import replace\n"
    "make = daemon.core_config\n"
    "def hasty(*args):\n"
    "    core = make(*args)\n"
    "    return replace(core, timing=replace(core.timing, hello_s=2.0))\n"
    "daemon.core_config = hasty; sys.exit(main())",
)
"""A daemon that waits for a Hello for two seconds only."""


def test_more_connections_than_places_that_say_nothing(tmp_path: Path) -> None:
    """The daemon can be asked how it is, serves an engine, and ends them by and by."""
    most = Limits().sessions + 100
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        with (
            running_daemon(tmp_path, "4MiB", HASTY) as daemon,
            contextlib.ExitStack() as stack,
        ):
            silent = [stack.enter_context(RawSession(daemon.socket)) for _ in range(most)]
            assert daemon.status()["rows"] == 0
            with engine(daemon.socket) as (scheduler, _):
                assert scheduler.reserve("a").grants[0].chunks == (0,)
                for peer in silent:
                    (error,) = peer.rest()
                    assert isinstance(error, Error)
                    assert (error.code, error.fatal) == ("limit", True)
                scheduler.ask(Ping(), Pong)
                assert daemon.status()["sessions"] == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("pings", [2000, 4000])
def test_what_follows_the_message_that_ended_a_session_is_not_looked_at(
    shared: Daemon, bystander: RawSession, pings: int
) -> None:
    """It takes longer than one turn."""
    with RawSession(shared.socket) as peer:
        peer.raw(b"".join(framing.encode(Ping(seq=n + 1)) for n in range(pings)))
        assert [type(each) for each in peer.rest()] == [Error]


def test_a_session_that_asks_much_at_once_does_not_hold_up_the_others(shared: Daemon) -> None:
    """Between the messages that one read brought, other sessions have their turn."""
    many = 1500
    for _ in range(20):
        with RawSession(shared.socket).greet() as busy, RawSession(shared.socket).greet() as other:
            before = other.ask(Status(), StatusReply).fields["messages"].get("explain", 0)
            busy.raw(b"".join(framing.encode(Explain(seq=n + 1)) for n in range(many)))
            handled = other.ask(Status(), StatusReply).fields["messages"].get("explain", 0) - before
            assert [busy.next().seq for _ in range(many)] == [*range(1, many + 1)]
        if 0 < handled < many:  # else the daemon saw the other session first, or too late
            break
    assert 0 < handled < many
