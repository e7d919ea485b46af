"""Round trips without bytes: lookups of long prompts, their releases, pings."""

from __future__ import annotations

import os
import select
import time
from random import Random
from typing import Any, Final, TypeVar

import numpy as np

from kvass.cli.bench.copies import PATIENCE_S, WIDTH, seconds, wait_for
from kvass.client.client import Client
from kvass.errors import ConfigError, Unavailable
from kvass.messages import (
    Commit,
    FromDaemon,
    Granted,
    Hello,
    Lookup,
    Matched,
    Ping,
    Pong,
    Register,
    Release,
    Request,
    Reserve,
    ReserveItem,
    Welcome,
)
from kvass.types import GroupLayout, RankLayout
from kvass.wire.channel import Channel

CHUNK_TOKENS: Final = 256
LAYOUT: Final = GroupLayout("full", 16, ("0",), (256,))
"""16 blocks of 256 bytes in a chunk: rows of 4 KiB."""
RESIDENT: Final = 65_536
KEYS: Final = 512
BATCH: Final = 4096
ASKS: Final = 2000
WARM_UP: Final = 100
PING_S: Final = 1.0

Reply = TypeVar("Reply", bound=FromDaemon)


def measure_index(socket: str, resident: int = RESIDENT) -> dict[str, Any]:
    """``lookup_128k_us`` and ``release_128k_us``. Raises ``KvassError``."""
    name = f"bench-{os.getpid()}-{os.urandom(4).hex()}"
    identity = {"weights": name}
    worker = Register(
        instance=name,
        identity=identity,
        chunk_tokens=CHUNK_TOKENS,
        rank=0,
        layout=RankLayout((LAYOUT,)),
    )
    scheduler = Register(instance=name, identity=identity, chunk_tokens=CHUNK_TOKENS, rank=-1)
    with Client(socket, worker) as commits, Client(socket, scheduler) as asks:
        commits.connect(PATIENCE_S)
        keys = _fill(asks, commits, resident)
        try:
            lookups, releases = _ask(asks, keys)
        finally:
            asks.clear(timeout_s=PATIENCE_S)
    return {"lookup_128k_us": _percentiles(lookups), "release_128k_us": _percentiles(releases)}


def measure_pings(socket: str, clients: int) -> float:
    """Round trips a second by ``clients`` sessions that each wait for their own answer."""
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


def _fill(asks: Client, commits: Client, resident: int) -> list[bytes]:
    """Make ``resident`` rows resident; their keys. No bytes are written: nobody reads them."""
    keys = [os.urandom(WIDTH) for _ in range(resident)]
    for at in range(0, resident, BATCH):
        item = ReserveItem(request="fill", digests=b"".join(keys[at : at + BATCH]))
        granted = _call(asks, Reserve(items=[item], width=WIDTH), Granted)
        got = len(granted.grants[0].chunks)
        if got != BATCH:
            raise ConfigError(f"granted {got} of {BATCH} rows of 4KiB: give the daemon more L1")
        commits.post(Commit(boot=granted.boot, reservation=granted.grants[0].reservation))
        _call(commits, Ping(), Pong)
    wait_for(lambda: asks.status()["rows"] >= resident, f"{resident} rows")
    return keys


def _ask(client: Client, keys: list[bytes]) -> tuple[list[float], list[float]]:
    """Seconds of each lookup, and of each release with the ping behind it."""
    random, lookups, releases = Random(0), [], []
    for _ in range(WARM_UP + ASKS):
        lookup = Lookup(request="long", digests=b"".join(random.sample(keys, KEYS)), width=WIDTH)
        began_s = time.perf_counter()
        matched = _call(client, lookup, Matched)
        lookups.append(time.perf_counter() - began_s)
        if matched.chunks != KEYS:
            raise Unavailable(f"found {matched.chunks} of {KEYS} resident rows; is it in use?")

        def give_back(given: Matched = matched) -> None:
            client.post(Release(boot=given.boot, lease=given.lease))
            _call(client, Ping(), Pong)

        releases.append(seconds(give_back))
    return lookups[WARM_UP:], releases[WARM_UP:]


def _percentiles(times: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99]) * 1e6
    return {"p50": float(p50), "p99": float(p99)}


def _call(client: Client, message: Request, expected: type[Reply]) -> Reply:
    reply = client.call(message, PATIENCE_S)
    assert isinstance(reply, expected), reply
    return reply


def _greeted(socket: str) -> Channel:
    """A session that only looks."""
    channel = Channel.connect(socket, PATIENCE_S)
    channel.send(Hello(seq=1, client="kvass bench", clock_s=time.monotonic()))
    (reply,) = channel.receive(PATIENCE_S)
    assert isinstance(reply, Welcome), reply
    return channel
