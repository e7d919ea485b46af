"""A client's end of the socket: bounded waits, buffered sends, descriptors, credentials."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvass.errors import ConfigError, Unavailable, UsageError
from kvass.messages import FromClient, Lookup, Ping, Pong, Welcome
from kvass.wire import framing
from kvass.wire.channel import Channel, peer_of


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    channel = Channel(near)
    yield channel, far
    channel.close()
    far.close()


def test_round_trip(pair: tuple[Channel, socket.socket]) -> None:
    channel, far = pair
    channel.send(Ping(seq=3))
    assert list(framing.from_clients().feed(far.recv(1000))) == [Ping(seq=3)]
    far.sendall(framing.encode(Pong(seq=3)) + framing.encode(Pong(seq=4)))
    assert channel.receive(5) == [Pong(seq=3), Pong(seq=4)]


def test_receive_returns_empty_handed_in_time(pair: tuple[Channel, socket.socket]) -> None:
    channel, far = pair
    assert channel.receive(0) == []
    far.send(framing.encode(Pong())[:3])  # a piece of a frame is no message
    began = time.monotonic()
    assert channel.receive(0.05) == []
    assert 0.04 < time.monotonic() - began < 5


def test_descriptor_rides_on_its_frame(pair: tuple[Channel, socket.socket], tmp_path: Path) -> None:
    channel, far = pair
    with (tmp_path / "arena").open("wb+") as file:
        file.write(b"hello")
        file.flush()
        frame = framing.encode(Welcome(seq=1))
        assert socket.send_fds(far, [frame], [file.fileno()]) == len(frame)
    assert channel.receive(5) == [Welcome(seq=1)]
    fd = channel.take_fd()
    assert fd is not None
    assert os.pread(fd, 10, 0) == b"hello"
    assert not os.get_inheritable(fd)
    os.close(fd)
    assert channel.take_fd() is None


def test_sending_to_a_daemon_that_does_not_read_is_bounded(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, far = pair
    big = Lookup(request="r", digests=bytes(3 << 20))
    for _ in range(5):
        channel.send(big)
    with pytest.raises(Unavailable, match="has not read"):
        channel.send(big)
    decoder = framing.from_clients()
    got: list[FromClient] = []
    while len(got) < 5:  # what was accepted arrives whole once the daemon reads
        channel.flush()
        got += decoder.feed(far.recv(1 << 20))
    assert got == [big] * 5
    assert not channel.wants_write


def test_end_of_stream_and_broken_pipe_are_unavailable(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, far = pair
    far.sendall(framing.encode(Pong(seq=1)))
    far.close()
    assert channel.receive(5) == [Pong(seq=1)]
    with pytest.raises(Unavailable, match="closed"):
        channel.receive(5)
    with pytest.raises(Unavailable, match="gone"):
        channel.send(Ping())


def test_message_above_the_limit_is_the_callers_mistake(
    pair: tuple[Channel, socket.socket],
) -> None:
    channel, _ = pair
    channel.decoder.limit = 1000
    with pytest.raises(UsageError, match="at most 1000"):
        channel.send(Lookup(request="r", digests=bytes(1000)))
    assert not channel.wants_write


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        Channel.connect(str(tmp_path / "none"), 0.1)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(tmp_path / "dead"))
    dead.close()
    with pytest.raises(Unavailable, match="refused"):
        Channel.connect(str(tmp_path / "dead"), 0.1)
    for path in ("x" * 108, "", "\0abstract"):
        with pytest.raises(ConfigError, match="107 bytes"):
            Channel.connect(path, 0.1)


def test_full_backlog_waits_no_longer_than_asked(tmp_path: Path) -> None:
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(path)
        busy.listen(0)
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(path)
            began = time.monotonic()
            with pytest.raises(Unavailable):
                Channel.connect(path, 0.05)
            assert time.monotonic() - began < 5


def test_peer_is_who_the_kernel_says(pair: tuple[Channel, socket.socket]) -> None:
    peer = peer_of(pair[1])
    assert (peer.pid, peer.uid) == (os.getpid(), os.geteuid())
    assert os.getegid() in peer.groups
