"""The tiers of a daemon: their order, speeds, queues and open operations."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, Final, Literal

import msgspec

from kvass.core.effects import TierLoad
from kvass.core.histogram import Histogram
from kvass.core.metrics import TIER_COUNTERS, TIER_HISTOGRAMS
from kvass.core.pending.tier_operations import OneOp, Op
from kvass.types import I64Array, U64Array
from kvass.worth import EASIER

FlushMode = Literal["write_through", "on_evict", "none"]

_SAMPLE_S: Final = 1.0
"""How often the speed of a tier is measured while it always has something to load."""
_SAMPLE_WEIGHT: Final = 0.5
_EASIEST: Final = 1e15


class Speed(msgspec.Struct):
    """How fast a tier loads, measured over the time in which it has anything to load.

    ``bytes_s``: bytes per second; 0: not known. ``easier``: how many times faster it seems, because
    loads were refused since its last trial (``kvass.worth``). ``trial``: a load began that is worth
    it for this reason alone. Other loads leave ``easier`` as it is: they are of other sizes, or of
    engines that compute slower, and show nothing of those that were refused.
    """

    bytes_s: float = 0.0
    loading_bytes: int = 0
    since: float = 0.0
    done_bytes: int = 0
    easier: float = 1.0
    trial: bool = False

    def begin(self, size: int, now: float) -> None:
        """A load of ``size`` bytes began."""
        if not self.loading_bytes:
            self.since, self.done_bytes = now, 0
        self.loading_bytes += size

    def end(self, size: int, good: int, now: float) -> None:
        """A load of ``size`` bytes ended. ``good`` bytes of it were loaded."""
        self.loading_bytes -= size
        self.done_bytes += good
        spent = now - self.since
        if self.done_bytes and spent > 0 and (not self.loading_bytes or spent >= _SAMPLE_S):
            sample = self.done_bytes / spent
            trusted = not self.bytes_s or (self.trial and sample >= self.bytes_s * self.easier)
            self.bytes_s += (1.0 if trusted else _SAMPLE_WEIGHT) * (sample - self.bytes_s)
            self.since, self.done_bytes = now, 0
            if self.trial:
                self.easier, self.trial = 1.0, False

    def measured_s(self, size: int) -> float:
        """How many seconds loading ``size`` bytes more takes at the speed that was measured; 0 if
        none was."""
        return (self.loading_bytes + size) / self.bytes_s if self.bytes_s else 0.0

    def seconds(self, size: int) -> float:
        """How many seconds it seems to take."""
        return self.measured_s(size) / self.easier

    def refused(self) -> None:
        """A load was not worth it, so the next one seems a little faster. What was measured stays:
        else each trial of a tier that is slow would make it seem fast."""
        self.easier = min(self.easier * EASIER, _EASIEST)


class Queued(msgspec.Struct, frozen=True):
    """Rows to be flushed. ``since``: when they were queued. ``keys``: their keys at that time."""

    since: float
    row_class: int
    rows: I64Array
    keys: U64Array


class TierState(msgspec.Struct):
    """One tier.

    ``report``: the last report of its process (``effects.TierReport``). ``place``: its place in the
    order in which tiers are asked, from 1 on; 0: it was removed (``tier_changes``). ``queue``: the
    rows that it is to store, oldest first; ``queued_rows``: their number. ``rests_until``: when a
    tier that was down is asked to store again. ``failing_rows``: how many rows it has failed to
    store since it last stored one. ``failed_s``: when it last failed to store a row, and
    ``left_out_s``: when it last left out one or failed.

    ``held``: the loads that wait for their turn, oldest first; ``ahead``: those that it got in
    their turn; ``ahead_bytes``: of both. ``urgent``: the loads for which lookups wait
    (``tiers/ahead.py``). ``speed`` has the other loads.
    """

    number: int
    name: str
    counters: dict[str, int]
    place: int = 0
    report: dict[str, Any] = {}
    histograms: dict[str, Histogram] = msgspec.field(
        default_factory=lambda: {name: Histogram() for name in TIER_HISTOGRAMS}
    )
    speed: Speed = msgspec.field(default_factory=Speed)
    queue: deque[Queued] = msgspec.field(default_factory=deque)
    queued_rows: int = 0
    storing_bytes: int = 0
    failing_rows: int = 0
    failed_s: float = -inf
    left_out_s: float = -inf
    held: dict[int, TierLoad] = msgspec.field(default_factory=dict)
    ahead: set[int] = msgspec.field(default_factory=set)
    ahead_bytes: int = 0
    urgent: set[int] = msgspec.field(default_factory=set)
    rests_until: float | None = None


class Tiers:
    """All tiers, and their open operations.

    ``all``: every tier of this boot, by number. ``used``: those that are used, in the order in
    which they are asked. ``ops``: the open operations, by number.
    """

    def __init__(self, names: Sequence[str], boot: bytes) -> None:
        self.all: list[TierState] = []
        self.use(range(len(names)), names)
        self.ops: dict[int, Op] = {}
        self.owed: set[tuple[bytes, int]] = set()
        """(namespace digest, tier): the namespace was cleared, and the tier has not noted it."""
        self.known: dict[tuple[bytes, int], int] = {}
        """(namespace digest, tier) -> the highest epoch that was seen there.

        An entry takes some 100 bytes. It is kept when its namespace is dropped, because the
        namespace may be added again.
        """
        self._boot = boot
        self._numbers = itertools.count(1)
        self._epochs = 0

    def use(self, numbers: Sequence[int], names: Sequence[str]) -> None:
        """Use the tiers of these numbers and names, in this order (``effects.TiersAre``)."""
        for number, name in sorted(zip(numbers, names, strict=True)):
            if number == len(self.all):
                self.all.append(TierState(number, name, dict.fromkeys(TIER_COUNTERS, 0)))
            assert self.all[number].name == name, "a number is another tier's"
        self.used = [self.all[number] for number in numbers]
        for tier in self.all:
            tier.place = 0
        for place, tier in enumerate(self.used, 1):
            tier.place = place

    def begin(self, op: Op) -> int:
        """Open an operation; returns its number."""
        number = next(self._numbers)
        self.ops[number] = op
        return number

    def end(self, number: int, kind: type[OneOp]) -> OneOp:
        """Close the operation of that number, which must be of that kind; returns it."""
        op = self.ops.pop(number)
        assert isinstance(op, kind), f"operation {number} ended as another kind"
        return op

    def fresh_epoch(self, digest: bytes) -> int:
        """Bits for a fresh epoch. No other call returns the same, in this boot or another."""
        self._epochs += 1
        seed = b"".join([self._boot, digest, self._epochs.to_bytes(8, "big")])
        return int.from_bytes(hashlib.sha256(seed).digest()[:8], "big")

    @property
    def next_due(self) -> float | None:
        """When a tier that was down is to be asked to store again; ``None``: never."""
        rests = (t.rests_until for t in self.all if t.rests_until is not None and t.queue)
        return min(rests, default=None)
