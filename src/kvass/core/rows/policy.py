"""What a policy of eviction decides: which rows go first when room is needed.

Law of this file: a policy names rows and extent sets in the order in which they go. It evicts
nothing; ``RowAllocator`` does. Who pays for the room is not its matter (``shares.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvass.core.rows.listeners import Listener, Used
from kvass.core.rows.order import Order
from kvass.types import I64Array


class Policy(Listener, ABC):
    """The policy of all classes."""

    @abstractmethod
    def order(self) -> Order:
        """The order of a new class."""

    @abstractmethod
    def begin(self, now: float) -> None:
        """New rows are needed. It is called before each search."""

    @abstractmethod
    def ranks(self, last: bool) -> I64Array:
        """The rank of each extent set; ``STAYS`` if it must stay. ``last``: those that go last may
        go, too."""

    def used(self, told: Used) -> None:
        told.row_class.order.touched(told.rows, told.stamps)
