"""Operations that a tier was asked for and has not finished.

What a tier may still write or read is in an operation (``tier_state.Tiers.ops``), and nowhere else
(law 3). An operation ends once.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import ClassRows
from kvass.types import I64Array


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
OneOp = TypeVar("OneOp", Probing, Loading, Flushing, Asking, Emptying)
