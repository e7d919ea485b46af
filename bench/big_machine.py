"""``python -m bench.big_machine``: what a request costs the thread that owns the cache.

Eight engines of eight ranks each look up and store prompts of 64k tokens (256 chunks, rows of eight
shards). The rows are small, because their size costs this thread nothing. What is counted is the
processor time of the daemon, all of it, so what other processes do meanwhile hardly matters; it has
no tier here. ``Populated`` is over before.

- ``ping``: an empty round trip. Those that show when all messages were read are taken off the rest.
- ``hit``: a lookup of 256 chunks that are there, a release by each rank.
- ``store``: a reserve of 256 chunks, all of it in one step, and a commit by each rank.
- ``prefill``: the same stored in steps of 8,192 tokens, as an engine computes them.
- ``requests_s``: how many of each one thread serves in a second: 1 / the time of one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Final

from kvass import messages
from kvass.cli.bench.rig import PATIENCE_S, WIDTH, EngineConnections, start_daemon
from kvass.client.client import Client
from kvass.types import GroupLayout

ENGINES: Final = 8
RANKS: Final = 8
CHUNKS: Final = 256
STEP_CHUNKS: Final = 32
_L1_BYTES: Final = 1 << 30
_GROUP: Final = GroupLayout("full", 16, ("0",), (256,))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.big_machine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with start_daemon(_L1_BYTES) as daemon, ExitStack() as ending:
        engines = [
            EngineConnections(daemon.socket, [_GROUP], ending, tp=RANKS) for _ in range(ENGINES)
        ]
        with Client(daemon.socket) as client:
            pid = int(client.status(PATIENCE_S)["pid"])
        print(json.dumps(measure(engines, pid, rounds), indent=2))


def measure(engines: list[EngineConnections], pid: int, rounds: int) -> dict[str, float]:
    """Processor time of one request, in ms, and how many fit into a second."""
    stored = [os.urandom(WIDTH * CHUNKS) for _ in engines]

    def store(engine: EngineConnections, digests: bytes, step: int = CHUNKS) -> None:
        for end in range(step, CHUNKS + 1, step):
            engine.commit(engine.reserve(digests[: end * WIDTH], end - step))

    def hit(engine: EngineConnections, digests: bytes) -> None:
        engine.release(engine.look_up(digests))

    for engine, digests in zip(engines, stored, strict=True):
        store(engine, digests)

    def ping(engine: EngineConnections, _: bytes) -> None:
        for worker in engine.workers:
            worker.call(messages.Ping(), PATIENCE_S)

    def every(work: Callable[[EngineConnections, bytes], None], fresh: bool) -> float:
        """Seconds of the daemon for one request, of one round of all engines."""
        keys = [os.urandom(WIDTH * CHUNKS) for _ in engines] if fresh else stored
        before = _used_s(pid)
        for engine, digests in zip(engines, keys, strict=True):
            work(engine, digests)
        return (_used_s(pid) - before) / len(engines)

    def in_steps(engine: EngineConnections, digests: bytes) -> None:
        store(engine, digests, STEP_CHUNKS)

    pings = median(every(ping, fresh=False) for _ in range(rounds))
    hits = median(every(hit, fresh=False) for _ in range(rounds)) - pings
    stores = median(every(store, fresh=True) for _ in range(rounds)) - pings
    steps = median(every(in_steps, fresh=True) for _ in range(rounds))
    steps -= pings * CHUNKS / STEP_CHUNKS
    return {
        "ping_ms": 1000 * pings / RANKS,
        "hit_ms": 1000 * hits,
        "store_ms": 1000 * stores,
        "prefill_ms": 1000 * steps,
        "hit_requests_s": 1 / hits,
        "prefill_requests_s": 1 / steps,
        "hit_and_store_requests_s": 1 / (hits + stores),
    }


def _used_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3)


if __name__ == "__main__":
    main()
