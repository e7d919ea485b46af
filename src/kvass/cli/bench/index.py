"""Round trips: lookups of long prompts, their releases, pings.

Rows are one page per shard, and each page holds a number of its own, to see that what a lookup
finds is where its ranks wrote it.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any, Final, TypeVar

import numpy as np

from kvass.cli.bench.copies import PATIENCE_S, WIDTH, seconds
from kvass.client.client import Client
from kvass.client.parallel import ParallelStrategy
from kvass.core.coverage import longest_hit
from kvass.errors import ConfigError, Unavailable
from kvass.messages import (
    Commit,
    FromDaemon,
    Granted,
    Hello,
    Lookup,
    Matched,
    OneWay,
    Ping,
    Pong,
    Release,
    Request,
    Reserve,
    ReserveItem,
    Welcome,
)
from kvass.types import PAGE, GroupLayout, I64Array, RankLayout, Slots, U64Array
from kvass.wire.channel import Channel

CHUNK_TOKENS: Final = 256
LAYOUT: Final = GroupLayout("full", 16, ("0",), (256,))
"""16 blocks of 256 bytes in a chunk: shards of 4 KiB."""
RESIDENT: Final = 65_536
KEYS: Final = 512
BATCH: Final = 1024
ASKS: Final = 2000
WARM_UP: Final = 100
LOOK_EVERY: Final = 16
"""Looking at what was found drags it through the caches; so not every time."""
PING_S: Final = 1.0

Reply = TypeVar("Reply", bound=FromDaemon)


def measure_index(socket: str, resident: int = RESIDENT, tp: int = 1) -> dict[str, Any]:
    """``lookup_128k_us`` and ``release_128k_us`` (``..._128k_tp8_us`` for 8 ranks), and whether
    everything found held what was stored: ``bytes_equal``. Raises ``KvassError``."""
    with ExitStack() as ending:
        engine = Ranks(socket, ParallelStrategy(tp=tp), ending)
        ending.callback(engine.scheduler.clear, timeout_s=PATIENCE_S)
        keys = engine.fill(resident)
        lookups, releases, same = engine.ask(keys)
    name = "128k" if tp == 1 else f"128k_tp{tp}"
    return {
        "bytes_equal": same,
        f"lookup_{name}_us": _percentiles(lookups),
        f"release_{name}_us": _percentiles(releases),
    }


class Ranks:
    """A scheduler and its worker ranks, each with a session of its own; the first maps the arena
    for all of them. ``ending`` closes them."""

    def __init__(self, socket: str, strategy: ParallelStrategy, ending: ExitStack) -> None:
        name = f"bench-{os.getpid()}-{os.urandom(4).hex()}"
        terms, layout = (name, {"weights": name}, CHUNK_TOKENS), RankLayout((LAYOUT,))
        self.strategy = strategy
        self.workers = [
            Client(socket, strategy.at(rank).register(*terms, layout), wants_arena=rank == 0)
            for rank in strategy.readers
        ]
        self.scheduler = Client(socket, strategy.register(*terms))
        for client in (*self.workers, self.scheduler):
            ending.enter_context(client).connect(PATIENCE_S)
        session = self.workers[0].session
        if session is None or session.arena is None:
            raise Unavailable("the daemon went away")
        self.arena: U64Array = session.arena.buffer.view(np.uint64)
        ending.callback(delattr, self, "arena")

    def fill(self, resident: int) -> list[bytes]:
        """Make ``resident`` rows resident; their keys, of which the first words are the bytes."""
        keys = [os.urandom(WIDTH) for _ in range(resident)]
        for at in range(0, resident, BATCH):
            digests = b"".join(keys[at : at + BATCH])
            item = ReserveItem(request="fill", digests=digests)
            granted = _call(self.scheduler, Reserve(items=[item], width=WIDTH), Granted)
            grant = granted.grants[0]
            if len(grant.chunks) != len(digests) // WIDTH:
                raise ConfigError(
                    f"granted {len(grant.chunks)} of {BATCH} rows of {self.strategy.world_size} "
                    "shards of 4KiB: give the daemon more L1"
                )
            for rank, where in enumerate(self._pages(grant.slots[0])):
                self.arena[where] = _numbers(digests) + np.uint64(rank)
            self.tell(partial(Commit, boot=granted.boot, reservation=grant.reservation))
        return keys

    def ask(self, keys: list[bytes]) -> tuple[list[float], list[float], bool]:
        """Seconds of each lookup, and of the releases of all ranks with a ping behind each; and
        whether every shard looked at held what its rank wrote."""
        random, lookups, releases, same = Random(0), [], [], True
        for number in range(WARM_UP + ASKS):
            digests = b"".join(random.sample(keys, KEYS))
            began_s = time.perf_counter()
            matched = self.look_up(digests)
            lookups.append(time.perf_counter() - began_s)
            if number % LOOK_EVERY == 0:
                same = same and self.holds(matched.slots[0], digests)
            release = partial(Release, boot=matched.boot, lease=matched.lease)
            releases.append(seconds(partial(self.tell, release)))
        return lookups[WARM_UP:], releases[WARM_UP:], same

    def look_up(self, digests: bytes) -> Matched:
        """A lease of all ranks on these rows. Raises if not everything hits."""
        readers, keys = self.strategy.readers, len(digests) // WIDTH
        lookup = Lookup(request="long", digests=digests, width=WIDTH, readers=readers)
        matched = _call(self.scheduler, lookup, Matched)
        if matched.chunks != keys:
            raise Unavailable(f"found {matched.chunks} of {keys} resident rows; is it in use?")
        return matched

    def holds(self, slots: Slots, digests: bytes) -> bool:
        """Whether every shard of these rows holds what its rank wrote for ``digests``."""
        return all(
            np.array_equal(self.arena[where], _numbers(digests) + np.uint64(rank))
            for rank, where in enumerate(self._pages(slots))
        )

    def tell(self, settle: Callable[..., OneWay]) -> None:
        """Every rank settles; returns once the daemon has carried all of it out."""
        pings = []
        for rank, worker in enumerate(self.workers):
            worker.post(settle(rank=rank))
            pings.append(worker.submit(Ping()))
        for worker, seq in zip(self.workers, pings, strict=True):
            pong = worker.wait(seq, PATIENCE_S)
            assert isinstance(pong, Pong), pong

    def _pages(self, slots: Slots) -> list[I64Array]:
        """Per shard, which word of the arena begins each row's page."""
        return [slots.offsets(shard, PAGE) // 8 for shard in range(self.strategy.world_size)]


def measure_coverage() -> dict[str, float]:
    """``coverage_3x512_us``: the daemon's arithmetic alone, in this process."""
    groups = [
        GroupLayout("full", 16, ("0",), (256,)),
        GroupLayout("sliding_window", 16, ("1",), (256,), 1024),
        GroupLayout("state", CHUNK_TOKENS, ("2",), (256,)),
    ]
    there = [np.ones(KEYS, np.bool_) for _ in groups]
    there[2][1::2] = False  # a state at every second chunk, so that the last one is no hit
    once = partial(longest_hit, groups, there, CHUNK_TOKENS, 0)
    return _percentiles([seconds(once) for _ in range(WARM_UP + ASKS)][WARM_UP:])


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


def _numbers(digests: bytes) -> U64Array:
    """The first word of each digest."""
    return np.frombuffer(digests, "<u8").reshape(-1, WIDTH // 8)[:, 0]


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
