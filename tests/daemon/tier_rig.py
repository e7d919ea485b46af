"""An executor whose events can be asked for, and what makes its tiers misbehave."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvass.core.effects import (
    FromTier,
    Records,
    TierLoad,
    TierProbe,
    TierReport,
    TierStore,
    ToTier,
)
from kvass.daemon.tier_process.executor import Executor
from kvass.messages import Commit, Ping, Pong
from kvass.testing.daemon import Daemon
from kvass.tiers.codec import record_key
from kvass.types import Slots
from tests.support.waiting import eventually
from tests.support.wire.raw_session import RawSession

SPACE = bytes(range(32))
WAIT_S = 30.0
PAGE = 4096


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Executors over an arena of 64 pages, one per tier, and the events they posted."""

    def __init__(self, *tiers: Any, **options: Any) -> None:
        self.arena = np.zeros(64 * PAGE, np.uint8)
        self.events: queue.SimpleQueue[FromTier] = queue.SimpleQueue()
        self.reports: dict[int, dict[str, Any]] = {}
        self.clock = Clock()
        options |= {"clock": self.clock, "report_s": 0.01}  # no test waits for a report
        self.executors = [
            Executor(i, tier, f"tier{i}", self.arena, self._take, **options)
            for i, tier in enumerate(tiers)
        ]

    def submit(self, effect: ToTier) -> None:
        self.executors[effect.tier].submit(effect)

    def close(self, timeout_s: float) -> bool:
        closed = [one.close(timeout_s) for one in self.executors]
        return all(closed)

    def end(self, op: int) -> Any:
        """The next event, which must be that operation's."""
        event = self.events.get(timeout=WAIT_S)
        assert event.op == op, event
        return event

    def ask(self, effect: ToTier) -> Any:
        """Submit it; its event, which must be the next."""
        self.submit(effect)
        return self.end(effect.op)

    def ends(self, count: int) -> dict[int, FromTier]:
        """The next so many events by operation: no operation has two of them."""
        found = [self.events.get(timeout=WAIT_S) for _ in range(count)]
        assert len({event.op for event in found}) == count
        return {event.op: event for event in found}

    def reported(self, tier: int = 0, **fields: Any) -> bool:
        """Whether a tier is reported so, sooner or later."""
        return eventually(lambda: fields.items() <= self.reports.get(tier, {}).items())

    def _take(self, event: FromTier | TierReport) -> None:
        if isinstance(event, TierReport):
            self.reports[event.tier] = event.fields
        else:
            assert isinstance(event, FromTier)
            self.events.put(event)


@contextmanager
def rig(*tiers: Any, **options: Any) -> Iterator[Rig]:
    made = Rig(*tiers, **options)
    try:
        yield made
    finally:
        made.close(WAIT_S)
    assert made.events.empty(), "an operation ended twice"


class Gate:
    """A hook that holds some methods until it is opened."""

    def __init__(self, *methods: str) -> None:
        self.methods = methods
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, method: str) -> None:
        if method in self.methods:
            self.entered.release()
            assert self.open.wait(WAIT_S)


class Trouble:
    """A hook that raises while ``error`` is one."""

    def __init__(self, error: BaseException | None, *methods: str) -> None:
        self.error = error
        self.methods = methods
        self.calls = 0

    def __call__(self, method: str) -> None:
        if not self.methods or method in self.methods:
            self.calls += 1
            if self.error is not None:
                raise self.error


def records(*numbers: int, epoch: int = 7, group: int = 1) -> Records:
    keys = np.zeros((len(numbers), 4), np.uint64)
    keys[:, 0] = numbers
    return Records(SPACE, epoch, group, keys)


def key(number: int, epoch: int = 7, group: int = 1) -> bytes:
    return record_key(SPACE, epoch, group, number.to_bytes(8, "little") + bytes(24))


def slots(*where: int) -> Slots:
    """Two shards of one page each: shard 0 from page 0 on, shard 1 from page 32 on."""
    return Slots(
        extents=((0, 32 * PAGE),),
        set_=np.zeros(len(where), "<u2").tobytes(),
        slot=np.array(where, "<u4").tobytes(),
    )


def probe(op: int, *numbers: int, tier: int = 0) -> TierProbe:
    return TierProbe(tier, op, (records(*numbers),))


def load(op: int, number: int, slot: int, tier: int = 0) -> TierLoad:
    return TierLoad(tier, op, records(number), slots(slot), (PAGE, PAGE))


def store(op: int, number: int, slot: int, tier: int = 0) -> TierStore:
    return TierStore(tier, op, records(number), slots(slot), (PAGE, PAGE))


# ---------------------------------------------------------------- tiers of a daemon


def disk(folder: Path, **options: str) -> str:
    options = {"capacity": "64MiB", **options}
    return f"disk:{folder}?" + "&".join(f"{name}={value}" for name, value in options.items())


def commit_two(scheduler: RawSession, worker: RawSession) -> None:
    granted = scheduler.reserve("ab")
    worker.channel.send(Commit(boot=granted.boot, reservation=granted.grants[0].reservation))
    worker.ask(Ping(), Pong)


def tier_of(daemon: Daemon, number: int = 0) -> dict[str, Any]:
    tiers: list[dict[str, Any]] = daemon.status()["tiers"]
    return tiers[number]
