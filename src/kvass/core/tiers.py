"""What is known of the tiers, and what is under way with them: the nouns of ``promote``, ``flush``
and ``epochs``.

Law of this file: records. An operation (``ops``) is what a tier was asked and has not answered; it
ends once. What a tier may still write or read is in an operation, and nowhere else.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter, deque
from typing import Any, Final, Literal, TypeVar

import msgspec

from kvass.core.l1 import Namespace
from kvass.core.leases import Part
from kvass.types import I64Array, U64Array

FlushMode = Literal["write_through", "on_evict", "none"]

_SAMPLE_S: Final = 1.0
"""A tier that is never idle is measured as often as this."""
REST_S: Final = 1.0
_FASTEST: Final = 1e15
_GIVE_UP: Final = 7
_DUE: Final = 1024
PROMOTION_BYTES: Final = 2048
"""What one takes of the daemon's memory, but for its keys."""
_FRESH: Final = 0.5
"""The weight of a new measurement."""


class Probing(msgspec.Struct):
    """A ``TierProbe``: of each class the chunks that were asked for, for one promotion."""

    tier: int
    promotion: int
    wanted: list[I64Array]


class Loading(msgspec.Struct):
    """A ``TierLoad`` into LOADING rows, and the promotions that wait for some of them."""

    tier: int
    part: Part
    size_bytes: int
    waiters: set[int]


class Flushing(msgspec.Struct):
    """A ``TierStore`` of rows that are pinned for it."""

    tier: int
    part: Part
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
                self.bytes_s + _FRESH * (sample - self.bytes_s) if self.bytes_s else sample
            )
            self.since, self.done_bytes = now, 0

    def seconds(self, size: int) -> float:
        """What loading ``size`` bytes more would take; 0 if nothing is known."""
        return (self.loading_bytes + size) / self.bytes_s if self.bytes_s else 0.0

    def doubt(self) -> None:
        """It was not asked because it is slow: believe a little less in that each time, so that a
        tier that has become fast is found out."""
        self.bytes_s = min(self.bytes_s * 1.05, _FASTEST)


class Tiers:
    """All tiers, by number; the first is asked first."""

    def __init__(self, names: tuple[str, ...], boot: bytes) -> None:
        self.names = names
        self.ops: dict[int, Op] = {}
        self.speeds = [Speed() for _ in names]
        self.reports: list[dict[str, Any]] = [{} for _ in names]
        self.counters = [Counter[str]() for _ in names]
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


NOWHERE: Final = -1
INSTANCE_SHARE: Final = 0.25
"""Of ``Limits.waiting_bytes``: what one instance may take."""


class Promotion(msgspec.Struct):
    """A lookup (or, without readers, a prefetch) that waits for tiers.

    ``homes``: per class and chunk the tier that holds the row, or ``NOWHERE``. ``parts``: what it
    has pinned so far, READY or LOADING, and ``proof``: the spare chunks after it; ``awaits``: the
    loads that fill the latter.
    """

    id: int
    session: int
    seq: int
    instance: str
    request: str
    readers: set[int]
    namespace: Namespace
    epoch: int
    keys: U64Array
    first: int
    deadline: float
    prefill_tokens_s: float
    spare: int
    homes: list[I64Array]
    gone: bool = False
    """Nobody waits for the answer any more: the asker's session is over."""
    early: bool = False
    """Nothing was asked yet, because no tier has told its epoch."""
    probing: int = -1
    """The tier that was asked last, """
    reach: int = 0
    """and for the chunks before this one."""
    chunks: int = 0
    parts: tuple[Part, ...] = ()
    proof: tuple[Part, ...] = ()
    awaits: set[int] = set()

    @property
    def pinned(self) -> tuple[Part, ...]:
        """All that it holds."""
        return self.parts + self.proof

    @property
    def size_bytes(self) -> int:
        """What it takes of the daemon's memory while it waits, near enough."""
        arrays = self.keys.nbytes + sum(home.nbytes for home in self.homes)
        return PROMOTION_BYTES + len(self.request) + arrays


class Waking(msgspec.Struct):
    """Promotions that go on because something happened: a load or a session is over, or a clear.

    ``failed``: the rows that a tier could not fill. They take ``failed_bytes``, and are free when
    every waiter has let them go.
    """

    waiters: deque[int]
    failed: Part | None = None
    failed_bytes: int = 0


