"""The state of the tiers, of the operations they were asked for, and of promotions and flushes.

Law of this file: an operation (``Tiers.ops``) is what a tier was asked and has not answered. It
ends once. What a tier may still write or read is in an operation, and nowhere else.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from typing import Any, Final, Literal, TypeVar

import msgspec

from kvass.core.ledger import ClassRows, Entry, Ledger
from kvass.core.metrics import TIER_COUNTERS
from kvass.core.row_store import Namespace
from kvass.types import I64Array, U64Array

FlushMode = Literal["write_through", "on_evict", "none"]

REST_S: Final = 1.0
"""How long a tier that was down is not asked to store; twice as long after each failure, """
_MOST_FAILURES: Final = 7
"""until so many in a row: then it is asked again only when there is more to store."""
PROMOTION_BYTES: Final = 2048
"""What one takes of the daemon's memory, but for its keys."""
_SAMPLE_S: Final = 1.0
"""A tier that is never idle is measured as often as this."""
_SAMPLE_WEIGHT: Final = 0.5
_FASTEST: Final = 1e15


class Probing(msgspec.Struct):
    """A ``TierProbe``: of each class the chunks that were asked for, for one promotion."""

    tier: int
    promotion: int
    wanted: list[I64Array]


class Loading(msgspec.Struct):
    """A ``TierLoad`` into LOADING rows, and the promotions that wait for some of them."""

    tier: int
    part: ClassRows
    size_bytes: int
    waiters: set[int]


class Flushing(msgspec.Struct):
    """A ``TierStore`` of rows that are pinned for it."""

    tier: int
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


class Clearing(msgspec.Struct):
    """A ``Clear`` that is answered when the tiers have taken note."""

    session: int
    seq: int
    rows: int
    awaits: int = 0
    failed: set[int] = set()


Op = Probing | Loading | Flushing | Asking | Emptying
_Op = TypeVar("_Op", Probing, Loading, Flushing, Asking, Emptying)


class Speed(msgspec.Struct):
    """How fast a tier loads: bytes per second of the time in which it had anything to load."""

    bytes_s: float = 0.0
    """0: not known."""
    loading_bytes: int = 0
    since: float = 0.0
    done_bytes: int = 0

    def begin(self, size: int, now: float) -> None:
        """A load of ``size`` bytes was asked for."""
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
            self.bytes_s = (
                self.bytes_s + _SAMPLE_WEIGHT * (sample - self.bytes_s) if self.bytes_s else sample
            )
            self.since, self.done_bytes = now, 0

    def seconds(self, size: int) -> float:
        """What loading ``size`` bytes more would take; 0 if nothing is known."""
        return (self.loading_bytes + size) / self.bytes_s if self.bytes_s else 0.0

    def doubt(self) -> None:
        """It was not asked because it is slow. Each time it is taken to be a little faster, so that
        it is tried again, and a tier that has become fast is noticed."""
        self.bytes_s = min(self.bytes_s * 1.05, _FASTEST)


class Tiers:
    """All tiers, by number; the first is asked first."""

    def __init__(self, tiers: int, boot: bytes) -> None:
        self.ops: dict[int, Op] = {}
        self.speeds = [Speed() for _ in range(tiers)]
        self.reports: list[dict[str, Any]] = [{} for _ in range(tiers)]
        self.counters = [dict.fromkeys(TIER_COUNTERS, 0) for _ in range(tiers)]
        self.owed: set[tuple[bytes, int]] = set()
        """(namespace digest, tier) that were cleared, and whose tier does not know yet."""
        self.known: dict[tuple[bytes, int], int] = {}
        """(namespace digest, tier) -> the highest epoch that was ever seen there. Some 100 bytes
        each, kept also of namespaces that are forgotten: they may come again."""
        self._boot = boot
        self._next = 1
        self._epochs = 0

    def begin(self, op: Op) -> int:
        """The number of a new operation."""
        self._next += 1
        self.ops[self._next - 1] = op
        return self._next - 1

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


NOT_ASKED: Final = -1
DUPLICATE: Final = -2
IN_NO_TIER: Final = -3
"""Instead of a tier's number (``Promotion.homes``): no tier was asked for the row; the prompt has
the key twice, and one row is enough; every tier that was asked does not have it."""
INSTANCE_SHARE: Final = 0.25
"""Of ``Limits.waiting_bytes``: what one instance may take."""


