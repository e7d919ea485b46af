"""Store and load of 4,096 tokens over the whole path, against memcpy in the same rounds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np

from kvass.cli.bench.machine import private_memory, shared_memory, wait_mapped
from kvass.client.scheduler import Match, SchedulerClient
from kvass.client.worker import WorkerClient
from kvass.config import Size
from kvass.errors import ConfigError, Unavailable
from kvass.layout.copy_plan import CopyPlan, plan_copy
from kvass.layout.describe import describe_group
from kvass.messages import Register, ReserveItem
from kvass.transfer.base import Job
from kvass.transfer.host import HostMover
from kvass.types import GroupLayout, I64Array, Limits, RankLayout, Slots

TOKENS: Final = 4096
CHUNK_TOKENS: Final = 256
CHUNKS: Final = TOKENS // CHUNK_TOKENS
_KV: Final = 16 * 8 * 128 * 2
_LATENT: Final = 16 * 576 * 2
LLAMA_8B: Final = GroupLayout(
    "full", 16, tuple(f"{i // 2}.{'kv'[i % 2]}" for i in range(64)), (_KV,) * 64
)
"""A page is 16 tokens, 8 heads, 128 wide, bf16: the K (or the V) of one block in one layer."""
MLA: Final = GroupLayout("full", 16, tuple(map(str, range(61))), (_LATENT,) * 61)
"""DeepSeek-V3's: a page is 16 tokens, 512 + 64 wide, bf16."""
WIDTH: Final = 32
PATIENCE_S: Final = 30.0


class Engine:
    """What an engine with a connector does, without the engine: one prompt of ``chunks`` chunks.

    Its memory holds a block table to store from, one to load into, and the null block.
    """

    def __init__(self, socket: str, chunks: int = CHUNKS, layout: GroupLayout = LLAMA_8B) -> None:
        self.chunks = chunks
        table = chunks * layout.row_blocks(CHUNK_TOKENS)
        layers, blocks = len(layout.layers), 2 * table + 1
        name = f"bench-{os.getpid()}-{os.urandom(4).hex()}"
        register = Register(
            instance=name, identity={"weights": name}, chunk_tokens=CHUNK_TOKENS, rank=-1
        )
        worker = Register(
            instance=name,
            identity=register.identity,
            chunk_tokens=CHUNK_TOKENS,
            rank=0,
            layout=RankLayout((layout,)),
        )
        (page_bytes,) = set(layout.page_bytes)
        stride = blocks * page_bytes
        bases = range(0, layers * stride, stride)
        self.planes = describe_group(0, layout, CHUNK_TOKENS, blocks, bases, [page_bytes] * layers)
        memory = private_memory(layers * stride)
        self.pages = memory.view(np.uint64).reshape(layers, blocks, -1)
        self.pages[:] = np.arange(self.pages.size, dtype=np.uint64).reshape(self.pages.shape)
        order = np.random.default_rng(0).permutation(blocks - 1) + 1
        self.source, self.target = order[:table], order[table:]
        self.mover = HostMover([memory], [self.planes])
        self.worker = WorkerClient(socket, worker)
        self.scheduler = SchedulerClient(
            socket,
            register,
            lookup_budget_s=PATIENCE_S,
            reserve_wait_s=PATIENCE_S,
            step_wait_s=PATIENCE_S,
        )
        self.worker.start()
        self.scheduler.start()
        wait_for(lambda: self.worker.connected and self.scheduler.connected, "a connection")

    def close(self) -> None:
        """In the order of the law: copies, then sockets."""
        self.mover.close()
        self.scheduler.clear(PATIENCE_S)
        self.worker.close()
        self.scheduler.close()

    def store(self, digests: bytes) -> None:
        """Reserve, gather, commit."""
        self.scheduler.new_step()
        granted = self.scheduler.reserve([ReserveItem(request="store", digests=digests)], WIDTH)
        if granted is None or len(granted.grants[0].chunks) != self.chunks:
            raise Unavailable(f"no room for {self.chunks} chunks now: {granted}")
        grant, boot = granted.grants[0], granted.boot
        self.scheduler.handed_over((), (grant.reservation,), boot)
        plan = self._plan(self.source, grant.slots[0])
        self._copy("store", plan, boot, partial(self.worker.commit, boot, grant.reservation))

    def load(self, digests: bytes) -> None:
        """Look up, scatter, release. Raises if not everything hits."""
        self.scheduler.new_step()
        match = self.scheduler.match("load", digests, WIDTH, 0)
        if not isinstance(match, Match) or match.chunks != self.chunks:
            raise Unavailable(
                f"stored {self.chunks} chunks and found {match}; is the daemon in use?"
            )
        self.scheduler.take("load")
        self.scheduler.handed_over((match.lease,), (), match.boot)
        plan = self._plan(self.target, match.slots[0])
        self._copy("load", plan, match.boot, partial(self.worker.release, match.boot, match.lease))

    def found(self, digests: bytes) -> bool:
        """Whether all chunks are there; holds nothing."""
        self.scheduler.new_step()
        match = self.scheduler.match("look", digests, WIDTH, 0)
        self.scheduler.settle("look")
        return isinstance(match, Match) and match.chunks == self.chunks

    def same_bytes(self) -> bool:
        """Whether every page loaded is the page stored."""
        return all(np.array_equal(plane[self.source], plane[self.target]) for plane in self.pages)

    def _plan(self, table: I64Array, slots: Slots) -> CopyPlan:
        offsets = slots.offsets(0, self.planes.shard_bytes)
        return plan_copy(self.planes, table.reshape(self.chunks, -1), offsets)

    def _copy(self, kind: Any, plan: CopyPlan, boot: bytes, settle: Callable[[], None]) -> None:
        arena = self.worker.arena(boot)
        if arena is None:
            raise Unavailable("the daemon went away")
        with arena as buffer:
            self.mover.submit(Job(kind, (plan,), buffer, on_done=lambda _: settle()))
            if not self.mover.drain(PATIENCE_S):
                raise Unavailable("the copies did not end")
            (done,) = self.mover.poll()
        if not done.ok:
            raise Unavailable(f"a {kind} ended {done.outcome}: {done.error}")


