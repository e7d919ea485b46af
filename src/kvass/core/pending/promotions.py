"""Promotions: lookups and prefetches that wait for tiers, or for what engines are writing.

Laws of this file:

- A promotion's state changes only along ``TRANSITIONS``; any other change is a defect and asserts.
- It is answered once. Then it is ENDED, and holds nothing.
"""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Final

import msgspec

from kvass.core.matching.prefix import NO_BLOCKS, NO_HIT, Hit, PrefixView
from kvass.core.pending.ledger import Entry, Ledger
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import ClassRows
from kvass.types import I64Array, U64Array

PROMOTION_BYTES: Final = 2048
"""What one takes of the daemon's memory, but for its arrays and its request's name."""
INSTANCE_SHARE: Final = 0.25
"""Of ``Limits.waiting_bytes``: what one instance may take."""

NOT_ASKED: Final = -1
DUPLICATE: Final = -2
IN_NO_TIER: Final = -3
"""Instead of a tier's number (``Promotion.homes``): no tier was asked for the row; the prompt has
the key twice, and one row is enough; every tier that was asked does not have it."""


class PromotionState(Enum):
    """What a promotion waits for."""

    NEW = "nothing yet: this step begins it"
    AWAITS_STORES = "reservations whose rows are of its prompt (writers)"
    AWAITS_EPOCH = "a tier that has not told the namespace's epoch yet: until then none is asked"
    AWAITS_PROBE = "a tier's answer which rows it holds (a Probing operation)"
    AWAITS_LOADS = "operations that fill rows which it has pinned (awaits)"
    ENDED = "nothing: it was answered, or its asker is gone"


_S = PromotionState
TRANSITIONS: Final = frozenset(
    {
        (_S.NEW, _S.AWAITS_STORES),
        (_S.NEW, _S.AWAITS_EPOCH),
        (_S.NEW, _S.AWAITS_PROBE),
        (_S.NEW, _S.AWAITS_LOADS),
        (_S.NEW, _S.ENDED),
        (_S.AWAITS_STORES, _S.AWAITS_EPOCH),
        (_S.AWAITS_STORES, _S.AWAITS_PROBE),
        (_S.AWAITS_STORES, _S.AWAITS_LOADS),
        (_S.AWAITS_STORES, _S.ENDED),
        (_S.AWAITS_EPOCH, _S.AWAITS_PROBE),
        (_S.AWAITS_EPOCH, _S.AWAITS_LOADS),
        (_S.AWAITS_EPOCH, _S.ENDED),
        (_S.AWAITS_PROBE, _S.AWAITS_EPOCH),  # a tier was added meanwhile
        (_S.AWAITS_PROBE, _S.AWAITS_LOADS),
        (_S.AWAITS_PROBE, _S.ENDED),
        (_S.AWAITS_LOADS, _S.ENDED),
    }
)


class Promotion(Entry, kw_only=True):
    """A lookup (or, without readers, a prefetch) that waits for tiers, or for engines' stores.

    ``begun``: when. ``why``: it is not given all it asks for (``metrics.MISSES``).
    ``homes``: per class and chunk the tier that holds the row, or ``NOT_ASKED``, ``DUPLICATE`` or
    ``IN_NO_TIER``. ``gone``: its session ended. ``probing``: the tier that was asked last, for the
    chunks before ``reach``. ``hit`` is what it has pinned, READY or LOADING. ``awaits``: the
    operations that fill what of it is LOADING. ``rest``, ``start``: keys of blocks
    (``prefix.PrefixView``). ``waits_for_stores``: whether it waits for rows that are being written,
    before tiers are asked. ``writers``: the reservations of those.
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
    state: PromotionState = PromotionState.NEW
    probing: int = -1
    reach: int = 0
    rest: U64Array = NO_BLOCKS
    start: U64Array = NO_BLOCKS
    hit: Hit = NO_HIT
    awaits: set[int] = msgspec.field(default_factory=set)
    waits_for_stores: bool = False
    writers: set[int] = msgspec.field(default_factory=set)

    def move(self, to: PromotionState) -> None:
        """It waits for something else, or is over."""
        if to is not self.state:
            assert (self.state, to) in TRANSITIONS, (self.id, self.state, to)
            self.state = to

    def view(self, rows: RowStates, chunks: int | None = None) -> PrefixView:
        """What L1 has of the prompt, or of its first ``chunks``, now."""
        keys = self.keys[:chunks]
        rest = self.rest if len(keys) == len(self.keys) else NO_BLOCKS
        start = self.start if len(keys) > self.first else NO_BLOCKS
        return PrefixView(rows, self.namespace, keys, self.first, self.spare, rest, start)

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
