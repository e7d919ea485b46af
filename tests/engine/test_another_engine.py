"""An engine that is not vLLM, on ``kvass.engine`` alone: the shortest connector there can be."""

from __future__ import annotations

import hashlib
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from kvass.client.parallel import ParallelStrategy
from kvass.engine.boundary import Boundary
from kvass.engine.copier import Copier
from kvass.engine.memory import KVMemory
from kvass.engine.planner import Planner
from kvass.engine.protocols import Adapter
from kvass.engine.rank_report import RankReport
from kvass.engine.setup import EngineSetup
from kvass.engine.step_work import StepWork
from kvass.layout.spans import Table
from kvass.messages import NO_CONTEXT, RequestContext
from kvass.testing.daemon import Daemon, running_daemon
from kvass.testing.pages import RankMemory, WrongPageError
from kvass.transfer.base import Job, Outcome
from kvass.types import GroupLayout, I64Array, RankLayout
from kvass.wire.channel import Channel

T = TypeVar("T")
CHUNK, BLOCK, BLOCKS = 16, 4, 256
"""Tokens of a chunk and of a block, and how many blocks an engine has."""
GROUP = GroupLayout("full", BLOCK, ("layer 0", "layer 1"), (256, 512))


@dataclass
class Prompt:
    """A request that generates nothing (``protocols.Request``)."""

    name: str
    tokens: Sequence[int]
    computed_tokens: int = 0
    reads_cache: bool = True
    trace: str = ""
    adapter: Adapter | None = None
    salt: str = ""
    ends_at_once: bool = True
    most_stored_tokens: int | None = None
    most_loaded_tokens: int | None = None
    context: RequestContext = NO_CONTEXT
    ends_session: bool = False
    waits_with_blocks: bool = False
    precedence: tuple[int, float] = (0, 0.0)

    def first_tokens(self, count: int) -> bytes:
        return struct.pack(f"{count}I", *self.tokens[:count]) if count <= len(self.tokens) else b""

    def token_ids(self, first: int, end: int) -> Sequence[int]:
        return self.tokens[first:end]

    @property
    def known_tokens(self) -> int:
        return len(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def hashed_chunks(self) -> int:
        return len(self.tokens) // CHUNK

    def chunk_hashes(self, first: int, end: int) -> list[bytes]:
        return [self._hash((chunk + 1) * CHUNK) for chunk in range(first, end)]

    @property
    def hashed_blocks(self) -> int:
        return len(self.tokens) // BLOCK

    def block_hashes(self, first: int, end: int) -> list[bytes]:
        return [self._hash((block + 1) * BLOCK) for block in range(first, end)]

    def _hash(self, tokens: int) -> bytes:
        return hashlib.sha256(struct.pack(f"{tokens}I", *self.tokens[:tokens])).digest()


class Blocks:
    """Blocks that are given out once (``protocols.BlockPool``). ``users``: by block id."""

    blocks = free_blocks = BLOCKS

    def __init__(self) -> None:
        self.users: Counter[int] = Counter()
        self._next = iter(range(1, BLOCKS))

    def take(self, tokens: int) -> list[int]:
        return [next(self._next) for _ in range(-(-tokens // BLOCK))]

    def hold(self, ids: Iterable[int]) -> list[int]:
        held = list(ids)
        self.users.update(held)
        return held

    def free(self, held: list[int]) -> None:
        self.users.subtract(held)

    def freed_by(self, held: Iterable[int]) -> int:
        return sum(self.users[block] == 1 for block in held)

    def caches(self, block: int, digest: bytes, group: int) -> bool:
        return False

    def has(self, digest: bytes, groups: list[int]) -> bool:
        return False

    def was_reset(self) -> bool:
        return False

    @property
    def empty(self) -> bool:
        return True


@dataclass
class OneRequest:
    """A step for ``tokens`` of one request, or for none (``protocols.Step``)."""

    name: str
    table: Table
    tokens: int

    @property
    def names(self) -> Set[str]:
        return {self.name} if self.tokens else frozenset()

    def requests(self) -> Iterable[tuple[str, int]]:
        return [(self.name, self.tokens)] if self.tokens else []

    def block_table(self, name: str) -> Table:
        return self.table

    @property
    def boundary_states(self) -> Mapping[str, Iterable[tuple[int, int, int]]]:
        return {}


class SmallEngine:
    """Computes a prompt in one step. What it computes is what ``RankMemory`` expects."""

    def __init__(self, daemon: Daemon, instance: str) -> None:
        setup = EngineSetup(
            socket=daemon.socket,
            instance=instance,
            identity={"engine": "small"},
            strategy=ParallelStrategy(),
            chunk_tokens=CHUNK,
            chunk_blocks=CHUNK // BLOCK,
            groups=(GROUP,),
            loads=True,
            stores=True,
        )
        layout = RankLayout((GROUP,))
        self.memory = RankMemory(layout, shard=0, chunk_tokens=CHUNK, blocks=BLOCKS)
        self.pool = Blocks()
        self.planner = Planner(setup, self.pool)
        self.copier = Copier(setup, 0, Boundary())
        self.copier.attach(KVMemory(layout, self.memory.planes, self.memory.regions, ()))
        self.failed: set[str] = set()
        setup.weights.set_result("weights")  # named: now both halves connect

    def run(self, prompt: Prompt) -> tuple[int, Callable[[], int]]:
        """How many tokens were loaded; what verifies the pages of all whole chunks."""
        self.planner.track(prompt)
        external = until(lambda: self.planner.match(prompt.name, 0), "an answer")
        table = (self.pool.take(len(prompt.tokens)),)
        self.planner.allocated(prompt.name, table, external)
        if external:
            waiting = OneRequest(prompt.name, table, 0)
            until(lambda: prompt.name in self._step(waiting) | self.failed, "the load")
            external = 0 if prompt.name in self.failed else external
            prompt.computed_tokens = external
        keys = prompt.chunk_hashes(0, prompt.hashed_chunks)
        rows: I64Array = np.array(table[0][: len(keys) * CHUNK // BLOCK]).reshape(len(keys), -1)
        loaded = external // CHUNK
        self.memory.compute(keys[loaded:], [rows[loaded:]])
        left = len(prompt.tokens) - external
        self._step(OneRequest(prompt.name, table, left))
        prompt.computed_tokens += left
        self.planner.forget(prompt.name)
        idle = OneRequest("", (), 0)
        until(lambda: self._step(idle) is not None and not self.planner.storing(), "the stores")
        return external, lambda: self.memory.verify(keys, [rows])

    def _step(self, step: OneRequest) -> set[str]:
        """The requests whose load ended well."""
        work = StepWork()
        self.planner.plan(step, work)
        if not self.planner.hand_over(work):
            self.planner.revoke(work)
        self.copier.catch_up()
        self.copier.load(work)
        self.copier.store(work)
        finished, failed = self.copier.results()
        self.failed |= failed
        report = self.copier.take_report() or RankReport()
        for take_in in Planner.TAKE_IN:
            take_in(self.planner, report)
        self.planner.reported(report.steps, failed)
        return finished - failed

    def wait_connected(self) -> None:
        clients = self.planner.client, self.copier._client
        until(lambda: all(client is not None and client.connected for client in clients), "both")

    def close(self) -> None:
        self.planner.close()
        self.copier.close()


def until(ask: Callable[[], T | None], what: str) -> T:
    """Ask until the answer is neither None nor False."""
    deadline_s = time.monotonic() + 30
    while (answer := ask()) is None or answer is False:
        assert time.monotonic() < deadline_s, f"in vain: {what}"
        time.sleep(0.001)
    return answer


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running_daemon(tmp_path, lookup_budget_ms=10_000) as one:
        yield one


@pytest.fixture(params=[5.0, 0.0], ids=["granted at once", "granted in a later step"])
def engines(
    request: pytest.FixtureRequest, daemon: Daemon
) -> Iterator[tuple[SmallEngine, SmallEngine]]:
    both = SmallEngine(daemon, "a"), SmallEngine(daemon, "b")
    for engine in both:
        engine.planner.client._reserve_wait_s = request.param
        engine.wait_connected()
    yield both
    for engine in both:
        engine.close()
    daemon.wait_until(leases=0, reservations=0, pins=0)


def test_what_one_computed_another_loads(
    daemon: Daemon, engines: tuple[SmallEngine, SmallEngine]
) -> None:
    a, b = engines
    tokens = range(5 * CHUNK + BLOCK + 3)
    assert a.run(Prompt("first", tokens))[0] == 0
    daemon.wait_until(rows=5 + 1, reservations=0)
    loaded, verify = b.run(Prompt("second", tokens))
    assert loaded == 5 * CHUNK + BLOCK
    assert verify() == 5 * (CHUNK // BLOCK) * len(GROUP.layers)
    b.memory.regions[0][:] = 0
    with pytest.raises(WrongPageError):
        verify()
    assert not any(a.pool.users.values()), "no block stays held"


def flip_loads(engine: SmallEngine, also: Callable[[], object] = lambda: None) -> None:
    """From now on a byte of each load is wrong when it is verified. ``also`` is called before."""
    verifier = engine.copier._verifier
    assert verifier is not None
    check = verifier.check

    def flipped(job: Job, holds: Callable[[], bool]) -> tuple[Outcome, str]:
        if job.kind == "load":
            plane = job.plans[0].planes.planes[1]
            block = int(job.plans[0].rows[0].blocks[0])
            engine.memory.regions[plane.region][plane.base + block * plane.block_stride] ^= 1
            also()
        return check(job, holds)

    verifier.check = flipped  # type: ignore[method-assign]


def test_a_wrong_load_ends_the_cache_of_the_engine_and_clears_the_namespace(
    daemon: Daemon, engines: tuple[SmallEngine, SmallEngine]
) -> None:
    a, b = engines
    tokens = range(CHUNK + 1)
    a.run(Prompt("first", tokens))
    daemon.wait_until(rows=1, reservations=0)
    flip_loads(b)
    loaded, verify = b.run(Prompt("second", tokens))
    assert (loaded, b.planner.off) == (0, True)
    assert verify() == CHUNK // BLOCK * len(GROUP.layers), "it has computed all"
    daemon.wait_until(rows=0, leases=0)
    counts = b.copier.traffic.take()
    assert (counts["loads_failed"], counts["verify_failed"]) == (1, 1)
    assert b.run(Prompt("third", tokens))[0] == 0
    assert daemon.status()["rows"] == 0, "nothing is stored"
    assert not any(b.pool.users.values())
    b.copier.close()
    b.copier.attach(KVMemory(RankLayout((GROUP,)), b.memory.planes, b.memory.regions, ()))
    assert b.copier._client is None, "also with other KV caches it copies nothing more"
    a.run(Prompt("fourth", range(CHUNK + 1)))
    daemon.wait_until(rows=1, reservations=0)


def test_a_rank_that_came_back_has_proven_nothing(
    daemon: Daemon, engines: tuple[SmallEngine, SmallEngine]
) -> None:
    """The slots that were given to its earlier session may be another row's by now."""
    a, b = engines
    tokens = range(CHUNK + 1)
    a.run(Prompt("first", tokens))
    daemon.wait_until(rows=1, reservations=0)
    client = b.copier._client
    assert client is not None

    def come_back() -> None:
        before = client.connection
        assert before is not None
        assert isinstance(before.channel, Channel)
        before.channel._sock.shutdown(socket.SHUT_RDWR)
        until(lambda: client.connection not in (None, before), "another connection")

    flip_loads(b, come_back)
    loaded, verify = b.run(Prompt("second", tokens))
    assert (loaded, b.planner.off) == (0, False)
    assert verify() == CHUNK // BLOCK * len(GROUP.layers), "it has computed all"
    counts = b.copier.traffic.take()
    assert (counts["loads_late"], "verify_failed" in counts) == (1, False)