def measure_copies(
    socket: str,
    arena_bytes: int,
    rounds: int,
    chunks: int = CHUNKS,
    layout: GroupLayout = LLAMA_8B,
) -> dict[str, Any]:
    """Ratios and rates, by the names in the package's docstring. Raises ``KvassError``.

    All rows are reserved at once, so they must fit what one instance may write.
    """
    need = int(chunks * layout.shard_bytes(CHUNK_TOKENS) / Limits().instance_write_share)
    if arena_bytes < need:
        raise ConfigError(f"an L1 of {Size(arena_bytes)}: give the daemon --l1-size {Size(need)}")
    engine = Engine(socket, chunks, layout)
    try:
        return _measure(engine, arena_bytes, rounds)
    finally:
        engine.close()


def _measure(engine: Engine, arena_bytes: int, rounds: int) -> dict[str, Any]:
    size = engine.chunks * engine.planes.shard_bytes
    private, shared = private_memory(size), shared_memory(size)
    wait_mapped(arena_bytes + size)
    same = True
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first warms up
        digests = os.urandom(WIDTH * engine.chunks)
        engine.pages[:, engine.source, 0] += 1  # other bytes in every page than last time
        engine.pages[:, engine.target] = 0
        steps: dict[str, Callable[[], object]] = {
            "store": partial(engine.store, digests),
            "in": partial(_memcpy, shared.buffer, private, engine.chunks),
            "in_one_call": partial(_memcpy, shared.buffer, private, 1),
            "commit": partial(wait_for, partial(engine.found, digests), "the commit"),
            "load": partial(engine.load, digests),
            "out": partial(_memcpy, private, shared.buffer, engine.chunks),
            "out_one_call": partial(_memcpy, private, shared.buffer, 1),
        }
        for name, step in steps.items():
            took_s = seconds(step)
            if number:
                times.setdefault(name, []).append(took_s)
        same = same and engine.same_bytes()
    shared.close()
    return _figures(times, size, same)


def _figures(times: dict[str, list[float]], size: int, same: bool) -> dict[str, Any]:
    def ratio(ours: str, theirs: str) -> float:
        return median(b / a for a, b in zip(times[ours], times[theirs], strict=True))

    def gbps(*names: str) -> float:
        return size / median(t for name in names for t in times[name]) / 1e9

    return {
        "bytes_equal": same,
        "store_vs_memcpy": ratio("store", "in"),
        "load_vs_memcpy": ratio("load", "out"),
        "store_vs_memcpy_one_call": ratio("store", "in_one_call"),
        "load_vs_memcpy_one_call": ratio("load", "out_one_call"),
        "store_gbps": gbps("store"),
        "load_gbps": gbps("load"),
        "memcpy_gbps": gbps("in", "out"),
        "memcpy_one_call_gbps": gbps("in_one_call", "out_one_call"),
    }


def _memcpy(to: Any, source: Any, calls: int) -> None:
    """Copy all of ``source``, in ``calls`` calls of memcpy."""
    step = source.nbytes // calls
    for at in range(0, source.nbytes, step):
        to[at : at + step] = source[at : at + step]


def seconds(step: Callable[[], object]) -> float:
    """How long ``step`` took."""
    began_s = time.perf_counter()
    step()
    return time.perf_counter() - began_s


def wait_for(true: Callable[[], bool], what: str) -> None:
    """Ask until it is so. Raises ``Unavailable`` after ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline:
            raise Unavailable(f"waited {PATIENCE_S:.0f} s in vain for {what}")
        time.sleep(0.001)
