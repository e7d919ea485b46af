"""The state of the tiers, of the operations they were asked for, and of promotions.

What a tier may still write or read is in an operation (``Tiers.ops``), and nowhere else. An
operation ends once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeVar

import msgspec

from kvass.core.histogram import Histogram
from kvass.core.matching.prefix import NO_BLOCKS, NO_HIT, Hit
from kvass.core.metrics import TIER_COUNTERS, TIER_HISTOGRAMS
from kvass.core.pending.ledger import Entry, Ledger
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import ClassRows
from kvass.types import I64Array, U64Array

FlushMode = Literal["write_through", "on_evict", "none"]

PROMOTION_BYTES: Final = 2048
"""What one takes of the daemon's memory, but for its arrays and its request's name."""
INSTANCE_SHARE: Final = 0.25
"""Of ``Limits.waiting_bytes``: what one instance may take."""
_SAMPLE_S: Final = 1.0
"""A tier that is never idle is measured as often as this."""
_SAMPLE_WEIGHT: Final = 0.5
_FASTEST: Final = 1e15


# ---------------------------------------------------------------- operations


class Probing(msgspec.Struct):
    """A ``TierProbe``: of each class the chunks that were asked for, for one promotion."""

    tier: int
    promotion: int
    wanted: list[I64Array]


class Loading(msgspec.Struct):
    """A ``TierLoad`` into LOADING rows, and the promotions that wait for some of them."""

    tier: int
    begun: float
    part: ClassRows
    size_bytes: int
    waiters: set[int]


class Flushing(msgspec.Struct):
    """A ``TierStore`` of rows that are pinned for it."""

    tier: int
    begun: float
    part: ClassRows
    size_bytes: int


class Asking(msgspec.Struct):
    """A ``TierEpoch``, with ``renew`` of a fresh one; ``clearing``: the clear that waits for it.

    ``epoch``: the namespace's own (``Namespace.epoch``) when it was asked.
    """

    tier: int
    namespace: Namespace
    epoch: int
    renew: bool
    clearing: Clearing | None


class Emptying(msgspec.Struct):
    """A ``TierClear``."""

    tier: int
    clearing: Clearing


class Clearing(msgspec.Struct, eq=False):
    """A ``Clear``: ``left`` is still to be cleared, and then ``tiers``, if set, are emptied. It is
    answered when that is done and the tiers have taken note. Not ``of_l1``: an ``EmptyTier``."""

    session: int
    seq: int
    left: list[Namespace]
    tiers: bool
    rows: int = 0
    awaits: int = 0
    failed: set[int] = set()
    of_l1: bool = True


Op = Probing | Loading | Flushing | Asking | Emptying
_Op = TypeVar("_Op", Probing, Loading, Flushing, Asking, Emptying)


# ---------------------------------------------------------------- tiers


class Speed(msgspec.Struct):
    """How fast a tier loads: bytes per second of the time in which it had anything to load."""

    bytes_s: float = 0.0
    """0: not known."""
    loading_bytes: int = 0
    since: float = 0.0
    done_bytes: int = 0

    def begin(self, size: int, now: float) -> None:
        if not self.loading_bytes:
            self.since, self.done_bytes = now, 0
        self.loading_bytes += size

    def end(self, size: int, good: int, now: float) -> None:
        """It ended, ``good`` bytes of it well."""
        self.loading_bytes -= size
        self.done_bytes += good
        spent = now - self.since
        if self.done_bytes and spent > 0 and (not self.loading_bytes or spent >= _SAMPLE_S):
            sample = self.done_bytes / spent
            before = self.bytes_s or sample
            self.bytes_s = before + _SAMPLE_WEIGHT * (sample - before)
            self.since, self.done_bytes = now, 0

    def seconds(self, size: int) -> float:
        """What loading ``size`` bytes more would take; 0 if nothing is known."""
        return (self.loading_bytes + size) / self.bytes_s if self.bytes_s else 0.0

    def doubt(self) -> None:
        """It was not asked because it is slow. Each time it is taken to be a little faster, so that
        it is tried again, and a tier that has become fast is noticed."""
        self.bytes_s = min(self.bytes_s * 1.05, _FASTEST)


class Queued(msgspec.Struct, frozen=True):
    """Rows to be flushed, if they still hold what they held: ``keys`` says what. They have waited
    since ``since``."""

    since: float
    row_class: int
    rows: I64Array
    keys: U64Array


class TierState(msgspec.Struct):
    """One tier. ``report``: what its process told last (``effects.TierReport``). ``place``: 1 is
    asked first; 0: it was removed (``tier_changes``).

    ``queue``: what it is to store, first come first served; ``queued_rows`` in all. ``rests_until``
    is set while it is not asked to store, because it was down. ``failing_rows``: it could not store
    since it stored one last.
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
    rests_until: float | None = None


