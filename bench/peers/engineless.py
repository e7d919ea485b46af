"""The caches without an engine: each asked by a client in a process of its own, in turns."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from bench.footprint import sync
from bench.peers.driver import Driver
from bench.peers.results import Results, Row, attempt, in_turns
from bench.peers.servers import MALLOC, KvassServer, LMCacheServer, Server
from kvass.cli.bench.disk import RawFile
from kvass.cli.bench.rig import CHUNK_TOKENS, seconds, shared_memory, wait_for

SYSTEMS: Final = ("kvass", "lmcache")
TOKENS: Final = 2048
PROMPT_BYTES: Final = TOKENS * (128 << 10)
"""Llama-8B: 128 KiB a token."""
LOOKUPS: Final = (1024, 8192, 32_768, 131_072)
LARGE_L1_BYTES: Final = 1 << 30
"""A quarter of kvass's may be written at a time: one prompt. LMCache's evicts when four fifths are
full: three prompts fit."""
SMALL_L1_BYTES: Final = 1 << 30
THREADS: Final = 4
"""Of a disk tier, of either side."""
KILL_WAIT_S: Final = 40.0
HOLD_WAIT_S: Final = 20.0
TIDY_S: Final = 2.0
IDLE_S: Final = 10.0


class Plan(msgspec.Struct, frozen=True):
    """What a run measures with. ``python``: an interpreter with LMCache. ``folder``: for sockets
    and logs; ``disk``: for tiers. ``rounds`` for each figure."""

    python: str
    folder: Path
    disk: Path
    rounds: int

    def server(self, system: str, l1_bytes: int, disk: Path | None = None) -> Server:
        if system == "kvass":
            return KvassServer(self.folder, l1_bytes, disk)
        return LMCacheServer(self.folder, l1_bytes, disk, python=self.python)

    def driver(self, system: str) -> Driver:
        """LMCache's has the malloc settings; torch decides how many threads it copies with."""
        log = self.folder / f"{system}-client.log"
        return Driver(system, self.python, log, MALLOC | {"LMCACHE_DISABLE_BANNER": "1"})


class Side:
    """A server and a client of it."""

    def __init__(self, plan: Plan, system: str, ending: ExitStack, *, large: bool, l1: int) -> None:
        self._plan, self._system = plan, system
        self.server = plan.server(system, l1)
        ending.callback(self.server.close)
        self.ready_s = self.server.start()
        self.tokens = TOKENS if large else LOOKUPS[-1]
        self._large = large
        self.client = self.another(ending)

    def another(self, ending: ExitStack) -> Driver:
        """A further client."""
        client = self._plan.driver(self._system)
        ending.callback(client.close)
        client.call("connect", address=self.server.address, large=self._large, tokens=self.tokens)
        return client


@contextmanager
def sides(plan: Plan, *rows: Row, large: bool, l1: int) -> Iterator[dict[str, Side]]:
    """Both, as far as they start; why one did not is in the rows."""
    with ExitStack() as ending:
        found = {}
        for system in SYSTEMS:
            with attempt(system, *rows):
                found[system] = Side(plan, system, ending, large=large, l1=l1)
        yield found


def measure_copies(results: Results, plan: Plan) -> None:
    """Store and load of a prompt."""
    store = results.row("copies", "store", f"store {TOKENS:,} tokens, Llama-8B", "GB/s", more=True)
    load = results.row("copies", "load", "look up and load them", "GB/s", more=True)
    with sides(plan, store, load, large=True, l1=LARGE_L1_BYTES) as both:
        for number, system in in_turns(tuple(both), plan.rounds + 1, store, load):
            several = {"lmcache": os.cpu_count(), "lmcache_1": 1} if system != "kvass" else {}
            with attempt(system, store, load):
                for name, threads in (several or {system: 1}).items():
                    took = _copy(both[system].client, f"{name} {number}", threads)
                    if number:  # the first warms up
                        for row, gbps in zip((store, load), took, strict=False):
                            row.add(name, gbps)
                            if len(took) > 2:
                                row.add("memcpy", took[2])


def _copy(client: Driver, seed: str, threads: int | None) -> list[float]:
    """GB/s of a store, of its load, and, where the client measures that, of memcpy."""
    took = client.call("copy", seed=seed, tokens=TOKENS, threads=threads)
    if not took.pop("equal"):
        raise OSError("the bytes loaded differ from those stored")
    client.call("clear")
    return [PROMPT_BYTES / took_s / 1e9 for took_s in took.values()]


