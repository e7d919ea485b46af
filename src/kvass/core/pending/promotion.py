"""Promotions: lookups and prefetches whose answer waits for writers or for tiers.

A promotion's state changes only through ``Promotion.move``, along ``TRANSITIONS``. A promotion is
answered when it ends, and it ends once (law 11).

- NEW: it was created in this step, and nothing was begun for it.
- AWAITING_WRITERS: engines are writing rows that it needs. ``writers`` has their reservations. No
  tier was asked.
- AWAITING_EPOCH: the epoch of its namespace is not known in any tier, so no tier can be asked for
  rows. At least one tier has not answered yet.
- PROBING: a tier was asked which rows it has, and has not answered.
- LOADING: ``hit`` is pinned. Tiers are filling those of its rows that are LOADING. ``awaits`` has
  the operations of the tiers.
- ENDED: its answer was sent, or its connection ended. It holds nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from enum import Enum, auto
from math import inf
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvass.core.matching.prefix import NO_BLOCKS, NO_HIT, Hit, PrefixView
from kvass.core.pending.ledger import Entry, Ledger, Reservation
from kvass.core.rows.row_classes import Namespace
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import ClassRows
from kvass.messages import NO_CONTEXT, RequestContext
from kvass.types import I64Array, U64Array

PROMOTION_BYTES: Final = 2048
"""Memory that one promotion takes, without its arrays and its request's name."""
INSTANCE_SHARE: Final = 0.25
"""The part of ``Limits.waiting_bytes`` that the promotions of one instance may take."""
NOT_ASKED: Final = -1
"""In ``Promotion.homes``: no tier was asked for the row."""
DUPLICATE: Final = -2
"""In ``Promotion.homes``: an earlier chunk of the prompt has the same key. No tier is asked."""
IN_NO_TIER: Final = -3
"""In ``Promotion.homes``: no tier that was asked has the row."""
NO_TIER: Final = -1
"""In ``Promotion.probed_tier``: no tier was asked yet."""


class PromotionState(Enum):
    """What a promotion waits for. The top of this file describes each state."""

    NEW = auto()
    AWAITING_WRITERS = auto()
    AWAITING_EPOCH = auto()
    PROBING = auto()
    LOADING = auto()
    ENDED = auto()


TRANSITIONS: Final = {
    PromotionState.NEW: {
        PromotionState.AWAITING_WRITERS,
        PromotionState.AWAITING_EPOCH,
        PromotionState.PROBING,
        PromotionState.LOADING,  # another promotion is loading the rows
        PromotionState.ENDED,
    },
    PromotionState.AWAITING_WRITERS: {
        PromotionState.AWAITING_WRITERS,  # an engine reserved more rows of the prompt
        PromotionState.AWAITING_EPOCH,
        PromotionState.PROBING,
        PromotionState.LOADING,
        PromotionState.ENDED,
    },
    PromotionState.AWAITING_EPOCH: {
        PromotionState.AWAITING_EPOCH,  # one of several tiers answered without an epoch
        PromotionState.PROBING,
        PromotionState.LOADING,
        PromotionState.ENDED,
    },
    PromotionState.PROBING: {
        PromotionState.AWAITING_EPOCH,  # the set of tiers changed
        PromotionState.PROBING,  # more chunks, or the next tier
        PromotionState.LOADING,
        PromotionState.ENDED,
    },
    PromotionState.LOADING: {
        PromotionState.LOADING,  # a row could not be loaded; the shorter hit is LOADING, too
        PromotionState.ENDED,
    },
    PromotionState.ENDED: set[PromotionState](),
}