class Tiers:
    """``all`` that there were in this boot, by number; those ``used``, the first is asked first."""

    def __init__(self, names: Sequence[str], boot: bytes) -> None:
        self.all: list[TierState] = []
        self.become(range(len(names)), names)
        self.ops: dict[int, Op] = {}
        self.owed: set[tuple[bytes, int]] = set()
        """(namespace digest, tier) that were cleared, and whose tier does not know yet."""
        self.known: dict[tuple[bytes, int], int] = {}
        """(namespace digest, tier) -> the highest epoch that was ever seen there. Some 100 bytes
        each, kept also of namespaces that are forgotten: they may come again."""
        self._boot = boot
        self._numbers = itertools.count(1)
        self._epochs = 0

    def become(self, numbers: Sequence[int], names: Sequence[str]) -> None:
        """See ``effects.TiersAre``."""
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
        """The number of a new operation."""
        number = next(self._numbers)
        self.ops[number] = op
        return number

    def end(self, number: int, kind: type[_Op]) -> _Op:
        """The operation of that number, which is over."""
        op = self.ops.pop(number)
        assert isinstance(op, kind), f"operation {number} ended as another kind"
        return op

    def fresh_epoch(self, digest: bytes) -> int:
        """Random bits for a fresh epoch, made of this life's boot id."""
        self._epochs += 1
        seed = b"".join([self._boot, digest, self._epochs.to_bytes(8, "big")])
        return int.from_bytes(hashlib.sha256(seed).digest()[:8], "big")

    @property
    def next_due(self) -> float | None:
        """When a tier that was down is to be asked to store again."""
        rests = (t.rests_until for t in self.all if t.rests_until is not None and t.queue)
        return min(rests, default=None)


# ---------------------------------------------------------------- promotions


NOT_ASKED: Final = -1
DUPLICATE: Final = -2
IN_NO_TIER: Final = -3
"""Instead of a tier's number (``Promotion.homes``): no tier was asked for the row; the prompt has
the key twice, and one row is enough; every tier that was asked does not have it."""


class Promotion(Entry, kw_only=True):
    """A lookup (or, without readers, a prefetch) that waits for tiers, or for engines' stores.

    ``begun``: when. ``why``: it is not given all it asks for (``metrics.MISSES``).
    ``homes``: per class and chunk the tier that holds the row, or ``NOT_ASKED``, ``DUPLICATE`` or
    ``IN_NO_TIER``. ``gone``: its session ended. ``early``: no tier has told its epoch yet, so none
    was asked. ``probing``: the tier that was asked last, for the chunks before ``reach``. ``hit``
    is what it has pinned, READY or LOADING. ``awaits``: the operations that fill what of it is
    LOADING. ``rest``, ``start``: keys of blocks (``prefix.PrefixView``).
    ``writing``: it waits for rows that are being written, before tiers are asked. ``writers``: the
    reservations of those.
    """

    session: int
    seq: int
    readers: set[int]
    namespace: Namespace
    epoch: int
    begun: float
    keys: U64Array
    first: int
    prefill_tokens_s: float
    spare: int
    homes: list[I64Array]
    tenant: str
    why: str = "absent"
    gone: bool = False
    early: bool = False
    probing: int = -1
    reach: int = 0
    rest: U64Array = NO_BLOCKS
    start: U64Array = NO_BLOCKS
    hit: Hit = NO_HIT
    awaits: set[int] = msgspec.field(default_factory=set)
    writing: bool = False
    writers: set[int] = msgspec.field(default_factory=set)

    @property
    def pinned(self) -> tuple[ClassRows, ...]:
        """All that it holds."""
        return self.hit.parts + self.hit.spares

    @property
    def void(self) -> bool:
        """Whether nobody waits for it, or nothing of what it asked for may match any more."""
        return self.gone or self.epoch != self.namespace.epoch


class Promotions(Ledger[Promotion]):
    """All of them."""

    def __init__(self) -> None:
        super().__init__()
        self.going: dict[int, None] = {}
        """The numbers of those for which something has happened, in their order: they go on."""
        self.numbers = itertools.count(1)
