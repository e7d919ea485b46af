"""Leases and reservations as they are opened and settled, and what that does to the rows.

Law of this file: every way a lease or reservation can end is here, and each ends once. A lease
ends when its last owing rank released or its deadline passed. A reservation is *settled* when no
rank owes any more and no lost writer's DMA may still land; only then do its slots change hands
(law 3).

When a lost writer's DMA is over. Its EOF alone proves nothing: a process that exits closes our
socket before or after the GPU's files, and only their release stops the GPU. The end of the process
proves it: the kernel releases a process's files before it reports its end. So

- if the process was seen to be exiting at EOF, its slots wait for its end, however long that takes;
  with much pinned memory it takes longer than any grace one would want to wait without need;
- if not, it either lives on (a client of kvass closes its socket only when its copies have ended)
  or cannot be seen. Its slots wait for ``dma_grace_s``, or for its end if that is seen sooner.

After the end they rest ``DEVICE_S`` more. Not covered: a device that was told by another process
than the one that connected (a forked child, or whoever was passed the socket), and one whose driver
goes on after it was released.

Where many end at once (a term of thousands of leases is over, a rank that owed thousands is lost),
they are carried out ``SLICE`` at a time, in this step and later ones. Whoever names one meanwhile
finds it ended: its deadline says so, or ``settle`` carries it out first.

A commit counts only while its reservation is not discarded; it is discarded by its deadline, by a
rank's abort or death, by a clear of its namespace, or when its instance moves to another one
(laws 4, 8).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import msgspec

from kvass.core.leases import ClassRows, Lease, Ledger, Reservation
from kvass.core.row_store import RowStore
from kvass.types import DEVICE_S, SCHEDULER, Timing

SLICE: Final = 64
"""How many leases and reservations end in one step, at most: 2 ms of work."""


MOVED: Final = -2


class Loss(msgspec.Struct):
    """A session that was lost, and the numbers of what it may owe still. Its device may write
    ``until`` then (infinity: until its process ends). ``rank``: ``MOVED`` if it is not lost, but
    its instance has moved to another generation."""

    rank: int
    session: int
    until: float
    ids: set[int]


class Settlement:
    """The ledger and L1, moved together."""

    def __init__(self, store: RowStore, timing: Timing, counters: dict[str, int]) -> None:
        self.store = store
        self.ledger = Ledger()
        self._counters = counters
        self.published: list[ClassRows] = []
        """What became READY and nobody has taken note of: emptied by whoever wants to know."""
        self._timing = timing
        self._losses: deque[Loss] = deque()

    # ------------------------------------------------------------ leases

    def lend(
        self,
        instance: str,
        request: str,
        chunks: int,
        parts: tuple[ClassRows, ...],
        readers: set[int],
        now: float,
    ) -> Lease:
        """Pin ``parts`` for ``readers``, each of which owes one release."""
        for part in parts:
            self.store.pin(part.rows)
        lease = Lease(
            id=self.ledger.new_id(),
            instance=instance,
            request=request,
            chunks=chunks,
            parts=parts,
            owing=readers,
            deadline=now + self._timing.lease_s,
        )
        self.ledger.add_lease(lease)
        return lease

    def renew(self, lease: Lease, now: float) -> float:
        """A full term from now on; returns the new deadline."""
        lease.deadline = now + self._timing.lease_s
        self.ledger.wake_at(lease.deadline, lease.id)
        return lease.deadline

    def release(self, lease: Lease, rank: int) -> None:
        """``rank`` is done reading; a second release changes nothing."""
        lease.owing.discard(rank)
        if not lease.owing:
            self.end_lease(lease)

    def end_lease(self, lease: Lease) -> None:
        """Nobody reads under this lease any more, or nobody's reading counts."""
        self.ledger.drop_lease(lease)
        for part in lease.parts:
            self.store.unpin(part.rows)

    # ------------------------------------------------------------ reservations

    def reserve(
        self,
        instance: str,
        request: str,
        parts: tuple[ClassRows, ...],
        writers: set[int],
        epoch: int,
        now: float,
    ) -> Reservation:
        """Record that ``writers`` each owe a commit on the WRITING rows of ``parts``."""
        reservation = Reservation(
            id=self.ledger.new_id(),
            instance=instance,
            request=request,
            parts=parts,
            owing=writers,
            deadline=now + self._timing.reserve_s,
            epoch=epoch,
            size_bytes=sum(
                len(p.rows) * self.store.classes[p.row_class].spec.row_bytes for p in parts
            ),
        )
        self.ledger.add_reservation(reservation)
        return reservation

    def commit(self, reservation: Reservation, rank: int, epoch: int | None, now: float) -> None:
        """``rank`` wrote its shard of every row; ``epoch`` is the namespace's now, if
        there still is one."""
        if reservation.deadline <= now:
            self.discard(reservation, "late")
        if reservation.epoch != epoch:
            self.discard(reservation, "cleared")
        reservation.owing.discard(rank)
        self._settle(reservation, now)

    def abort(self, reservation: Reservation, rank: int, now: float) -> None:
        """``rank`` will not write any more, and has not written all."""
        if rank in reservation.owing:
            self.discard(reservation, "aborted")
            reservation.owing.discard(rank)
            self._settle(reservation, now)

    def cancel(self, reservation: Reservation, now: float) -> None:
        """No rank was ever told of it: nobody writes."""
        self.discard(reservation, "cancelled")
        reservation.owing.clear()
        self._settle(reservation, now)

    def discard(self, reservation: Reservation, reason: str) -> None:
        """Whatever its writers still say, nothing of it is published."""
        if not reservation.discarded:
            reservation.discarded = True
            self._counters[f"discarded_{reason}"] += 1
            for part in reservation.parts:
                self.store.discard(part.rows)

    def distrust(self, instance: str, now: float) -> None:
        """The instance's weights were replaced: it may have written with both what it has open."""
        ids = set(self.ledger.reservations_of.get(instance, ()))
        self._losses.append(Loss(MOVED, 0, now, ids))
        self._carry_out_losses(now)

    def _settle(self, reservation: Reservation, now: float) -> None:
        if not reservation.settled(now):
            return
        self.ledger.drop_reservation(reservation)
        for part in reservation.parts:
            if reservation.discarded:
                self.store.free(part.rows)
            else:
                self.store.publish(part.rows)
                self.published.append(part)

    # ------------------------------------------------------------ time and death

    def lapse(self, now: float) -> None:
        """Carry out what is due: leases end, late reservations are discarded, slots come clean."""
        self._carry_out_losses(now)
        for an_id in self.ledger.due(now, SLICE):
            lease = self.ledger.leases.get(an_id)
            if lease is not None and lease.deadline <= now:
                self._counters["lapsed_leases"] += 1
                self.end_lease(lease)
            reservation = self.ledger.reservations.get(an_id)
            if reservation is not None:
                if reservation.deadline <= now:
                    self.discard(reservation, "late")
                self._settle(reservation, now)

    def behind(self, now: float) -> bool:
        """Whether more has ended than was carried out: ``lapse`` goes on with it."""
        due = self.ledger.next_due
        return bool(self._losses) or (due is not None and due <= now)

    def rank_lost(
        self, instance: str, rank: int, session: int, exiting: bool, now: float
    ) -> float | None:
        """A worker's EOF settles that rank's debts: all it may still do is finish a DMA.

        Until when that may be; None: it was not writing.
        """
        until = math.inf if exiting else now + self._timing.dma_grace_s
        writing = any(rank in reservation.owing for reservation in self._reservations(instance))
        self._losses.append(Loss(rank, session, until, self._ids(instance)))
        self._carry_out_losses(now)
        return until if writing else None

    def process_ended(self, session: int, now: float) -> None:
        """The process behind a lost session is gone: its DMA is over, but for ``DEVICE_S``."""
        until = now + min(DEVICE_S, self._timing.dma_grace_s)
        for loss in self._losses:
            if loss.session == session:
                loss.until = min(loss.until, until)
        dirty = [
            reservation for reservation in self.ledger.reservations.values() if reservation.dirty
        ]
        for reservation in dirty:
            if until < reservation.dirty.get(session, 0.0):
                self._soil(reservation, session, until, now)

    def scheduler_lost(self, instance: str, session: int, now: float) -> None:
        """A scheduler's EOF cancels only what it never handed over."""
        self._losses.append(Loss(SCHEDULER, session, now, self._ids(instance)))
        self._carry_out_losses(now)

    def settle(self, an_id: int, now: float) -> None:
        """Somebody names ``an_id``: what was lost of it is carried out now."""
        for loss in self._losses:
            if an_id in loss.ids:
                loss.ids.discard(an_id)
                self._lose(loss, an_id, now)

    def _carry_out_losses(self, now: float) -> None:
        left = SLICE
        while self._losses and left:
            loss = self._losses[0]
            while loss.ids and left:
                self._lose(loss, loss.ids.pop(), now)
                left -= 1
            if not loss.ids:
                self._losses.popleft()

    def _lose(self, loss: Loss, an_id: int, now: float) -> None:
        lease, reservation = self.ledger.leases.get(an_id), self.ledger.reservations.get(an_id)
        if loss.rank == SCHEDULER:
            self._scheduler_lost(lease, reservation, now)
        elif loss.rank == MOVED:
            if reservation is not None:
                self.discard(reservation, "moved")
        else:
            self._rank_lost(lease, reservation, loss, now)

    def _rank_lost(
        self, lease: Lease | None, reservation: Reservation | None, loss: Loss, now: float
    ) -> None:
        if lease is not None:
            self.release(lease, loss.rank)
        if reservation is not None and loss.rank in reservation.owing:
            self.discard(reservation, "writer_lost")
            reservation.owing.discard(loss.rank)
            self._soil(reservation, loss.session, loss.until, now)

    def _soil(self, reservation: Reservation, session: int, until: float, now: float) -> None:
        """What ``session`` was writing may change until then; infinity: until its process ends."""
        reservation.dirty[session] = until
        if until < math.inf:
            self.ledger.wake_at(until, reservation.id)
        self._settle(reservation, now)

    def _scheduler_lost(
        self, lease: Lease | None, reservation: Reservation | None, now: float
    ) -> None:
        if lease is not None and not lease.handed_over:
            self.end_lease(lease)
        if reservation is not None and not reservation.handed_over:
            self.cancel(reservation, now)

    def presume_handed_over(self, instance: str) -> None:
        """The scheduler's words were lost: its ranks may know of anything it was given."""
        for lease in self._leases(instance):
            lease.handed_over = True
        for reservation in self._reservations(instance):
            reservation.handed_over = True

    def owes(self, instance: str, rank: int) -> bool:
        """Whether a worker may still read or write under something it was handed."""
        return any(rank in x.owing for x in self._leases(instance)) or any(
            rank in x.owing for x in self._reservations(instance)
        )

    def _ids(self, instance: str) -> set[int]:
        ledger = self.ledger
        return ledger.leases_of.get(instance, set()) | ledger.reservations_of.get(instance, set())

    def _leases(self, instance: str) -> list[Lease]:
        ids = self.ledger.leases_of.get(instance, ())
        return [self.ledger.leases[i] for i in ids]

    def _reservations(self, instance: str) -> list[Reservation]:
        ids = self.ledger.reservations_of.get(instance, ())
        return [self.ledger.reservations[i] for i in ids]
