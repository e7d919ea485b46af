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
they are carried out ``slice_ends`` at a time, in this step and later ones. Who names one meanwhile
finds it ended: its deadline says so, or ``settle`` carries it out first.

A commit counts only while its reservation is not discarded; it is discarded by its deadline, by a
rank's abort or death, by a clear of its namespace, or when its instance moves to another one
(laws 4, 8).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np

from kvass.core.l1 import L1
from kvass.core.leases import Lease, Ledger, Part, Reservation
from kvass.core.rows import QUARANTINED, WRITING
from kvass.types import DEVICE_S, SCHEDULER, Timing

MOVED: Final = -2


class Loss(msgspec.Struct):
    """A session that was lost, and the numbers of what it may owe still. Its device may write
    ``until`` then (infinity: until its process ends). ``rank``: ``MOVED`` if it is not lost, but
    its instance has moved to another generation."""

    rank: int
    session: int
    until: float
    ids: set[int]


class Custody:
    """The ledger and L1, moved together."""

    def __init__(self, l1: L1, timing: Timing, slice_ends: int = 64) -> None:
        self.l1 = l1
        self.ledger = Ledger()
        self.discards: Counter[str] = Counter()
        """Reservations discarded, by reason."""
        self.lapsed_leases = 0
        self.published: list[Part] = []
        """What became READY and nobody has taken note of: emptied by whoever wants to know."""
        self._timing = timing
        self._slice_ends = slice_ends
        self._losses: deque[Loss] = deque()

    # ------------------------------------------------------------ leases

    def lend(
        self,
        instance: str,
        request: str,
        chunks: int,
        parts: tuple[Part, ...],
        readers: set[int],
        now: float,
    ) -> Lease:
        """Pin ``parts`` for ``readers``, each of which owes one release."""
        for part in parts:
            self.l1.pin(part.rows)
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
            self.l1.unpin(part.rows)

    # ------------------------------------------------------------ reservations

    def reserve(
        self,
        instance: str,
        request: str,
        parts: tuple[Part, ...],
        writers: set[int],
        epoch: int,
        now: float,
    ) -> Reservation:
        """Record that ``writers`` each owe a commit on the WRITING rows of ``parts``."""
        one = Reservation(
            id=self.ledger.new_id(),
            instance=instance,
            request=request,
            parts=parts,
            owing=writers,
            deadline=now + self._timing.reserve_s,
            epoch=epoch,
            size_bytes=sum(
                len(p.rows) * self.l1.classes[p.row_class].spec.row_bytes for p in parts
            ),
        )
        self.ledger.add_reservation(one)
        return one

    def commit(self, one: Reservation, rank: int, epoch: int | None, now: float) -> None:
        """``rank`` wrote its shard of every row; ``epoch`` is the namespace's now, if
        there still is one."""
        if one.deadline <= now:
            self.discard(one, "late")
        if one.epoch != epoch:
            self.discard(one, "cleared")
        one.owing.discard(rank)
        self._settle(one, now)

    def abort(self, one: Reservation, rank: int, now: float) -> None:
        """``rank`` will not write any more, and has not written all."""
        if rank in one.owing:
            self.discard(one, "aborted")
            one.owing.discard(rank)
            self._settle(one, now)

    def cancel(self, one: Reservation, now: float) -> None:
        """No rank was ever told of it: nobody writes."""
        self.discard(one, "cancelled")
        one.owing.clear()
        self._settle(one, now)

    def discard(self, one: Reservation, reason: str) -> None:
        """Whatever its writers still say, nothing of it is published."""
        if not one.discarded:
            one.discarded = True
            self.discards[reason] += 1
            for part in one.parts:
                self.l1.discard(part.rows)

    def distrust(self, instance: str, now: float) -> None:
        """The instance's weights were replaced: it may have written with both what it has open."""
        ids = set(self.ledger.reservations_of.get(instance, ()))
        self._losses.append(Loss(MOVED, 0, now, ids))
        self._carry_out_losses(now)

    def _settle(self, one: Reservation, now: float) -> None:
        if not one.settled(now):
            return
        self.ledger.drop_reservation(one)
        for part in one.parts:
            if one.discarded:
                self.l1.free(part.rows)
            else:
                self.l1.publish(part.rows)
                self.published.append(part)

    # ------------------------------------------------------------ time and death

    def lapse(self, now: float) -> None:
        """Carry out what is due: leases end, late reservations are discarded, slots come clean."""
        self._carry_out_losses(now)
        for an_id in self.ledger.due(now, self._slice_ends):
            lease = self.ledger.leases.get(an_id)
            if lease is not None and lease.deadline <= now:
                self.lapsed_leases += 1
                self.end_lease(lease)
            one = self.ledger.reservations.get(an_id)
            if one is not None:
                if one.deadline <= now:
                    self.discard(one, "late")
                self._settle(one, now)

    @property
    def losing(self) -> bool:
        """Whether more was lost than was carried out: ``lapse`` goes on with it."""
        return bool(self._losses)

    def behind(self, now: float) -> bool:
        """Whether more has ended than was carried out."""
        due = self.ledger.next_due
        return self.losing or (due is not None and due <= now)

    def rank_lost(
        self, instance: str, rank: int, session: int, exiting: bool, now: float
    ) -> float | None:
        """A worker's EOF settles that rank's debts: all it may still do is finish a DMA.

        Until when that may be; None: it was not writing.
        """
        until = math.inf if exiting else now + self._timing.dma_grace_s
        writing = any(rank in one.owing for one in self._reservations(instance))
        self._losses.append(Loss(rank, session, until, self._ids(instance)))
        self._carry_out_losses(now)
        return until if writing else None

    def process_ended(self, session: int, now: float) -> None:
        """The process behind a lost session is gone: its DMA is over, but for ``DEVICE_S``."""
        until = now + min(DEVICE_S, self._timing.dma_grace_s)
        for loss in self._losses:
            if loss.session == session:
                loss.until = min(loss.until, until)
        dirty = [one for one in self.ledger.reservations.values() if one.dirty]
        for one in dirty:
            if until < one.dirty.get(session, 0.0):
                self._soil(one, session, until, now)

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
        left = self._slice_ends
        while self._losses and left:
            loss = self._losses[0]
            while loss.ids and left:
                self._lose(loss, loss.ids.pop(), now)
                left -= 1
            if not loss.ids:
                self._losses.popleft()

    def _lose(self, loss: Loss, an_id: int, now: float) -> None:
        lease, one = self.ledger.leases.get(an_id), self.ledger.reservations.get(an_id)
        if loss.rank == SCHEDULER:
            self._scheduler_lost(lease, one, now)
        elif loss.rank == MOVED:
            if one is not None:
                self.discard(one, "moved")
        else:
            self._rank_lost(lease, one, loss, now)

    def _rank_lost(
        self, lease: Lease | None, one: Reservation | None, loss: Loss, now: float
    ) -> None:
        if lease is not None:
            self.release(lease, loss.rank)
        if one is not None and loss.rank in one.owing:
            self.discard(one, "writer_lost")
            one.owing.discard(loss.rank)
            self._soil(one, loss.session, loss.until, now)

    def _soil(self, one: Reservation, session: int, until: float, now: float) -> None:
        """What ``session`` was writing may change until then; infinity: until its process ends."""
        one.dirty[session] = until
        if until < math.inf:
            self.ledger.wake_at(until, one.id)
        self._settle(one, now)

    def _scheduler_lost(self, lease: Lease | None, one: Reservation | None, now: float) -> None:
        if lease is not None and not lease.handed_over:
            self.end_lease(lease)
        if one is not None and not one.handed_over:
            self.cancel(one, now)

    def presume_handed_over(self, instance: str) -> None:
        """The scheduler's words were lost: its ranks may know of anything it was given."""
        for lease in self._leases(instance):
            lease.handed_over = True
        for one in self._reservations(instance):
            one.handed_over = True

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

    # ------------------------------------------------------------ laws

    def validate(self, now: float, others: Iterable[Part] = ()) -> None:
        """Assert that ledger and rows tell the same story (laws 2, 3, 6, 12).

        ``others``: what promotions and flushes have pinned.
        """
        table, pins, written = self.l1.table, dict[int, int](), dict[int, int]()
        behind = self.behind(now)
        for lease in self.ledger.leases.values():
            assert lease.owing, "a lease that nobody owes is still held"
            assert lease.deadline > now or behind, "a lease outlived its deadline"
            for part in lease.parts:
                for row in set(part.rows.tolist()):
                    pins[row] = pins.get(row, 0) + 1
        for part in others:
            for row in set(part.rows.tolist()):
                pins[row] = pins.get(row, 0) + 1
        pinned = np.flatnonzero(table.pins)
        counted = dict(zip(pinned.tolist(), table.pins[pinned].tolist(), strict=True))
        assert counted == pins, f"rows count the pins {counted}, leases {pins}"
        owed = dict[str, int]()
        for one in self.ledger.reservations.values():
            assert behind or not one.settled(now), "a settled reservation is still held"
            late = one.deadline <= now and not behind
            assert one.discarded or not late, "a reservation outlived its deadline"
            want = QUARANTINED if one.discarded else WRITING
            for part in one.parts:
                for row in part.rows.tolist():
                    assert row not in written, f"row {row} has two reservations"
                    assert table.state[row] == want, f"row {row} is not in its reservation's state"
                    written[row] = one.id
            owed[one.instance] = owed.get(one.instance, 0) + one.size_bytes
        assert owed == self.ledger.bytes_of, "reserved bytes were miscounted"
        held = np.flatnonzero((table.state == WRITING) | (table.state == QUARANTINED))
        assert held.tolist() == sorted(written), "a row in transit belongs to no reservation"
