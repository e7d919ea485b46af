"""Times of the core alone, in the bench's own process: coverage, and its longest step.

The longest step is that of a core with 1 TiB of 1 MiB rows: nobody is answered meanwhile. Its arena
is a number, so this takes no memory but that of its tables (150 MiB). Work that goes on in slices
is counted too: each slice is a step. What is counted is the time that the processor spent on a
step, so that other processes do not matter. The garbage collector is set as the daemon sets it.

As much memory is used and given back before: a virtual machine that never used a huge page waits 8
to 17 ms for its host when it is first touched, whoever touches it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from statistics import median
from typing import Any, Final

import numpy as np

from kvass.cli.bench.lookups import ASKS, KEYS, WARM_UP
from kvass.cli.bench.rig import WIDTH, percentiles_us, seconds
from kvass.core.effects import Event, Lost, Opened, Received, Send, Tick
from kvass.core.handlers.admission import GROUPS
from kvass.core.machine import CacheMachine, CoreConfig
from kvass.core.matching.coverage import longest_hit
from kvass.daemon.loop import GC_THRESHOLD
from kvass.messages import (
    Clear,
    Cleared,
    Commit,
    FromClient,
    Granted,
    HandedOver,
    Hello,
    Lookup,
    Matched,
    Register,
    Registered,
    Reserve,
    ReserveItem,
    Status,
)
from kvass.types import SCHEDULER, GroupLayout, Limits, RankLayout, Timing

ARENA_BYTES: Final = 1 << 40
ROW_BYTES: Final = 1 << 20
FILL_KEYS: Final = 512
HELD: Final = 10_000
TOUCHED: Final = 1 << 30
NAMESPACES: Final = 1000
_CHUNK_TOKENS: Final = 256
_BLOCKS: Final = 16


def measure_coverage() -> dict[str, float]:
    """``coverage_3x512_us``: how far 512 chunks of three layer groups reach."""
    groups = [
        GroupLayout("full", 16, ("0",), (256,)),
        GroupLayout("sliding_window", 16, ("1",), (256,), 1024),
        GroupLayout("state", _CHUNK_TOKENS, ("2",), (256,)),
    ]
    there = [np.ones(KEYS, np.bool_) for _ in groups]
    there[2][1::2] = False  # a state at every second chunk, so that the last one is no hit
    once = partial(longest_hit, groups, there, _CHUNK_TOKENS, 0)
    return percentiles_us([seconds(once) for _ in range(WARM_UP + ASKS)][WARM_UP:])


class Core:
    """A ``CacheMachine`` whose steps are timed. ``slowest``: seconds of the slowest step since it
    was reset."""

    def __init__(self, arena_bytes: int, namespaces: int = 3) -> None:
        self.arena_bytes = arena_bytes
        limits = Limits(namespaces=namespaces)
        self.machine = CacheMachine(
            CoreConfig(boot=bytes(16), arena_bytes=arena_bytes, limits=limits, timing=Timing())
        )
        self.now = 1000.0
        self.slowest = 0.0
        self.connections = count(1)
        self.keys = count()

    def step(self, event: Event) -> list[Any]:
        """The messages that it sends."""
        began_s = time.process_time()
        effects = self.machine.step(event, self.now)
        self.slowest = max(self.slowest, time.process_time() - began_s)
        return [effect.message for effect in effects if isinstance(effect, Send)]

    def ask(self, connection: int, message: FromClient) -> Any:
        """The answer, and all that goes on behind it."""
        answers = self.step(Received(connection, message))
        self.go_on()
        return answers[0] if answers else None

    def go_on(self) -> None:
        """Ticks, until nothing is left to do at once."""
        while (due := self.machine.next_deadline()) is not None and due <= self.now:
            self.step(Tick())

    def pass_time(self) -> None:
        """All that is due within two minutes."""
        end = self.now + 120.0
        while (due := self.machine.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.step(Tick())
        self.now = end

    def connect(self) -> int:
        """A connection that has said Hello."""
        connection = next(self.connections)
        self.step(Opened(connection))
        self.step(Received(connection, Hello(seq=1, clock_s=self.now)))
        return connection

    def fresh(self, chunks: int) -> bytes:
        """Keys that nobody has yet."""
        raw = [next(self.keys).to_bytes(8, "little") for _ in range(chunks)]
        return b"".join(key * 4 for key in raw)


class Model:
    """An engine of one rank whose rows are of ``row_bytes``, of so many layer groups."""

    def __init__(self, core: Core, name: str, row_bytes: int = ROW_BYTES, groups: int = 1) -> None:
        self.core = core
        self.scheduler, self.worker = core.connect(), core.connect()
        page = GroupLayout("full", _CHUNK_TOKENS // _BLOCKS, ("0",), (row_bytes // _BLOCKS,))
        for rank, connection in ((SCHEDULER, self.scheduler), (0, self.worker)):
            layout = None if rank == SCHEDULER else RankLayout((page,) * groups)
            terms = Register(
                seq=2,
                instance=name,
                identity={"model": name},
                chunk_tokens=_CHUNK_TOKENS,
                rank=rank,
                layout=layout,
            )
            reply = core.ask(connection, terms)
            assert isinstance(reply, Registered), reply

    def reserve(self, digests: bytes) -> Granted:
        items = [ReserveItem(request="r", digests=digests)]
        granted = self.core.ask(self.scheduler, Reserve(seq=3, items=items, width=WIDTH))
        assert isinstance(granted, Granted), granted
        return granted

    def reserve_many(self, items: int, chunks: int) -> None:
        """One reserve of so many prompts, each of so many chunks."""
        asked = [ReserveItem(request="r", digests=self.core.fresh(chunks)) for _ in range(items)]
        granted = self.core.ask(self.scheduler, Reserve(seq=3, items=asked, width=WIDTH))
        assert isinstance(granted, Granted), granted

    def store(self, chunks: int) -> bytes:
        """The keys of new rows, written and handed over."""
        digests = self.core.fresh(chunks)
        granted = self.reserve(digests)
        number = granted.grants[0].reservation
        assert len(granted.grants[0].chunks) == chunks, "there was no room"
        self.core.ask(self.scheduler, HandedOver(boot=granted.boot, reservations=(number,)))
        self.core.ask(self.worker, Commit(boot=granted.boot, reservation=number))
        return digests

    def fill(self) -> list[bytes]:
        """The arena full of its rows; the keys, one blob for each store."""
        return [
            self.store(FILL_KEYS) for _ in range(self.core.arena_bytes // ROW_BYTES // FILL_KEYS)
        ]

    def look_up(self, digests: bytes) -> Matched:
        matched = self.core.ask(
            self.scheduler, Lookup(seq=4, request="r", digests=digests, width=WIDTH)
        )
        assert isinstance(matched, Matched), matched
        return matched

    def clear(self) -> int:
        """How many rows stopped matching."""
        cleared = self.core.ask(self.scheduler, Clear(seq=5))
        assert isinstance(cleared, Cleared), cleared
        return cleared.rows

    def quit(self) -> None:
        """The engine's connections end."""
        for connection in (self.worker, self.scheduler):
            self.core.step(Lost(connection))
            self.core.go_on()


