"""Who holds what: leases (reading) and reservations (writing), and the clock that ends them.

Law of this file: nothing is anonymous. Every entry belongs to an (instance, request) and names the
ranks that still owe a release or a commit (law 2). Entries are records; what follows from a change
is the machine's business.
"""

from __future__ import annotations

import heapq

import msgspec

from kvass.types import I64Array


class ClassRows(msgspec.Struct, frozen=True):
    """Rows of one row class, in chunk order."""

    row_class: int
    rows: I64Array


class Lease(msgspec.Struct):
    """Pins on rows, until every rank in ``owing`` released or ``deadline`` passed.

    ``chunks`` long; the rows of a part are of the last of them, and not all parts need be whole.
    """

    id: int
    instance: str
    request: str
    chunks: int
    parts: tuple[ClassRows, ...]
    owing: set[int]
    deadline: float
    handed_over: bool = False


class Reservation(msgspec.Struct):
    """Rows being written by the ranks in ``owing``.

    ``discarded``: will publish nothing, whatever its writers still say; its rows are QUARANTINED.
    ``dirty``: of writers that were lost, by session: until when their DMA may still land. Infinity:
    until their process has ended.
    """

    id: int
    instance: str
    request: str
    parts: tuple[ClassRows, ...]
    owing: set[int]
    deadline: float
    epoch: int
    size_bytes: int
    handed_over: bool = False
    discarded: bool = False
    dirty: dict[int, float] = {}

    def settled(self, now: float) -> bool:
        """Whether nobody can write to its slots any more."""
        return not self.owing and all(until <= now for until in self.dirty.values())


class Ledger:
    """All leases and reservations by id, by instance, and by when something is due."""

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        self.leases_of: dict[str, set[int]] = {}
        self.reservations_of: dict[str, set[int]] = {}
        self.bytes_of: dict[str, int] = {}
        """Reserved + quarantined bytes per instance (law 12)."""
        self._due: list[tuple[float, int]] = []
        self._next = 1

    def issued(self, an_id: int) -> bool:
        """Whether ``an_id`` was ever given to a lease or a reservation of this boot."""
        return 0 < an_id < self._next

    def new_id(self) -> int:
        """A number that no lease or reservation of this boot had."""
        self._next += 1
        return self._next - 1

    def add_lease(self, lease: Lease) -> None:
        self.leases[lease.id] = lease
        self.leases_of.setdefault(lease.instance, set()).add(lease.id)
        self.wake_at(lease.deadline, lease.id)

    def drop_lease(self, lease: Lease) -> None:
        del self.leases[lease.id]
        _discard(self.leases_of, lease.instance, lease.id)

    def add_reservation(self, reservation: Reservation) -> None:
        self.reservations[reservation.id] = reservation
        self.reservations_of.setdefault(reservation.instance, set()).add(reservation.id)
        self.bytes_of[reservation.instance] = (
            self.bytes_of.get(reservation.instance, 0) + reservation.size_bytes
        )
        self.wake_at(reservation.deadline, reservation.id)

    def drop_reservation(self, reservation: Reservation) -> None:
        del self.reservations[reservation.id]
        _discard(self.reservations_of, reservation.instance, reservation.id)
        left = self.bytes_of[reservation.instance] - reservation.size_bytes
        if left:
            self.bytes_of[reservation.instance] = left
        else:
            del self.bytes_of[reservation.instance]

    def wake_at(self, when: float, an_id: int) -> None:
        """Have ``due`` name ``an_id`` once ``when`` has come."""
        heapq.heappush(self._due, (when, an_id))
        live = len(self.leases) + len(self.reservations)
        if len(self._due) > 4 * live + 4096:  # most were settled long before their time
            self._due = [d for d in self._due if d[1] in self.leases or d[1] in self.reservations]
            heapq.heapify(self._due)

    def due(self, now: float, most: int) -> list[int]:
        """Ids whose time has come, each perhaps settled or renewed since: the caller looks.

        At most ``most`` of them: the next call gives the rest.
        """
        ids: list[int] = []
        while self._due and self._due[0][0] <= now and len(ids) < most:
            ids.append(heapq.heappop(self._due)[1])
        return ids

    @property
    def next_due(self) -> float | None:
        """When ``due`` will have something; entries settled meanwhile are skipped."""
        while self._due:
            when, an_id = self._due[0]
            if an_id in self.leases or an_id in self.reservations:
                return when
            heapq.heappop(self._due)
        return None


def _discard(index: dict[str, set[int]], instance: str, an_id: int) -> None:
    ids = index[instance]
    ids.discard(an_id)
    if not ids:
        del index[instance]