class Promotion(Entry, kw_only=True):
    """A lookup (or, without readers, a prefetch) that waits for tiers.

    ``homes``: per class and chunk the tier that holds the row, or ``NOT_ASKED``, ``DUPLICATE`` or
    ``IN_NO_TIER``. ``gone``: its session ended, so nobody waits for the answer. ``early``: no tier
    has told its epoch yet, so none was asked. ``probing``: the tier that was asked last, and
    ``reach``: for the chunks before this one. ``parts`` is the hit of ``chunks`` chunks that it has
    pinned, READY or LOADING, and ``spares`` are the spare chunks after it. ``awaits``: the
    operations that fill what of these is LOADING.
    """

    session: int
    seq: int
    readers: set[int]
    namespace: Namespace
    epoch: int
    keys: U64Array
    first: int
    prefill_tokens_s: float
    spare: int
    homes: list[I64Array]
    gone: bool = False
    early: bool = False
    probing: int = -1
    reach: int = 0
    chunks: int = 0
    parts: tuple[ClassRows, ...] = ()
    spares: tuple[ClassRows, ...] = ()
    awaits: set[int] = msgspec.field(default_factory=set)

    @property
    def pinned(self) -> tuple[ClassRows, ...]:
        """All that it holds."""
        return self.parts + self.spares

    @property
    def void(self) -> bool:
        """Whether nobody waits for it, or nothing of what it asked for may match any more."""
        return self.gone or self.epoch != self.namespace.epoch

    @property
    def size_bytes(self) -> int:
        """What it takes of the daemon's memory while it waits, near enough."""
        arrays = self.keys.nbytes + sum(home.nbytes for home in self.homes)
        return PROMOTION_BYTES + len(self.request) + arrays


class Promotions(Ledger[Promotion]):
    """All of them, and the rows that they wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.going: dict[int, None] = {}
        """The numbers of those for which something has happened, in their order: they go on."""
        self._next = 1

    def new_id(self) -> int:
        self._next += 1
        return self._next - 1

    @property
    def unfinished(self) -> bool:
        """Whether some shall go on now."""
        return bool(self.going)

    def behind(self, now: float) -> bool:
        """Whether more should have gone on, or been answered, than one step did."""
        return self.unfinished or (self.next_due is not None and self.next_due <= now)

    def room(self, promotion: Promotion, limit_bytes: int) -> bool:
        """Whether all that wait stay within ``limit_bytes`` with one more, and those of its
        instance within ``INSTANCE_SHARE`` of it."""
        size = promotion.size_bytes
        all_bytes, mine = sum(self.bytes_of.values()), self.bytes_of.get(promotion.instance, 0)
        return all_bytes + size <= limit_bytes and mine + size <= limit_bytes * INSTANCE_SHARE


class Queued(msgspec.Struct, frozen=True):
    """Rows to be flushed, if they still hold what they held: ``keys`` says what."""

    row_class: int
    rows: I64Array
    keys: U64Array


class Flushes:
    """What each tier is to store, first come first served."""

    def __init__(self, tiers: int) -> None:
        self.queues: list[deque[Queued]] = [deque() for _ in range(tiers)]
        self.rows: list[int] = [0] * tiers
        """How many rows each queue names."""
        self.bytes_out: list[int] = [0] * tiers
        """What each tier is storing now."""
        self.failures: list[int] = [0] * tiers
        """How often in a row each tier was down when it was asked to store."""
        self.rests_until: list[float] = [-math.inf] * tiers
        """Until when each tier is not asked, because it was down."""

    def failed(self, tier: int, now: float) -> None:
        """A tier is down: it is not asked for a while, each time for longer."""
        if now < self.rests_until[tier]:
            return  # it was counted, with another operation of that time
        self.failures[tier] = min(self.failures[tier] + 1, _MOST_FAILURES)
        self.rests_until[tier] = now + REST_S * 2 ** (self.failures[tier] - 1)

    @property
    def next_due(self) -> float | None:
        """When a tier that was down is to be asked again."""
        waiting = [
            until
            for until, queue, failures, out in zip(
                self.rests_until, self.queues, self.failures, self.bytes_out, strict=True
            )
            if queue and 0 < failures < _MOST_FAILURES and not out
        ]
        return min(waiting, default=None)
