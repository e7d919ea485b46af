"""Warm starts that are under way: the rows of a namespace that are still to be loaded.

A warm start waits for the lists of its classes (``awaits``), then it has ``parts`` to load. It is
removed when it has none left, or when it may not go on.
"""

from __future__ import annotations

from collections import deque

import msgspec

from kvass.core.rows.row_classes import Namespace, RowClass
from kvass.types import I64Array, U64Array


class WarmPart(msgspec.Struct, frozen=True):
    """Rows that one operation loads, the most recently used first. ``stamps``: what they get as
    the stamps of their last use."""

    row_class: RowClass
    keys: U64Array
    stamps: I64Array

    @property
    def size_bytes(self) -> int:
        return len(self.keys) * self.row_class.spec.row_bytes


class WarmStart(msgspec.Struct, eq=False):
    """The warm start of a namespace.

    ``epoch``: ``Namespace.epoch`` when it began; ``tier_epoch``: the epoch in ``tier`` then.
    ``first_stamp``: the first of the stamps that are reserved for its rows. ``awaits``: how many
    lists have not come. ``lists``: by layer group, the keys of the list. ``planned_bytes``: all
    that it was to load. ``loading_bytes``: what is being loaded.
    """

    namespace: Namespace
    epoch: int
    tier: int
    tier_epoch: int
    first_stamp: int
    awaits: int
    lists: dict[int, U64Array] = msgspec.field(default_factory=dict)
    parts: deque[WarmPart] = msgspec.field(default_factory=deque)
    planned_bytes: int = 0
    loading_bytes: int = 0


class WarmStarts:
    """All warm starts that are under way, by the id of their namespace.

    ``op``: the number of the operation that loads for them; it may have ended. ``room_bytes``: what
    further warm starts may load. ``remember_at``: when lists are given to the tier again.
    ``remembered``: by class id, the newest stamp of the class in its last list.
    """

    def __init__(self, room_bytes: int) -> None:
        self.all: dict[int, WarmStart] = {}
        self.op, self.room_bytes = 0, room_bytes
        self.remember_at = 0.0
        self.remembered: dict[int, int] = {}

    @property
    def left_bytes(self) -> int:
        """The bytes that those under way have still to load."""
        every = self.all.values()
        return sum(w.loading_bytes + sum(part.size_bytes for part in w.parts) for w in every)

    @property
    def planned_bytes(self) -> int:
        """All bytes that those under way were to load."""
        return sum(warm.planned_bytes for warm in self.all.values())