class Promotions:
    """All of them, and which is due when."""

    def __init__(self) -> None:
        self.all: dict[int, Promotion] = {}
        self.of_instance: Counter[str] = Counter()
        self.bytes_of: Counter[str] = Counter()
        """``size_bytes`` of those of an instance, """
        self.bytes = 0
        """and of all."""
        self.loading: dict[int, int] = {}
        """LOADING row -> the operation that fills it."""
        self.early: deque[int] = deque()
        """Those that go on now, because a tier has told its epoch."""
        self.waking: deque[Waking] = deque()
        self._due: list[tuple[float, int]] = []
        self._next = 1

    def new_id(self) -> int:
        self._next += 1
        return self._next - 1

    @property
    def unfinished(self) -> bool:
        """Whether some shall go on now."""
        return bool(self.early or self.waking)

    def behind(self, now: float) -> bool:
        """Whether more should have gone on, or been answered, than one step did."""
        return self.unfinished or (self.next_due is not None and self.next_due <= now)

    def room(self, one: Promotion, limit_bytes: int) -> bool:
        """Whether all that wait stay within ``limit_bytes`` with one more, and those of its
        instance within ``INSTANCE_SHARE`` of it."""
        size, mine = one.size_bytes, self.bytes_of.get(one.instance, 0)
        return self.bytes + size <= limit_bytes and mine + size <= limit_bytes * INSTANCE_SHARE

    def add(self, one: Promotion) -> None:
        self.all[one.id] = one
        if len(self._due) > 2 * len(self.all) + _DUE:  # most were answered long before their time
            self._due = [due for due in self._due if due[1] in self.all]
            heapq.heapify(self._due)
        self.of_instance[one.instance] += 1
        self.bytes_of[one.instance] += one.size_bytes
        self.bytes += one.size_bytes
        heapq.heappush(self._due, (one.deadline, one.id))

    def drop(self, one: Promotion) -> None:
        del self.all[one.id]
        self.of_instance[one.instance] -= 1
        self.bytes_of[one.instance] -= one.size_bytes
        self.bytes -= one.size_bytes
        if not self.of_instance[one.instance]:
            del self.of_instance[one.instance], self.bytes_of[one.instance]

    def due(self, now: float, most: int) -> list[Promotion]:
        """Those whose time is up: ``most`` of them, the next call gives more."""
        late = list[Promotion]()
        while self._due and self._due[0][0] <= now and len(late) < most:
            one = self.all.get(heapq.heappop(self._due)[1])
            if one is not None:
                late.append(one)
        return late

    @property
    def next_due(self) -> float | None:
        """When ``due`` will have something."""
        while self._due and self._due[0][1] not in self.all:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None


class Queued(msgspec.Struct, frozen=True):
    """Rows that shall be flushed if they still are what they were: ``keys`` says what."""

    row_class: int
    rows: I64Array
    keys: U64Array


class Flushes:
    """What each tier is to be given, first come first served."""

    def __init__(self, tiers: int) -> None:
        self.queues: list[deque[Queued]] = [deque() for _ in range(tiers)]
        self.rows: list[int] = [0] * tiers
        """How many rows each queue names."""
        self.bytes_out: list[int] = [0] * tiers
        """What each tier is storing now."""
        self.failures: list[int] = [0] * tiers
        """How often in a row each tier was down when it was asked to store."""
        self.rests_until: list[float] = [-math.inf] * tiers

    def failed(self, tier: int, now: float) -> None:
        """A tier is down: it is left alone for a while, each time for longer."""
        if now < self.rests_until[tier]:
            return  # that of one operation that was on its way with others
        self.failures[tier] = min(self.failures[tier] + 1, _GIVE_UP)
        self.rests_until[tier] = now + REST_S * 2 ** (self.failures[tier] - 1)

    @property
    def next_due(self) -> float | None:
        """When a tier that was down shall be asked again; in the end only when there is more."""
        waiting = [
            until
            for until, queue, failures, out in zip(
                self.rests_until, self.queues, self.failures, self.bytes_out, strict=True
            )
            if queue and 0 < failures < _GIVE_UP and not out
        ]
        return min(waiting, default=None)