class Promotion(Entry, kw_only=True):
    """A lookup or a prefetch whose answer waits for writers or for tiers.

    ``readers``: the ranks that will read the hit; a prefetch has none. ``begun``: when it began.
    ``epoch``: ``Namespace.epoch`` at that time. ``first``, ``spare``, ``rest``, ``start``: see
    ``prefix.PrefixView``. ``why``: why the hit is shorter than the prompt (``metrics.MISSES``).
    ``context``: of the lookup's request; of a prefetch the tenant and the session are known.
    ``homes``: per class and chunk, the number of the tier that has the row, or ``NOT_ASKED``,
    ``DUPLICATE`` or ``IN_NO_TIER``. ``probed_tier``: the tier that was asked last, for the chunks
    before ``probed_upto``. ``hit``: the rows that are pinned for it, READY or LOADING.
    """

    connection: int
    seq: int
    readers: set[int]
    namespace: Namespace
    epoch: int
    begun: float
    keys: U64Array
    first: int
    spare: int
    homes: list[I64Array]
    context: RequestContext = NO_CONTEXT
    rest: U64Array = NO_BLOCKS
    start: U64Array = NO_BLOCKS
    why: str = "absent"
    asker_gone: bool = False
    """Its connection ended, so it is not answered."""
    state: PromotionState = PromotionState.NEW
    writers: set[int] = msgspec.field(default_factory=set)
    probed_tier: int = NO_TIER
    probed_upto: int = 0
    hit: Hit = NO_HIT
    awaits: set[int] = msgspec.field(default_factory=set)
    soon_s: float = inf
    """Of a fetch: how soon its session comes back, about. Infinity: it is not known."""

    def move(self, after: PromotionState) -> None:
        """Change the state, along ``TRANSITIONS``."""
        assert after in TRANSITIONS[self.state], (self.state.name, after.name)
        self.state = after

    def await_writers(self, writers: set[int], reservations: Mapping[int, Reservation]) -> None:
        """Wait for the reservations ``writers``, and no others. The first that ends continues the
        promotion.

        ``reservations``: those that are open, by number.
        """
        for number in self.writers - writers:
            if number in reservations:
                reservations[number].waiters.discard(self.id)
        for number in writers - self.writers:
            reservations[number].waiters.add(self.id)
        self.writers = writers

    def view(self, rows: RowStates, chunks: int | None = None) -> PrefixView:
        """The rows that L1 has now of the prompt, or of its first ``chunks`` chunks."""
        keys = self.keys[:chunks]
        rest = self.rest if len(keys) == len(self.keys) else NO_BLOCKS
        start = self.start if len(keys) > self.first else NO_BLOCKS
        return PrefixView(rows, self.namespace, keys, self.first, self.spare, rest, start)

    @property
    def ahead(self) -> bool:
        """Whether it is a prefetch's, so that no lookup waits for it."""
        return not self.readers

    @property
    def session(self) -> int | None:
        """The tag of the client's session, as of ``RowStates.touch``."""
        return None if self.ahead else self.context.session

    @property
    def pinned(self) -> tuple[ClassRows, ...]:
        """All rows that it has pinned."""
        return self.hit.parts + self.hit.spares

    @property
    def void(self) -> bool:
        """Whether nobody waits for it, or its namespace was cleared since it began."""
        return self.asker_gone or self.epoch != self.namespace.epoch


class Asker(NamedTuple):
    """Who gets the answer to a promotion: the message ``seq`` of a ``connection``, or ``NOBODY``.
    It counts for ``owner`` (law 12)."""

    connection: int
    seq: int
    owner: str
    request: str


def promotion_of(
    number: int,
    asker: Asker,
    view: PrefixView,
    span: tuple[float, float],
    readers: Collection[int],
    context: RequestContext,
) -> Promotion:
    """A promotion of the rows that ``view`` lacks. ``span``: its begin and its deadline."""
    ns, keys, rest, start = view.ns, view.keys, view.rest, view.start
    homes = [np.full(len(keys), NOT_ASKED, np.int64) for _ in ns.classes]
    arrays_bytes = keys.nbytes + rest.nbytes + start.nbytes + sum(home.nbytes for home in homes)
    return Promotion(
        id=number,
        connection=asker.connection,
        seq=asker.seq,
        instance=asker.owner,
        request=asker.request,
        readers=set(readers),
        namespace=ns,
        epoch=ns.epoch,
        keys=keys,
        rest=rest,
        start=start,
        first=view.first,
        begun=span[0],
        deadline=span[1],
        size_bytes=PROMOTION_BYTES + len(asker.request) + arrays_bytes,
        spare=view.spare,
        homes=homes,
        context=context,
    )


class Promotions(Ledger[Promotion]):
    """All open promotions."""

    def __init__(self) -> None:
        super().__init__()
        self.going: dict[int, None] = {}
        """Numbers of the promotions whose wait is over, oldest first. Each step continues some."""
        self.numbers = itertools.count(1)
