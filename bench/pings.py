"""Times of empty round trips: of the loop, the framing and the sockets alone."""

from __future__ import annotations

import select
import time
from typing import Final

from kvass.cli.bench.rig import PATIENCE_S
from kvass.messages import Hello, Ping, Welcome
from kvass.wire.channel import Channel

PING_S: Final = 1.0


def measure_pings(socket: str, clients: int) -> float:
    """Round trips a second by ``clients`` connections that each wait for their own answer."""
    channels = [_greeted(socket) for _ in range(clients)]
    poll = select.poll()
    by_fd = {channel.fileno(): channel for channel in channels}
    for channel in channels:
        poll.register(channel, select.POLLIN)
        channel.send(Ping(seq=2))
    answers, began_s = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_s) < PING_S:
        for fd, _ in poll.poll(PATIENCE_S * 1000):
            for _ in by_fd[fd].receive(0):
                answers += 1
                by_fd[fd].send(Ping(seq=2))
    for channel in channels:
        channel.close()
    return answers / elapsed_s


def _greeted(socket: str) -> Channel:
    """A connection that registers nothing."""
    channel = Channel.connect(socket, PATIENCE_S)
    channel.send(Hello(seq=1, client="kvass bench", clock_s=time.monotonic()))
    (reply,) = channel.receive(PATIENCE_S)
    assert isinstance(reply, Welcome), reply
    return channel