def measure_longest(rounds: int = 3, arena_bytes: int = ARENA_BYTES) -> dict[str, Any]:
    """``longest_step_ms`` by what is done: the median over ``rounds`` of the longest step."""
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    np.ones(TOUCHED, np.uint8)
    runs = [_run(arena_bytes) for _ in range(rounds)]
    return {"longest_step_ms": {name: median(one[name] for one in runs) for name in runs[0]}}


def _run(arena_bytes: int) -> dict[str, float]:
    """What the longest step of each kind took, in ms."""
    gc.collect()  # the core of the round before: no daemon ever drops its own
    core, figures = Core(arena_bytes), dict[str, float]()

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        core.slowest = 0.0
        yield
        figures[name] = core.slowest * 1e3

    a = Model(core, "a")
    with timed("first fill"):
        stored = a.fill()
    with timed("lookup of 4,096 keys"):
        a.look_up(b"".join(stored[:8]))
    with timed("lookup of 32,768 keys"):
        a.look_up(b"".join(stored[:64]))
    with timed("status"):
        core.ask(a.scheduler, Status(seq=6))
    with timed("reserve of 32 chunks"):
        a.reserve(core.fresh(32))
    with timed("reserve of 2,048 chunks"):
        a.reserve(core.fresh(2048))
    with timed("reserve of 32,768 chunks"):
        a.reserve(core.fresh(32_768))
    with timed("reserve of 1,024 prompts of 4 chunks"):
        a.reserve_many(1024, 4)
    core.pass_time()
    _hold(a, stored[-1])
    with timed("10,000 leases and reservations lapse"):
        core.pass_time()
    a.quit()
    core.pass_time()
    a = Model(core, "a")
    b = Model(core, "b", 2 * ROW_BYTES)
    with timed("reserve of 32 chunks of another layout"):
        b.reserve(core.fresh(32))
    with timed("reserve of 2,048 chunks of another layout"):
        b.reserve(core.fresh(2048))
    core.pass_time()
    _hold(a, stored[-1])
    with timed("an engine that holds 10,000 leases and reservations ends"):
        a.quit()
    core.pass_time()
    with timed("another engine of the same model comes"):
        a = Model(core, "a")
    a.fill()
    with timed("clear"):
        a.clear()
    a.fill()
    a.quit()
    with timed("a namespace makes way for another"):
        Model(core, "c")
        Model(core, "d")
    core = Core(arena_bytes)
    *_, last = [Model(core, name) for name in "abc"]  # the first ones take the room for indexes
    with timed("fill, with an index that grows"):
        last.fill()
    core = Core(arena_bytes, NAMESPACES)
    for i in range(NAMESPACES):
        model = Model(core, f"e{i}", groups=GROUPS)
        model.store(4)
        model.quit()
    with timed(f"status of {NAMESPACES:,} namespaces"):
        core.ask(core.connect(), Status(seq=6))
    with timed(f"clear of {NAMESPACES:,} namespaces"):
        core.ask(core.connect(), Clear(seq=5, everything=True))
        core.go_on()
    return figures


def _hold(model: Model, digests: bytes) -> None:
    """Take leases of 10 rows each, and reservations of one row each."""
    for i in range(HELD):
        begin = i * WIDTH % (len(digests) - 10 * WIDTH)
        model.look_up(digests[begin : begin + 10 * WIDTH])
        model.reserve(model.core.fresh(1))
