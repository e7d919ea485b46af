"""The operations that tiers were asked for and have not finished.

A tier reads or writes rows of an open operation only (``tier_state.Tiers.ops``; law 3). An
operation ends once.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np

from kvass.core.matching.coverage import BoolArray
from kvass.core.rows.row_class import RowClass
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_table import ClassRows
from kvass.messages import SessionIs
from kvass.types import I64Array, U64Array


class Op(msgspec.Struct, eq=False):
    """What the core remembers of an operation that tier number ``tier`` was asked for."""

    tier: int


class Probing(Op, eq=False):
    """A ``TierProbe`` for one promotion. ``wanted``: per class, the chunks that it names."""

    promotion: int
    wanted: list[I64Array]


class Looking(Op, eq=False):
    """A ``TierProbe`` for a ``Present`` or an ``AskSession``, whose message was ``seq`` of
    ``connection``. ``answer``: that to an ``AskSession``; None: it is for a ``Present``.

    ``epoch``: ``Namespace.epoch`` when it was asked. ``classes``: those that the question is about.
    ``there``: for each of them, which of ``keys`` L1 or a tier has, as far as they were asked. The
    tier was asked for those from ``begin`` to ``upto``, and before that for those before.
    """

    connection: int
    seq: int
    namespace: Namespace
    epoch: int
    classes: list[RowClass]
    keys: U64Array
    there: list[BoolArray]
    answer: SessionIs | None = None
    begin: int = 0
    upto: int = 0


class Loading(Op, eq=False):
    """A ``TierLoad`` into LOADING rows. ``waiters``: the promotions that wait for some of them."""

    begun: float
    part: ClassRows
    size_bytes: int
    waiters: set[int]


class Flushing(Op, eq=False):
    """A ``TierStore`` of rows, which are pinned until it ends."""

    begun: float
    part: ClassRows
    size_bytes: int


class NotingEpoch(Op, eq=False):
    """A ``TierEpoch``. ``clearing``: the clear that waits for it.

    ``renew``: the tier must note a fresh epoch. ``epoch``: ``Namespace.epoch`` when it began.
    """

    namespace: Namespace
    epoch: int
    renew: bool
    clearing: Clearing | None


class Emptying(Op, eq=False):
    """A ``TierClear``."""

    clearing: Clearing


class Clearing(msgspec.Struct, eq=False):
    """A ``Clear``, ``ClearTenant`` or ``EmptyTier`` that was not answered yet. ``of_l1``: it clears
    L1.

    ``to_clear``: the namespaces that are still to be cleared. ``tenant``: the id of the tenant
    whose extent sets ``sets`` are still to be cleared. ``tiers``: whether tiers are emptied after
    that. ``awaits``: how many operations of tiers it waits for. ``failed``: the tiers whose
    operation failed, and why. ``rows``: how many rows were cleared.
    """

    connection: int
    seq: int
    to_clear: list[Namespace]
    tiers: bool
    rows: int = 0
    awaits: int = 0
    failed: dict[int, str] = {}
    of_l1: bool = True
    tenant: int = -1
    sets: I64Array = msgspec.field(default_factory=lambda: np.empty(0, np.int64))


OneOp = TypeVar("OneOp", bound=Op)
