"""Leases, reservations, and the ledger that keeps open entries of one kind.

Every entry belongs to an (instance, request). Leases and reservations name the ranks that still owe
a release or a commit (law 2).
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from kvass.core.agenda import Agenda
from kvass.core.rows.row_table import ClassRows


class Entry(msgspec.Struct, kw_only=True):
    """An open entry of a ledger.

    ``deadline``: CLOCK_MONOTONIC, seconds. ``size_bytes`` counts against a limit (law 12).
    """

    id: int
    instance: str
    request: str
    deadline: float
    size_bytes: int = 0


class Lease(Entry, kw_only=True):
    """Pins on rows, until every rank in ``owing`` has released or ``deadline`` has passed."""

    parts: tuple[ClassRows, ...]
    owing: set[int]
    handed_over: bool = False


class Reservation(Entry, kw_only=True):
    """Rows that the ranks in ``owing`` are writing.

    ``discarded``: its rows are QUARANTINED and will never be READY. ``writing_until``: by the lost
    connection of a writer, how long its device may still write; infinity: until its process ends.
    ``waiters``: the promotions that wait for its rows.
    """

    parts: tuple[ClassRows, ...]
    owing: set[int]
    handed_over: bool = False
    discarded: bool = False
    writing_until: dict[int, float] = {}
    waiters: set[int] = msgspec.field(default_factory=set)

    def settled(self, now: float) -> bool:
        """Whether nobody can write to its slots any more."""
        return not self.owing and all(until <= now for until in self.writing_until.values())


E = TypeVar("E", bound=Entry)


class Ledger(Generic[E]):
    """All open entries of one kind: by number, by instance, and by the time when they are due."""

    def __init__(self) -> None:
        self.all: dict[int, E] = {}
        self.bytes_of: dict[str, int] = {}
        """By instance, the sum of its entries' ``size_bytes`` (law 12)."""
        self._of: dict[str, dict[int, E]] = {}
        self._due = Agenda[tuple[float, int]]()
        self._times: dict[int, tuple[float, ...]] = {}
        """By number, when each entry is due."""

    def of(self, instance: str) -> dict[int, E]:
        """The open entries of an instance, by number."""
        return self._of.get(instance, {})

    def add(self, entry: E) -> None:
        """Open an entry. It is due at its deadline."""
        self.all[entry.id] = entry
        self._of.setdefault(entry.instance, {})[entry.id] = entry
        self.bytes_of[entry.instance] = self.bytes_of.get(entry.instance, 0) + entry.size_bytes
        self.wake_at(entry.deadline, entry)

    def drop(self, entry: E) -> None:
        """Close an open entry. Its bytes no longer count."""
        del self.all[entry.id]
        for when in self._times.pop(entry.id, ()):
            self._due.remove((when, entry.id))
        mine = self._of[entry.instance]
        del mine[entry.id]
        self.bytes_of[entry.instance] -= entry.size_bytes
        if not mine:
            del self._of[entry.instance], self.bytes_of[entry.instance]

    def wake_at(self, when: float, entry: E) -> None:
        """Make ``entry`` due at ``when``. An entry may be due at several times."""
        if when not in (times := self._times.get(entry.id, ())):
            self._times[entry.id] = (*times, when)
            self._due.add((when, entry.id))

    def due(self, now: float, most: int) -> list[E]:
        """At most ``most`` entries that are due. The times at which they were due are forgotten, so
        an entry is due again only at another time of ``wake_at``."""
        found = dict[int, E]()
        while len(found) < most and (first := self._due.first) is not None and first[0] <= now:
            when, number = first
            self._due.remove(first)
            self._times[number] = tuple([t for t in self._times[number] if t != when])
            found[number] = self.all[number]
        return list(found.values())

    @property
    def oldest(self) -> E | None:
        """The open entry that was added first."""
        return next(iter(self.all.values()), None)

    @property
    def next_due(self) -> float | None:
        """When the next entry is due; ``None`` if there is none."""
        return None if (first := self._due.first) is None else first[0]


def soonest(first: float | None, second: float | None) -> float | None:
    """The earlier of two times; ``None`` is never."""
    if first is None or (second is not None and second < first):
        return second
    return first
