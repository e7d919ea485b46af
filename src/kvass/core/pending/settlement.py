"""Leases and reservations as they are opened and settled, and what that does to the rows.

Every way a lease or reservation can end is here, and each ends once. A lease ends when its last
owing rank released or its deadline passed. A reservation is *settled* when no rank owes a commit
any more and no device of a lost writer may still write. Only then are its slots freed or made
readable (law 3). A commit counts only while its reservation is not discarded (laws 4, 8).

When does a lost writer's device stop writing? EOF on its socket proves nothing: a process that
exits closes our socket before or after the GPU's files, and only releasing these stops the GPU. The
end of the process proves it, because the kernel releases a process's files first. So

- if the process was seen to be exiting at EOF, its slots wait for its end, however long that takes;
- if not, it either lives on (a client of kvass closes its socket only when its copies have ended)
  or cannot be seen. Its slots wait for ``dma_grace_s``, or for its end if that is seen sooner.

After the end they wait ``DEVICE_S`` more. Not covered: a device that was started by another process
than the one that connected, and a device whose driver goes on after it was released.

Where many end at once, they are ended ``slice_ends`` at a time, in this step and later ones. A
message that names one of them meanwhile finds it ended: by its deadline, or because ``settle`` ends
it first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from kvass.core.pending.ledger import Lease, Ledger, Reservation, soonest
from kvass.core.rows.row_states import RowStates
from kvass.core.rows.row_table import ClassRows
from kvass.types import DEVICE_S, SCHEDULER, Timing

MOVED: Final = -2


class Loss(msgspec.Struct):
    """A session that was lost, and the leases and reservations that it may still owe.

    ``rank``: whose it was; ``MOVED``: nobody's, the instance has moved to another generation.
    ``until``: when its device may still write; infinity: until its process ends.
    """

    rank: int
    session: int
    until: float
    ids: set[int]


class Settlement:
    """Leases and reservations, and the ``rows`` that they hold."""

    def __init__(
        self, rows: RowStates, timing: Timing, counters: dict[str, int], slice_ends: int
    ) -> None:
        self.rows = rows
        self.now = -math.inf
        """Of the step in progress (``lapse``)."""
        self.leases = Ledger[Lease]()
        self.reservations = Ledger[Reservation]()
        self.published: list[ClassRows] = []
        """Rows that became READY and were not queued for tiers yet (``flush``)."""
        self.woken: list[int] = []
        """Lookups whose writers are done, or will publish nothing (``promote.go_on``)."""
        self._counters = counters
        self._timing = timing
        self._slice_ends = slice_ends
        self._losses: deque[Loss] = deque()
        self._next = 1

    def issued(self, an_id: int) -> bool:
        """Whether a lease or a reservation of this boot ever had that number."""
        return 0 < an_id < self._next

    def _new_id(self) -> int:
        self._next += 1
        return self._next - 1

    # ------------------------------------------------------------ leases

    def lend(
        self, instance: str, request: str, parts: tuple[ClassRows, ...], readers: set[int]
    ) -> Lease:
        """Pin ``parts`` for ``readers``, each of which owes one release."""
        for part in parts:
            self.rows.pin(part.rows)
            self.rows.table.read[part.rows] = True
        lease = Lease(
            id=self._new_id(),
            instance=instance,
            request=request,
            deadline=self.now + self._timing.lease_s,
            parts=parts,
            owing=readers,
        )
        self.leases.add(lease)
        return lease

    def release(self, lease: Lease, rank: int) -> None:
        """``rank`` is done reading; a second release changes nothing."""
        lease.owing.discard(rank)
        if not lease.owing:
            self.end_lease(lease)

    def end_lease(self, lease: Lease) -> None:
        """Nobody reads under this lease any more, or nobody's reading counts."""
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
        """``rank`` wrote its shard of every row."""
        if reservation.deadline <= self.now:
            self.discard(reservation, "late")
        if reservation.parts[0].row_class not in self.rows.classes.by_id:
            self.discard(reservation, "cleared")
        reservation.owing.discard(rank)
        self._settle(reservation)

    def abort(self, reservation: Reservation, rank: int) -> None:
        """``rank`` will not write any more, and has not written all."""
        if rank in reservation.owing:
            self.discard(reservation, "aborted")
            reservation.owing.discard(rank)
            self._settle(reservation)

    def cancel(self, reservation: Reservation) -> None:
        """No rank was ever told of it: nobody writes."""
        self.discard(reservation, "cancelled")
        reservation.owing.clear()
        self._settle(reservation)

    def discard(self, reservation: Reservation, reason: str) -> None:
        """Whatever its writers still say, nothing of it is published."""
        if not reservation.discarded:
            reservation.discarded = True
            self._counters[f"discarded_{reason}"] += 1
            self._wake(reservation)
            for part in reservation.parts:
                self.rows.discard(part.rows)

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
                self.published.append(ClassRows(part.row_class, rows))

    def _wake(self, reservation: Reservation) -> None:
        self.woken += sorted(reservation.waiters)
        reservation.waiters.clear()

    # ------------------------------------------------------------ time and death

    def lapse(self, now: float) -> None:
        """A step begins: end leases, discard reservations and free slots whose time has come."""
        self.now = now
        if self._losses:
            self._carry_out_losses()
        leases = self.leases.due(now, self._slice_ends)
        for lease in leases:
            self._counters["lapsed_leases"] += 1
            self.end_lease(lease)
        for reservation in self.reservations.due(now, self._slice_ends - len(leases)):
            if reservation.deadline <= now:
                self.discard(reservation, "late")
            self._settle(reservation)

    @property
    def next_due(self) -> float | None:
        if self._losses:
            return self.now
        return soonest(self.leases.next_due, self.reservations.next_due)

    def rank_lost(self, instance: str, rank: int, session: int, exiting: bool) -> float | None:
        """A worker's EOF settles what that rank owes: only its device may still write.

        Returns until when it may; None: the rank was not writing.
        """
        until = math.inf if exiting else self.now + self._timing.dma_grace_s
        writing = any(rank in r.owing for r in self.reservations.of(instance).values())
        self.lost(instance, rank, session, until)
        return until if writing else None

    def process_ended(self, session: int) -> None:
        """The process behind a lost session ended: its device writes ``DEVICE_S`` more at most."""
        until = self.now + min(DEVICE_S, self._timing.dma_grace_s)
        for loss in self._losses:
            if loss.session == session:
                loss.until = min(loss.until, until)
        for reservation in [r for r in self.reservations.all.values() if r.writing_until]:
            if until < reservation.writing_until.get(session, 0.0):
                self._wait_for_device(reservation, session, until)

    def settle(self, an_id: int) -> None:
        """A message names ``an_id``: what it lost is carried out now."""
        for loss in self._losses:
            if an_id in loss.ids:
                loss.ids.discard(an_id)
                self._lose(loss, an_id)

    def lost(self, instance: str, rank: int, session: int = 0, until: float = 0.0) -> None:
        """A session of ``instance`` was lost, or the instance ``MOVED`` to other weights: what that
        ends is ended, a slice of it now."""
        ids = {*self.leases.of(instance), *self.reservations.of(instance)}
        self._losses.append(Loss(rank, session, until, ids))
        self._carry_out_losses()

    def _carry_out_losses(self) -> None:
        left = self._slice_ends
        while self._losses and left:
            loss = self._losses[0]
            while loss.ids and left:
                self._lose(loss, loss.ids.pop())
                left -= 1
            if not loss.ids:
                self._losses.popleft()

    def _lose(self, loss: Loss, an_id: int) -> None:
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
                self._wait_for_device(reservation, loss.session, loss.until)

    def _wait_for_device(self, reservation: Reservation, session: int, until: float) -> None:
        """What ``session`` was writing may change until then; infinity: until its process ends."""
        reservation.writing_until[session] = until
        if until < math.inf:
            self.reservations.wake_at(until, reservation)
        self._settle(reservation)

    def presume_handed_over(self, instance: str) -> None:
        """Messages of the scheduler were lost: its ranks may know of anything it was given."""
        for entry in self._of(instance):
            entry.handed_over = True

    def owes(self, instance: str, rank: int) -> bool:
        """Whether a worker may still read or write under something it was handed."""
        return any(rank in entry.owing for entry in self._of(instance))

    def _of(self, instance: str) -> Iterator[Lease | Reservation]:
        yield from self.leases.of(instance).values()
        yield from self.reservations.of(instance).values()
