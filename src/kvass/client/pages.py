"""The client of an engine whose unit of storage is a page with a key: leases and grants for any
thread, one call each.

Laws of this file:

- A call returns within its bound, and other threads use the client meanwhile: no thread keeps the
  lock for longer than ``TURN_S`` and one message.
- Every lease and every grant that a call gives was handed over, while rank 0 was connected: a lease
  is settled as rank 0 at the end of ``read``, a grant by the caller's ``end_write``. What a call
  does not give the scheduler has given back. A rank that the daemon knows, but that does not know
  this yet, could not settle it, and the rows would be held until the deadline.
- What was begun in one generation gets nothing of another one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import msgspec

from kvass.client.endpoint import TURN_S, Endpoint
from kvass.client.lookups import BlockHashes, Match, Pending
from kvass.client.scheduler import SchedulerClient
from kvass.client.worker import ArenaLease, WorkerClient
from kvass.messages import (
    Granted,
    Ping,
    Pong,
    Presence,
    Present,
    Register,
    RequestContext,
    ReserveItem,
)

R = TypeVar("R")
ANSWER_S: Final = 1.0
"""How long a store or a reset waits for an answer that the daemon sends at once. With four busy
processes per core a daemon waited 0.35 s for a core."""
TIERS_S: Final = 1.0
"""How long ``present`` waits for tiers."""


class PageClient:
    """The connections of an engine that is one process: its scheduler and its ranks.

    ``scheduler`` and ``ranks``: how they register. Rank 0 maps the arena, and reads and writes the
    shards of all. ``budget_s``: as ``lookup_budget_s`` of ``SchedulerClient``. ``daemon_uid``: as
    in ``Endpoint``.
    """

    def __init__(
        self,
        socket: str,
        scheduler: Register,
        ranks: Sequence[Register],
        *,
        budget_s: float | None = None,
        daemon_uid: int | None = None,
    ) -> None:
        self._scheduler = SchedulerClient(
            socket,
            scheduler,
            readers=(0,),
            step_wait_s=TURN_S,
            reserve_wait_s=TURN_S,
            lookup_budget_s=budget_s,
            daemon_uid=daemon_uid,
        )
        self._ranks = [
            WorkerClient(socket, each, wants_arena=each.rank == 0, daemon_uid=daemon_uid)
            for each in ranks
        ]
        self._rank = self._ranks[0]
        self._writers = [rank for rank, each in zip(self._ranks, ranks, strict=True) if each.writer]
        self._lock = threading.Lock()  # the scheduler's client is made for one thread
        self._names = itertools.count(1)
        self.generation = 0
        """Changes with each clear and each new generation, while the lock is held."""
        for each in self._every:
            each.start()

    @property
    def _every(self) -> tuple[Endpoint, ...]:
        return self._scheduler, *self._ranks

    @property
    def connected(self) -> bool:
        return all(each.connected for each in self._every)

    @property
    def features(self) -> tuple[str, ...]:
        """What the daemon can do beside protocol 1."""
        connection = self._scheduler.connection
        return () if connection is None else connection.welcome.features

    @property
    def has_tiers(self) -> bool:
        connection = self._scheduler.connection
        return connection is not None and connection.welcome.tiers > 0

    @property
    def most_keys(self) -> int:
        """The most keys of one call; 0: there is no daemon."""
        connection = self._scheduler.connection
        return 0 if connection is None else connection.welcome.limits.keys_per_message

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the daemon. Returns whether it is connected."""
        deadline_s = time.monotonic() + timeout_s
        while not self.connected:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(TURN_S)
        return True

    def close(self) -> None:
        for each in self._every:
            each.close()

    # ------------------------------------------------------------ reading

    def count(
        self, keys: Sequence[bytes], first: int, context: RequestContext, generation: int
    ) -> int:
        """How many of ``keys`` from number ``first`` on have a row, promoted from tiers if need be.
        Those before ``first`` are marked as used, too. 0 if ``generation`` is over."""
        match = self._match(keys, first, context, generation, self._given_back)
        return 0 if match is None else match.chunks - match.first

    @contextmanager
    def read(
        self,
        keys: Sequence[bytes],
        first: int,
        context: RequestContext,
        generation: int,
        blocks: BlockHashes | None = None,
    ) -> Iterator[tuple[Match, ArenaLease] | None]:
        """The rows that ``count`` counts, and the arena in which they are, until the end of the
        ``with``. ``blocks``: as of ``SchedulerClient.look_up``. None: there are none, or they
        cannot be read now."""
        given = self._match(keys, first, context, generation, self._to_read, blocks)
        if given is None:
            yield None
            return
        match, arena = given
        try:
            with arena:
                yield given
        finally:
            self._rank.release(match.boot, match.lease)

    def _match(
        self,
        keys: Sequence[bytes],
        first: int,
        context: RequestContext,
        generation: int,
        take: Callable[[Match], R | None],
        blocks: BlockHashes | None = None,
    ) -> R | None:
        """Look up, and return what ``take`` makes of the match. It is called with the lock held."""
        name, digests, width = f"{next(self._names)}", b"".join(keys), _width(keys)
        try:
            while True:
                with self._lock:
                    if generation != self.generation:
                        return None
                    self._scheduler.new_step()
                    found = self._scheduler.match(name, digests, width, first, context, blocks)
                    if not isinstance(found, Pending):
                        match = self._scheduler.take(name)
                        return None if match is None else take(match)
                time.sleep(TURN_S)
        finally:
            with self._lock:
                self._scheduler.give_back(name)

    def _given_back(self, match: Match) -> Match:
        self._scheduler.release(match.boot, match.lease)
        return match

    def _to_read(self, match: Match) -> tuple[Match, ArenaLease] | None:
        arena = self._rank.arena(match.boot, match.given_s)
        if arena is not None:
            if self._scheduler.handed_over([match.lease], [], match.boot):
                return match, arena
            arena.close()
        self._scheduler.release(match.boot, match.lease)
        return None

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
        self,
        keys: Sequence[bytes],
        first: int,
        context: RequestContext,
        generation: int,
        groups: int = 1,
        blocks: bytes = b"",
    ) -> tuple[Granted, ArenaLease | None] | None:
        """Slots for those of ``keys`` from number ``first`` on that have no row, and the arena in
        which they are. Leave it, and settle the grant with ``end_write``. Without an arena nothing
        was granted. ``groups``, ``blocks``: as in ``ReserveItem``. None: there is no answer, or
        ``generation`` is over."""
        name = f"{next(self._names)}"
        fields = msgspec.structs.asdict(context)
        item = ReserveItem(name, b"".join(keys), first, groups, blocks, **fields)
        deadline_s = time.monotonic() + ANSWER_S
        with self._lock:
            if generation != self.generation:
                return None
            self._scheduler.new_step()
            if not self.connected or self._scheduler.silent_s > ANSWER_S:
                return None
            reserving = self._scheduler.begin_reserve([item], _width(keys))
        try:
            while reserving is not None and time.monotonic() < deadline_s:
                with self._lock:
                    self._scheduler.new_step()
                    granted = self._scheduler.granted(reserving)
                    if not isinstance(granted, Pending):
                        reserving = None
                        return self._to_write(granted) if isinstance(granted, Granted) else None
                time.sleep(TURN_S / 4)
        finally:
            if reserving is not None:  # it is late, or the call was interrupted (Ctrl-C)
                with self._lock:
                    self._scheduler.give_up(reserving)
        return None

    def _to_write(self, granted: Granted) -> tuple[Granted, ArenaLease | None] | None:
        if not (number := granted.grants[0].reservation):
            return granted, None
        arena = self._rank.arena(granted.boot, granted.given_s)
        if arena is not None:
            if self._scheduler.handed_over([], [number], granted.boot):
                return granted, arena
            arena.close()
        self._scheduler.abort(granted.boot, number)
        return None

    def end_write(self, granted: Granted, whole: bool) -> bool:
        """No byte of the granted rows is written any more. ``whole``: all were written. Returns
        whether the rows can be read now, as far as is known."""
        number = granted.grants[0].reservation
        for rank in self._writers:
            if whole:
                rank.commit(granted.boot, number)
            else:
                rank.abort(granted.boot, number)
        # A pong comes after the commit was carried out.
        done = whole and all(isinstance(r.ask(Ping(), ANSWER_S), Pong) for r in self._writers)
        return done and time.monotonic() < granted.deadline_s

    # ------------------------------------------------------------ resets

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
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._scheduler.new_step()
                if not self._scheduler.resetting:
                    return self._scheduler.connected
            if time.monotonic() >= deadline_s or not self._scheduler.connected:
                return False
            time.sleep(TURN_S)


def _width(keys: Sequence[bytes]) -> int:
    """The bytes of each key; without keys those of a block's hash."""
    return len(keys[0]) if keys else 32
