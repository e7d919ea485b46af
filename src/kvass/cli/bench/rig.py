"""What all measurements need: a daemon, connections of an engine, memory, clocks, printing."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np

from kvass import messages
from kvass.arena import memory
from kvass.client.client import Client
from kvass.client.parallel import ParallelStrategy
from kvass.errors import ConfigError, Unavailable
from kvass.transfer.base import U8Array
from kvass.types import GroupLayout, RankLayout, Size

POPULATE_TIMEOUT_S: Final = 120.0
PATIENCE_S: Final = 30.0
CHUNK_TOKENS: Final = 256
WIDTH: Final = 32
"""Bytes of a chunk's key."""
MODEL: Final = "kvass bench"
"""The model of bench's engines in ``kvass status``."""


# ---------------------------------------------------------------- figures


def say(what: str) -> None:
    print(f"measuring {what} ...", file=sys.stderr, flush=True)


def seconds(step: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The speed of ``ours`` divided by that of ``theirs``: the median of the rounds' ratios."""
    return median(b / a for a, b in zip(ours, theirs, strict=True))


def best_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The ratio of the fastest rounds. Other work of the machine can only make a round slower. On
    two cores with a load of 13 this ratio differed by 8 % from run to run, and ``ratio`` by 23
    %."""
    return min(theirs) / min(ours)


def percentiles_us(times: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(times) * 1e6, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def table(figures: dict[str, Any]) -> str:
    flat: dict[str, Any] = {}
    for name, value in figures.items():
        parts = value if isinstance(value, dict) else {"": value}
        flat |= {f"{name} {part}".rstrip(): figure for part, figure in parts.items()}
    width = max(map(len, flat))
    return "\n".join(f"{name:<{width}}  {_shown(value):>12}" for name, value in flat.items())


def _shown(value: bool | str | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)


# ---------------------------------------------------------------- a daemon


class MeasuredDaemon(NamedTuple):
    """A running daemon. ``ready_s``: the time from its start to its ready line."""

    socket: str
    ready_s: float


@contextmanager
def start_daemon(l1_bytes: int, *flags: str) -> Iterator[MeasuredDaemon]:
    """A new daemon whose whole arena is populated. It is ended afterwards. Raises ``ConfigError``
    if it does not start."""
    try:
        made = tempfile.TemporaryDirectory(prefix="kvass-bench-")
    except OSError as error:
        do = "set TMPDIR to a folder of yours, or measure a daemon with --socket"
        raise ConfigError(f"{error.strerror}: {do}") from error
    with made as folder:
        path = os.path.join(folder, "kvass.sock")
        command = [sys.executable, "-m", "kvass", "serve", "--socket", path]
        began_s = time.monotonic()
        with subprocess.Popen(
            [*command, "--l1-size", str(l1_bytes), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("KVASS_")},
        ) as process:
            try:
                _await_ready(process)
                ready_s = time.monotonic() - began_s
                with Client(path) as client:
                    wait_for(partial(_populated, client), "the arena", POPULATE_TIMEOUT_S)
                yield MeasuredDaemon(path, ready_s)
            finally:
                process.terminate()


def _await_ready(process: subprocess.Popen[str]) -> None:
    line = ""
    for line in process.stdout or ():
        if line.startswith("ready "):
            return
    raise ConfigError(f"the daemon did not start: {line.strip().removeprefix('kvass: ')}")


def _populated(client: Client) -> bool:
    status = client.status(PATIENCE_S)
    return bool(status["l1_populated_bytes"] >= status["l1_capacity_bytes"])


def wait_for(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Call ``condition`` until it returns True. Raises ``Unavailable`` after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise Unavailable(f"waited {patience_s:.0f} s in vain for {what}")
        time.sleep(0.002)


# ---------------------------------------------------------------- memory


def private_memory(size: int) -> U8Array:
    """Anonymous memory at a page boundary, faulted in. At other addresses a large memcpy has a
    third of its speed on some CPUs, so our ratios would be too good."""
    private = np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    private[:] = 1
    return private


def shared_memory(size: int) -> memory.Arena:
    """Memory of the arena's kind, faulted in."""
    arena = memory.create(size)
    arena.advise_huge()
    arena.populate(0, size)
    return arena


# ---------------------------------------------------------------- an engine's connections


def fresh_name() -> str:
    """A new name for an instance and its weights, so that no other engine has the namespace."""
    return f"bench-{os.getpid()}-{os.urandom(4).hex()}"


class EngineConnections:
    """The connections of an engine, without the engine: one for the scheduler and one for each of
    ``tp`` ranks. Rank 0 maps the arena for all of them.

    ``ending`` closes them. ``name``: the name of the namespace; by default a new one. ``instance``:
    the name of the engine; by default ``name``. ``private``: others use the daemon, so no tier
    stores any of its rows, and the daemon's hit rate does not count them. Raises ``KvassError``.
    """

    def __init__(
        self,
        socket: str,
        groups: Sequence[GroupLayout],
        ending: ExitStack,
        *,
        tp: int = 1,
        name: str = "",
        instance: str = "",
        chunk_tokens: int = CHUNK_TOKENS,
        private: bool = False,
        populate: bool = True,
        daemon_uid: int | None = None,
    ) -> None:
        name = name or fresh_name()
        self.row_bytes = tp * sum(group.shard_bytes(chunk_tokens) for group in groups)
        self._mask = (1 << len(groups)) - 1
        self._readers = tuple(range(tp))
        strategy = ParallelStrategy(tp=tp)
        instance, identity = instance or name, {"weights": name}
        layout = RankLayout(tuple(groups))
        terms = [
            strategy.at(rank).register(instance, identity, chunk_tokens, layout, model=MODEL)
            for rank in self._readers
        ]
        registration = strategy.register(instance, identity, chunk_tokens, model=MODEL)
        for each in (registration, *terms):
            each.counted = not private
        registration.generation = os.urandom(16) if private else b""
        self.workers = [
            Client(socket, each, wants_arena=each.rank == 0, daemon_uid=daemon_uid)
            for each in terms
        ]
        self.scheduler = Client(socket, registration, daemon_uid=daemon_uid)
        for client in (*self.workers, self.scheduler):
            ending.enter_context(client).connect(PATIENCE_S)
        connection = self.workers[0].connection
        if connection is None or connection.arena is None:
            raise Unavailable("the daemon went away")
        if populate:  # map everything before anything is measured
            connection.arena.populate(0, connection.arena.size)
        self.arena: U8Array = connection.arena.buffer
        ending.callback(delattr, self, "arena")  # before the rest: a view keeps the mapping

    def reserve(self, digests: bytes, first: int = 0, session: int = 0) -> messages.Granted:
        """Reserve the chunks from ``first`` on. Raises ``ConfigError`` unless all are granted."""
        item = messages.ReserveItem(
            request="store", digests=digests, first=first, groups=self._mask, session=session
        )
        granted = self.scheduler.call(messages.Reserve(items=[item], width=WIDTH), PATIENCE_S)
        assert isinstance(granted, messages.Granted), granted
        wanted = len(digests) // WIDTH - first
        got = min(map(len, granted.grants[0].rows()), default=0)
        if got != wanted:
            raise ConfigError(
                f"granted {got} of {wanted} rows of {Size(self.row_bytes)}: give the daemon more "
                "--l1-size"
            )
        return granted

    def commit(self, granted: messages.Granted) -> None:
        """Every rank commits; the rows are READY on return."""
        number = granted.grants[0].reservation
        self._settle(partial(messages.Commit, boot=granted.boot, reservation=number))

    def ask(self, digests: bytes) -> messages.Matched:
        """One lookup that waits for the tiers. It may find only a part of the prompt."""
        lookup = messages.Lookup(
            request="load",
            digests=digests,
            width=WIDTH,
            readers=self._readers,
            budget_ms=PATIENCE_S * 1000,
        )
        matched = self.scheduler.call(lookup, PATIENCE_S + 1)
        assert isinstance(matched, messages.Matched), matched
        return matched

    def look_up(self, digests: bytes) -> messages.Matched:
        """A match with a lease of every rank on all these rows. Raises ``Unavailable`` unless all
        are found."""
        matched = self.ask(digests)
        if matched.chunks != (stored := len(digests) // WIDTH):
            self.release(matched)
            raise Unavailable(f"found {matched.chunks} of {stored} rows; is the daemon in use?")
        return matched

    def release(self, matched: messages.Matched) -> None:
        """Every rank releases, if it holds anything; the lease is gone on return."""
        if matched.lease:
            self._settle(partial(messages.Release, boot=matched.boot, lease=matched.lease))

    def clear(self) -> None:
        """Clear the namespace."""
        self.scheduler.clear(timeout_s=PATIENCE_S)

    def _settle(self, message: Callable[..., messages.OneWay]) -> None:
        """Every rank sends ``message`` and then a ping. Returns when all pings are answered."""
        pings = []
        for rank, worker in enumerate(self.workers):
            worker.post(message(rank=rank))
            pings.append(worker.submit(messages.Ping()))
        for worker, seq in zip(self.workers, pings, strict=True):
            worker.wait(seq, PATIENCE_S)
