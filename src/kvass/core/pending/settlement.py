"""Leases and reservations: how they begin and end, and what that does to their rows.

Every way a lease or reservation can end is here, and each ends once. A lease ends when its last
owing rank has released, or at its deadline. A reservation is *settled* when no rank owes a commit
any more and no device of a lost writer may still write. Only then are its slots freed or made
readable (law 3). A commit counts only while its reservation is not discarded (laws 4, 8).

The device (GPU) of a lost writer may write after EOF on the writer's socket. A process that exits
closes the socket before or after the GPU's files, and the GPU stops only when these are released.
The end of the process shows that the GPU has stopped, because the kernel releases a process's files
before that. So there are two cases:

- The process was exiting at EOF. Its slots wait for its end, however long that takes.
- The process is still alive or cannot be seen. A client that is alive closes its socket only after
  its copies. Its slots wait for ``lost_engine_grace_s``, or for its end if that is seen sooner.

After the end of the process the slots wait ``DEVICE_S`` more. Two cases are not covered: a device
that another process than the connected one has started, and a device whose driver continues after
its release.

If many leases and reservations end at once, a step ends ``slice_ends`` of them, and later steps end
the others. If a message names one of the others, ``carry_out_losses_of`` first ends what a lost
connection owed of it, and ``commit`` checks its deadline.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from kvass.core.pending.follow_ups import FirstHit, FollowUps, Published, Woken
from kvass.core.pending.ledger import Lease, Ledger, Reservation, soonest
from kvass.core.rows.causes import Cause
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import ClassRows
from kvass.types import DEVICE_S, SCHEDULER, Timing

FORMER: Final = ""
"""The instance of leases and reservations of former lives. No engine has that name."""
MOVED: Final = -2
"""``Loss.rank`` of an instance that has moved to another generation."""


class Loss(msgspec.Struct):
    """A lost connection, and the leases and reservations that were not ended for it yet.

    ``rank``: the connection's rank; or ``MOVED``, if none was lost. ``until``: how long its
    device may still write; infinity: until its process ends. ``ids``: the numbers of these leases
    and reservations.
    """

    rank: int
    connection: int
    until: float
    ids: set[int]


class Settlement:
    """All open leases and reservations, and what they do to the pins and states of ``rows``."""

    def __init__(
        self,
        rows: RowStates,
        timing: Timing,
        counters: dict[str, int],
        follow_ups: FollowUps,
        slice_ends: int,
    ) -> None:
        self.rows = rows
        self.now = -math.inf
        """The time of the step in progress."""
        self.leases = Ledger[Lease]()
        self.reservations = Ledger[Reservation]()
        self.notes_first_hits = False
        """Whether a tier has left out rows that no lookup had hit (``flush``)."""
        self._counters = counters
        self._follow_ups = follow_ups
        self._timing = timing
        self._slice_ends = slice_ends
        self._losses: deque[Loss] = deque()
        self._next = 1
        self._promise: Callable[[float], None] | None = None
        self._promised = math.inf
        """No lease may end later before ``_promise`` was called."""

    def issued(self, an_id: int) -> bool:
        """Whether a lease or a reservation of this boot ever had that number."""
        return 0 < an_id < self._next

    def _new_id(self) -> int:
        self._next += 1
        return self._next - 1

    # ------------------------------------------------------------ leases

    def begin_lease(
        self, instance: str, request: str, parts: tuple[ClassRows, ...], readers: set[int]
    ) -> Lease:
        """Pin ``parts`` for ``readers``, each of which owes one release."""
        for part in parts:
            self.rows.pin(part.rows)
            if self.notes_first_hits:
                first = part.rows[~self.rows.table.read[part.rows]]
                self._follow_ups.add(FirstHit(part.row_class, first))
            self.rows.table.read[part.rows] = True
        lease = Lease(
            id=self._new_id(),
            instance=instance,
            request=request,
            deadline=self.now + self._timing.lease_s,
            parts=parts,
            owing=readers,
        )
        if self._promise is not None and lease.deadline > self._promised:
            self._promised = lease.deadline
            self._promise(lease.deadline)
        self.leases.add(lease)
        return lease

    def release(self, lease: Lease, rank: int) -> None:
        """``rank`` has finished reading. A second release changes nothing."""
        lease.owing.discard(rank)
        if not lease.owing:
            classes = self.rows.classes.by_id
            for part in lease.parts:
                if (row_class := classes.get(part.row_class)) is not None:  # else it was cleared
                    self._counters["l1_lent_bytes"] += len(part.rows) * row_class.spec.row_bytes
            self.end_lease(lease)

    def end_lease(self, lease: Lease) -> None:
        """End the lease: unpin its rows."""
        self.leases.drop(lease)
        for part in lease.parts:
            self.rows.unpin(part.rows)

    # ------------------------------------------------------------ reservations

    def reserve(
        self,
        instance: str,
        request: str,
        parts: tuple[ClassRows, ...],
        writers: set[int],
    ) -> Reservation:
        """Record that ``writers`` each owe a commit on the WRITING rows of ``parts``."""
        classes = self.rows.classes.by_id
        reservation = Reservation(
            id=self._new_id(),
            instance=instance,
            request=request,
            deadline=self.now + self._timing.reserve_s,
            size_bytes=sum(len(p.rows) * classes[p.row_class].spec.row_bytes for p in parts),
            parts=parts,
            owing=writers,
        )
        for part in parts:
            self.rows.table.loader[part.rows] = reservation.id
        self.reservations.add(reservation)
        return reservation

    def commit(self, reservation: Reservation, rank: int) -> None:
        """``rank`` has written its shard of every row."""
        if reservation.deadline <= self.now:
            self.discard(reservation, "late")
        if reservation.parts[0].row_class not in self.rows.classes.by_id:
            self.discard(reservation, "cleared")
        reservation.owing.discard(rank)
        self._settle(reservation)

    def abort(self, reservation: Reservation, rank: int) -> None:
        """``rank`` has stopped writing before all its shards were written."""
        if rank in reservation.owing:
            self.discard(reservation, "aborted")
            reservation.owing.discard(rank)
            self._settle(reservation)

    def cancel(self, reservation: Reservation) -> None:
        """End a reservation that was never handed over: no rank writes to its rows."""
        self.discard(reservation, "cancelled")
        reservation.owing.clear()
        self._settle(reservation)

    def discard(self, reservation: Reservation, reason: str) -> None:
        """Quarantine the rows of a reservation, so that no later commit makes them READY."""
        if not reservation.discarded:
            reservation.discarded = True
            self._counters[f"discarded_{reason}"] += 1
            self._wake(reservation)
            cause: Cause = "cleared" if reason == "cleared" else "unfinished"
            for part in reservation.parts:
                self.rows.discard(part.rows, cause)

    def _settle(self, reservation: Reservation) -> None:
        if not reservation.settled(self.now):
            return
        self.reservations.drop(reservation)
        self._wake(reservation)
        for part in reservation.parts:
            if reservation.discarded:
                self.rows.free(part.rows)
            else:
                rows = self.rows.publish(part.rows)
                self._follow_ups.add(Published(part.row_class, rows))

    def _wake(self, reservation: Reservation) -> None:
        for promotion in sorted(reservation.waiters):
            self._follow_ups.add(Woken(promotion))
        reservation.waiters.clear()

    # ------------------------------------------------------------ former lives

    def promise_with(self, promise: Callable[[float], None], promised: float) -> None:
        """Call ``promise`` with the deadline of a lease before it is given, so that a next life of
        the daemon knows of it. ``promised``: the latest deadline of former lives."""
        self._promise, self._promised = promise, promised

    def hold(self, parts: list[ClassRows], until: float) -> None:
        """Keep the pins of rows that a former life may have lent until then (law 5). Each of them
        has one pin."""
        for part in parts:
            self.rows.adopt_pins(part.rows)
            self.leases.add(
                Lease(
                    id=self._new_id(),
                    instance=FORMER,
                    request="",
                    deadline=until,
                    size_bytes=self.rows.bytes_of(part.rows),
                    parts=(part,),
                    owing={0},
                    handed_over=True,
                )
            )

    def rest(self, parts: list[ClassRows], until: dict[int, float]) -> None:
        """Keep QUARANTINED rows of a former life from everybody. ``until``: as
        ``Reservation.writing_until``, by ``former_connection``; at least one is finite."""
        for part in parts:
            reservation = Reservation(
                id=self._new_id(),
                instance=FORMER,
                request="",
                deadline=max(when for when in until.values() if when < math.inf),
                size_bytes=self.rows.bytes_of(part.rows),
                parts=(part,),
                owing=set(),
                handed_over=True,
                discarded=True,
                writing_until=dict(until),
            )
            self.rows.table.loader[part.rows] = reservation.id
            self.reservations.add(reservation)
            for when in until.values():
                if when < math.inf:
                    self.reservations.wake_at(when, reservation)

    def drained(self, number: int) -> None:
        """A former worker has no copy of a former life under way any more."""
        connection = former_connection(number)
        for reservation in [*self.reservations.of(FORMER).values()]:
            if reservation.writing_until.pop(connection, None) is not None:
                self._settle(reservation)

    @property
    def resting_bytes(self) -> int:
        """The bytes that may still be read or written because of a former life."""
        return sum(ledger.bytes_of.get(FORMER, 0) for ledger in (self.leases, self.reservations))

    def resting_for(self, numbers: list[int]) -> int:
        """The bytes that rest because one of the former workers ``numbers`` may write to them."""
        connections = {*map(former_connection, numbers)}
        resting = self.reservations.of(FORMER).values()
        return sum(r.size_bytes for r in resting if not connections.isdisjoint(r.writing_until))

    @property
    def may_write(self) -> set[int]:
        """The lost connections whose devices may still write."""
        named = {loss.connection for loss in self._losses}
        for reservation in self.reservations.all.values():
            named.update(reservation.writing_until)
        return named

    # ------------------------------------------------------------ time and death

    def lapse(self, now: float) -> None:
        """End what is due at ``now``: leases, reservations, and waits for devices of lost writers.

        Every step calls this first.
        """
        self.now = now
        if self._losses:
            self._carry_out_losses()
        leases = self.leases.due(now, self._slice_ends)
        for lease in leases:
            self._counters["lapsed_leases"] += lease.instance != FORMER
            self.end_lease(lease)
        for reservation in self.reservations.due(now, self._slice_ends - len(leases)):
            if reservation.deadline <= now:
                self.discard(reservation, "late")
            self._settle(reservation)

    @property
    def next_due(self) -> float | None:
        """When ``lapse`` has something to end; ``None``: never."""
        if self._losses:
            return self.now
        return soonest(self.leases.next_due, self.reservations.next_due)

    def rank_lost(self, instance: str, rank: int, connection: int, exiting: bool) -> float | None:
        """A worker's connection ended: the rank owes nothing any more. Its device may still write.

        Returns the time until which it may; ``None`` if the rank was not writing.
        """
        until = math.inf if exiting else self.now + self._timing.lost_engine_grace_s
        writing = any(rank in r.owing for r in self.reservations.of(instance).values())
        self.lost(instance, rank, connection, until)
        return until if writing else None

    def process_ended(self, connection: int) -> None:
        """The process of a lost connection ended. Its device writes at most ``DEVICE_S`` more."""
        until = self.now + min(DEVICE_S, self._timing.lost_engine_grace_s)
        for loss in self._losses:
            if loss.connection == connection:
                loss.until = min(loss.until, until)
        for reservation in [r for r in self.reservations.all.values() if r.writing_until]:
            if until < reservation.writing_until.get(connection, 0.0):
                self._wait_for_device(reservation, connection, until)

    def carry_out_losses_of(self, an_id: int) -> None:
        """End the lease or reservation ``an_id`` now, if a lost connection owed it.

        A message names it, so it cannot wait for a later step.
        """
        for loss in self._losses:
            if an_id in loss.ids:
                loss.ids.discard(an_id)
                self._end_for(loss, an_id)

    def lost(self, instance: str, rank: int, connection: int = 0, until: float = 0.0) -> None:
        """A connection of ``instance`` was lost, or the instance ``MOVED`` to another generation.

        This step ends some of the leases and reservations that it held. Later steps end the others.
        """
        ids = {*self.leases.of(instance), *self.reservations.of(instance)}
        self._losses.append(Loss(rank, connection, until, ids))
        self._carry_out_losses()

    def _carry_out_losses(self) -> None:
        left = self._slice_ends
        while self._losses and left:
            loss = self._losses[0]
            while loss.ids and left:
                self._end_for(loss, loss.ids.pop())
                left -= 1
            if not loss.ids:
                self._losses.popleft()

    def _end_for(self, loss: Loss, an_id: int) -> None:
        lease, reservation = self.leases.all.get(an_id), self.reservations.all.get(an_id)
        if loss.rank == SCHEDULER:
            if lease is not None and not lease.handed_over:
                self.end_lease(lease)
            if reservation is not None and not reservation.handed_over:
                self.cancel(reservation)
        elif loss.rank == MOVED:
            if reservation is not None:
                self.discard(reservation, "moved")
        else:
            if lease is not None:
                self.release(lease, loss.rank)
            if reservation is not None and loss.rank in reservation.owing:
                self.discard(reservation, "writer_lost")
                reservation.owing.discard(loss.rank)
                self._wait_for_device(reservation, loss.connection, loss.until)

    def _wait_for_device(self, reservation: Reservation, connection: int, until: float) -> None:
        """The device of ``connection`` may write until then; infinity: until its process ends."""
        reservation.writing_until[connection] = until
        if until < math.inf:
            self.reservations.wake_at(until, reservation)
        self._settle(reservation)

    def presume_handed_over(self, instance: str) -> None:
        """Treat all that the instance holds as handed over.

        Messages of its scheduler may be lost, so its ranks may know of any lease or reservation.
        """
        for entry in self._of(instance):
            entry.handed_over = True

    def owes(self, instance: str, rank: int) -> bool:
        """Whether the rank may still read under a lease or write under a reservation."""
        return any(rank in entry.owing for entry in self._of(instance))

    def _of(self, instance: str) -> Iterator[Lease | Reservation]:
        yield from self.leases.of(instance).values()
        yield from self.reservations.of(instance).values()


def former_connection(number: int) -> int:
    """What stands for a former worker in ``Reservation.writing_until``. No connection has it."""
    return -2 - number
