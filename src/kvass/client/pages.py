"""The client of an engine whose unit of storage is a page with a key: leases and grants for any
thread, one call each.

Laws of this file:

- A call returns within its bound, and other threads use the client meanwhile: no thread keeps the
  lock for longer than ``TURN_S`` and one message.
- Every lease and every grant that a call returns was handed over: the caller settles it as rank 0,
  by ``end_read`` or ``end_write``. What a call does not return it has given back.
- What was begun in one generation gets nothing of another one.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from kvass.client.endpoint import TURN_S
from kvass.client.lookups import Match, Pending
from kvass.client.parallel import ParallelStrategy
from kvass.client.scheduler import SchedulerClient
from kvass.client.worker import ArenaLease, WorkerClient
from kvass.messages import Granted, Ping, Pong, Presence, Present, ReserveItem
from kvass.types import RankLayout

ANSWER_S: Final = 0.25
"""How long a call waits for an answer that the daemon sends at once."""
TIERS_S: Final = 1.0
"""How long ``present`` waits for tiers."""


class PageClient:
    """The two sessions of an engine that is one process: its scheduler and its rank 0.

    ``fields``: the namespace. ``layout``: of one group, whose row is a page of ``page_tokens``
    tokens. ``name``: the model's, for people. ``daemon_uid``: as in ``Endpoint``.
    """

    def __init__(
        self,
        socket: str,
        fields: Mapping[str, str],
        layout: RankLayout,
        page_tokens: int,
        name: str = "",
        daemon_uid: int | None = None,
    ) -> None:
        one, instance = ParallelStrategy(), f"pages-{uuid.uuid4().hex}"
        registration = one.register(instance, fields, page_tokens, model=name)
        self._scheduler = SchedulerClient(
            socket, registration, step_wait_s=TURN_S, reserve_wait_s=TURN_S, daemon_uid=daemon_uid
        )
        registration = one.at(0).register(instance, fields, page_tokens, layout, model=name)
        self._rank = WorkerClient(socket, registration, daemon_uid=daemon_uid)
        self._lock = threading.Lock()  # the scheduler's client is made for one thread
        self._names = itertools.count(1)
        self.generation = 0
        """Changes with each clear and each new generation, while the lock is held."""
        self._scheduler.start()
        self._rank.start()

    @property
    def connected(self) -> bool:
        return self._scheduler.connected and self._rank.connected

    @property
    def features(self) -> tuple[str, ...]:
        """What the daemon can do beside protocol 1."""
        session = self._scheduler.session
        return () if session is None else session.welcome.features

    @property
    def has_tiers(self) -> bool:
        session = self._scheduler.session
        return session is not None and session.welcome.tiers > 0

    @property
    def most_keys(self) -> int:
        """The most keys of one call; 0: there is no daemon."""
        session = self._scheduler.session
        return 0 if session is None else session.welcome.limits.keys_per_message

    def close(self) -> None:
        self._scheduler.close()
        self._rank.close()

    # ------------------------------------------------------------ reading

    def match(
        self, keys: Sequence[bytes], first: int, tenant: str, generation: int, read: bool
    ) -> Match | None:
        """The rows of the longest run of ``keys`` from number ``first`` on, promoted from tiers if
        need be. Those before it are marked as used. None: there are none, or ``generation`` is
        over.

        ``read``: the lease was handed over; settle it with ``end_read``. Otherwise it was given
        back, and only the number of rows counts.
        """
        name, digests, width = f"{next(self._names)}", b"".join(keys), len(keys[0])
        try:
            while True:
                with self._lock:
                    if generation != self.generation:
                        return None
                    self._scheduler.new_step()
                    found = self._scheduler.match(name, digests, width, first, tenant=tenant)
                    if not isinstance(found, Pending):
                        return self._taken(name, read)
                time.sleep(TURN_S)
        finally:
            with self._lock:
                self._scheduler.give_back(name)

    def _taken(self, name: str, read: bool) -> Match | None:
        match = self._scheduler.take(name)
        if match is None:
            return None
        if read and self._scheduler.handed_over([match.lease], [], match.boot):
            return match
        self._scheduler.release(match.boot, match.lease)
        return None if read else match

    def end_read(self, match: Match) -> None:
        """No byte of the match's rows is read any more."""
        self._rank.release(match.boot, match.lease)

    def present(self, keys: Sequence[bytes], tiers: bool, generation: int) -> list[bool] | None:
        """Which of ``keys`` have a row in L1, or with ``tiers`` in L1 or a tier. No row is promoted
        or marked as used. None: there is no answer, or ``generation`` is over."""
        message = Present(digests=b"".join(keys), width=len(keys[0]), tiers=tiers)
        with self._lock:
            self._scheduler.new_step()
            if self._scheduler.resetting or generation != self.generation:
                return None
        reply = self._scheduler.ask(message, TIERS_S if tiers else ANSWER_S)
        if not isinstance(reply, Presence) or generation != self.generation:
            return None
        return [byte == 1 for byte in reply.held]

    # ------------------------------------------------------------ writing

    def reserve(
        self, keys: Sequence[bytes], first: int, tenant: str, generation: int
    ) -> Granted | None:
        """Slots for those of ``keys`` from number ``first`` on that have no row. The only grant may
        have none; else settle it with ``end_write``. None: there is no answer, or ``generation`` is
        over."""
        item = ReserveItem(f"{next(self._names)}", b"".join(keys), first, 1, tenant)
        deadline_s = time.monotonic() + ANSWER_S
        with self._lock:
            if generation != self.generation:
                return None
            self._scheduler.new_step()
            if self._scheduler.silent_s > ANSWER_S:
                return None
            reserving = self._scheduler.begin_reserve([item], len(keys[0]))
        while reserving is not None:
            with self._lock:
                self._scheduler.new_step()
                granted = self._scheduler.granted(reserving)
                if not isinstance(granted, Pending):
                    return self._ours(granted)
                if time.monotonic() >= deadline_s:
                    self._scheduler.give_up(reserving)
                    return None
            time.sleep(TURN_S / 4)
        return None

    def _ours(self, granted: Granted | None) -> Granted | None:
        if granted is None:
            return None
        number = granted.grants[0].reservation
        if not number or self._scheduler.handed_over([], [number], granted.boot):
            return granted
        self._scheduler.abort(granted.boot, number)
        return None

    def end_write(self, granted: Granted, whole: bool) -> bool:
        """No byte of the granted rows is written any more. ``whole``: all were written. Returns
        whether the rows can be read now, as far as is known."""
        number = granted.grants[0].reservation
        if not whole:
            self._rank.abort(granted.boot, number)
            return False
        self._rank.commit(granted.boot, number)
        pong = self._rank.ask(Ping(), ANSWER_S)  # it comes after the commit was carried out
        return isinstance(pong, Pong) and time.monotonic() < granted.deadline_s

    # ------------------------------------------------------------ both

    def arena(self, given: Match | Granted) -> ArenaLease | None:
        """The arena in which these rows are; None: they may be others' by now."""
        return self._rank.arena(given.boot, given.given_s)

    def new_generation(self, token: bytes) -> bool:
        """Move to the namespace of the generation ``token``, or of one that no other engine has.
        False: the daemon has not confirmed it yet. Nothing matches and nothing is reserved until it
        has."""
        with self._lock:
            self.generation += 1
            self._scheduler.new_step()
            self._scheduler.new_generation(token)
        return self._confirmed(ANSWER_S)

    def clear(self, timeout_s: float) -> bool:
        """Forget the rows of this namespace. False: it was not confirmed in time. Nothing matches
        and nothing is reserved until it is."""
        with self._lock:
            self.generation += 1
            self._scheduler.clear(0.0)
        return self._confirmed(timeout_s)

    def _confirmed(self, timeout_s: float) -> bool:
        """Wait for the confirmation of all resets."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._scheduler.new_step()
                if not self._scheduler.resetting:
                    return self._scheduler.connected
            if time.monotonic() >= deadline_s or not self._scheduler.connected:
                return False
            time.sleep(TURN_S)
