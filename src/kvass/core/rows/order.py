"""The order in which the rows of a class go, and the victims that a search finds in it.

Law of this file: an order names rows and evicts none.

*Ranks* make rows and extent sets comparable: what has the lowest rank goes first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kvass.core.rows.causes import Cause
from kvass.types import I64Array


class Victims(NamedTuple):
    """Rows of a class that may be evicted now; the first of them goes first. There may be none.

    ``cause``: why they leave. ``rank``: extent sets of other classes whose rank is lower go rather
    than these rows; ``None``: no set does. ``last``: also the sets that go last may go.
    """

    rows: I64Array
    cause: Cause
    rank: int | None = None
    last: bool = False


class Search(Protocol):
    """The search for victims in one class, for one request."""

    def victims(self, count: int) -> Iterator[Victims]:
        """At most ``count`` rows at a time, in the order in which they go. The caller takes those
        that it can, and asks anew if it needs more."""


class Order(ABC):
    """The order in which the rows of one class go."""

    @abstractmethod
    def fill(self, rows: I64Array, stamps: I64Array) -> None:
        """Begin with READY ``rows``. ``stamps``: those of the table, ascending."""

    @abstractmethod
    def touched(self, rows: I64Array, stamps: I64Array) -> None:
        """``rows`` were used. ``stamps``: their new stamps in the table, ascending."""

    @abstractmethod
    def evict_first(self, rows: I64Array) -> None:
        """Have ``rows``, each named once, go before all others of the class."""

    @abstractmethod
    def first(self) -> I64Array:
        """The rows that ``evict_first`` was given, and that were not used or freed since."""

    @abstractmethod
    def oldest(self, count: int, protect: int) -> I64Array:
        """At most ``count`` rows that go next, with a stamp below ``protect``."""

    @abstractmethod
    def search(self, protect: int) -> Search:
        """Begin to look for victims among the rows with a stamp below ``protect``."""