def measure_lookups(results: Results, plan: Plan) -> None:
    """From a prompt to its answer, and the release of what was found."""
    part = "lookups"
    hits = {
        n: results.row(part, f"hit_{n}", f"look up {n:,} tokens, all there", "ms") for n in LOOKUPS
    }
    misses = {
        n: results.row(part, f"miss_{n}", f"look up {n:,} tokens, none there", "ms")
        for n in LOOKUPS
    }
    last = LOOKUPS[-1]
    release = results.row(part, "release", f"release what {last:,} tokens found", "ms")
    rows = (*hits.values(), *misses.values(), release)
    with sides(plan, *rows, large=False, l1=SMALL_L1_BYTES) as both:
        for system, side in both.items():
            with attempt(system, *rows):
                for tokens in LOOKUPS:
                    side.client.call("store", seed=f"hit {tokens}", tokens=tokens)
        for number, system in in_turns(tuple(both), plan.rounds + 1, *rows):
            client = both[system].client
            asked = [("hit", *item) for item in hits.items()]
            for kind, tokens, one in [*asked, *(("miss", *item) for item in misses.items())]:
                with attempt(system, one):
                    took = client.call("look_up", seed=f"{kind} {tokens}", tokens=tokens, times=5)
                    if took["found"] != (tokens if kind == "hit" else 0):
                        raise OSError(f"found {took['found']:,} tokens of {tokens:,}")
                    if number:
                        one.add(system, 1e3 * sorted(took["lookup_s"])[2])
                        if one is hits[last]:
                            release.add(system, 1e3 * sorted(took["release_s"])[2])


def measure_requests(results: Results, plan: Plan) -> None:
    """Small requests, start, memory and idleness."""
    part = "requests"
    pings = {
        n: results.row(
            part, f"ping_{n}", f"empty requests, {n} client{'s' * (n > 1)}", "1/s", more=True
        )
        for n in (1, 16)
    }
    start = results.row(part, "start", "start, until it answers", "s")
    memory = results.row(part, "memory", "server's memory beside the cache", "MiB")
    idle = results.row(part, "idle", "idle server, one client: of a core", "%")
    threads = results.row(part, "threads", "server's threads", "")
    rows = (*pings.values(), start, memory, idle, threads)
    with sides(plan, *rows, large=False, l1=SMALL_L1_BYTES) as both:
        for _, system in in_turns(tuple(both), plan.rounds, *pings.values()):
            with attempt(system, *pings.values()):
                for clients, row in pings.items():
                    row.add(system, both[system].client.call("requests", clients=clients))
        for system, side in both.items():
            with attempt(system, start, memory, idle, threads):
                start.add(system, side.ready_s)
                memory.add(system, side.server.memory_mib())
                threads.add(system, side.server.threads())
                time.sleep(1.0)
                before = side.server.cpu_s()
                time.sleep(IDLE_S)
                idle.add(system, (side.server.cpu_s() - before) / IDLE_S * 100)
    for _, system in in_turns(SYSTEMS, max(2, plan.rounds // 3), start):
        with attempt(system, start):
            server = plan.server(system, SMALL_L1_BYTES)
            try:
                start.add(system, server.start())
            finally:
                server.close()


def measure_disk(results: Results, plan: Plan) -> None:
    """A disk tier: writing, and reading back by a server that was restarted."""
    part = "disk"
    size = f"{2 * PROMPT_BYTES >> 20} MiB"
    write = results.row(
        part, "disk_write", f"store {size} until the disk tier has written it", "GB/s", more=True
    )
    synced = results.row(
        part, "disk_sync", "store them until all of it is on the disk (fsync)", "GB/s", more=True
    )
    read = results.row(
        part, "disk_read", "after a restart, page cache cold: disk to memory", "GB/s", more=True
    )
    restart = results.row(part, "restart", "restart: stop, start, answer", "s")
    rows = (write, synced, read, restart)
    for number, system in in_turns((*SYSTEMS, "raw"), max(2, plan.rounds // 3), *rows):
        with attempt(system, *rows), ExitStack() as ending:
            if system == "raw":
                _measure_raw_disk(plan, ending, synced, read)
                continue
            disk = plan.disk / system
            disk.mkdir()
            ending.callback(shutil.rmtree, disk)
            server = plan.server(system, LARGE_L1_BYTES, disk)
            ending.callback(server.close)
            server.start()
            seeds = [f"disk {number} {i}" for i in range(2)]
            client = _connected(plan, system, server, ending)
            client.call("store", seed="warm", tokens=TOKENS)
            _wait_on_disk(server, PROMPT_BYTES)
            began_s = time.monotonic()
            for seed in seeds:
                client.call("store", seed=seed, tokens=TOKENS)
            _wait_on_disk(server, 3 * PROMPT_BYTES)
            write.add(system, 2 * PROMPT_BYTES / (time.monotonic() - began_s) / 1e9)
            sync(disk)
            synced.add(system, 2 * PROMPT_BYTES / (time.monotonic() - began_s) / 1e9)
            client.close()
            took_s = server.stop()
            sync(disk, drop=True)
            restart.add(system, took_s + server.start())
            client = _connected(plan, system, server, ending)
            for seed in seeds:
                took_s = client.call("promote", seed=seed, tokens=TOKENS)
                read.add(system, PROMPT_BYTES / took_s / 1e9)


def _measure_raw_disk(plan: Plan, ending: ExitStack, write: Row, read: Row) -> None:
    """A new file of records as large as Llama-8B's rows, with as many threads as the tiers have."""
    size = CHUNK_TOKENS * PROMPT_BYTES // TOKENS
    memory = shared_memory(PROMPT_BYTES)
    ending.callback(memory.close)
    records = [*memory.buffer.reshape(-1, size)]
    ending.callback(records.clear)
    raw = RawFile(plan.disk / "raw", size, len(records), THREADS)
    ending.callback(raw.close)
    write.add("raw", PROMPT_BYTES / seconds(partial(raw.put, records)) / 1e9)
    read.add("raw", PROMPT_BYTES / seconds(partial(raw.get, records)) / 1e9)


def measure_kills(results: Results, plan: Plan) -> None:
    """``kill -9`` of a client, and of the server."""
    part = "kills"
    held = results.row(part, "held", "a client that is killed: its locks are gone after", "s")
    answer = results.row(part, "answer", "the server is killed: a lookup is answered after", "s")
    left = results.row(part, "left", "memory that a killed server leaves in /dev/shm", "MiB")
    with sides(plan, held, answer, left, large=False, l1=SMALL_L1_BYTES) as both:
        for system, side in both.items():
            with ExitStack() as ending:
                with attempt(system, held):
                    _measure_held(held, system, side, ending)
                with attempt(system, left, answer):
                    side.server.kill()
                    took_s = side.client.call("ask", KILL_WAIT_S, seed="b", tokens=LOOKUPS[1])
                    answer.add(system, took_s)
                    time.sleep(TIDY_S)  # Python's resource tracker may still clean up
                    left.add(system, side.server.left_behind() / (1 << 20))


def _measure_held(held: Row, system: str, side: Side, ending: ExitStack) -> None:
    tokens, seed = LOOKUPS[0], "held"
    side.client.call("store", seed=seed, tokens=tokens)
    other = side.another(ending)
    if other.call("hold", seed=seed, tokens=tokens) != tokens:
        raise OSError("the lookup did not hit")
    other.kill()
    began_s = time.monotonic()
    while side.client.call("held", seed=seed, tokens=tokens):
        if time.monotonic() - began_s > HOLD_WAIT_S:
            raise OSError(f"not within {HOLD_WAIT_S:.0f} s")
        time.sleep(0.05)
    held.add(system, time.monotonic() - began_s)


def _connected(plan: Plan, system: str, server: Server, ending: ExitStack) -> Driver:
    client = plan.driver(system)
    ending.callback(client.close)
    client.call("connect", address=server.address, large=True, tokens=TOKENS)
    return client


def _wait_on_disk(server: Server, size: int) -> None:
    wait_for(lambda: server.on_disk(size), f"{size >> 20} MiB on disk", 120.0)


PARTS: Final[dict[str, Callable[[Results, Plan], None]]] = {
    "copies": measure_copies,
    "lookups": measure_lookups,
    "requests": measure_requests,
    "disk": measure_disk,
    "kills": measure_kills,
}
