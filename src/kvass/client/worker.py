"""The client of a worker rank: it maps the arena and sends commit, abort and release.

Laws of this file: nothing here waits for the daemon. A caller gets the buffer of the boot that it
names, and of no other. A mapping ends when its last user has left it.

What is given back while there is no connection is said again on the next one. For the daemon may
have registered this rank, and given it rows, before the rank knows it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.client.connection import DaemonConnection
from kvass.client.endpoint import Endpoint
from kvass.messages import DRAINED, Abort, Commit, Drained, Register, Release

MOST_UNSAID: Final = 256
"""How many messages are kept. The daemon itself ends what the others would give back, at its
deadline."""


class ArenaLease:
    """The right to read and write one boot's arena: ``with lease as buffer``; enter it once.

    It counts as used from ``WorkerClient.arena`` on, so leave it (or ``close`` it) in every case.
    """

    def __init__(self, endpoint: Endpoint, connection: DaemonConnection) -> None:
        assert connection.arena is not None
        self.buffer: npt.NDArray[np.uint8] = connection.arena.buffer
        """The whole arena: uint8, shape ``(arena_bytes,)``. Keep no view of it after leaving."""
        self.populated = connection.watermark
        """How many bytes of it, from its beginning, the daemon had populated when the lease
        began."""
        self._endpoint = endpoint
        self._connection: DaemonConnection | None = connection

    def prepare(self, lo: int, hi: int) -> None:
        """Populate bytes ``[lo, hi)`` if the daemon has not done so yet. Raises ``OSError`` if
        there is no memory: a process that touches them then is killed (SIGBUS)."""
        assert self._connection is not None, "the lease was left"
        assert self._connection.arena is not None
        if hi > self.populated:
            self._connection.arena.populate(int(lo), int(hi))  # or numpy's integers reach ctypes

    def __enter__(self) -> npt.NDArray[np.uint8]:
        return self.buffer

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self.buffer = np.empty(0, np.uint8)
            self._endpoint.leave(connection)


class WorkerClient(Endpoint):
    """The client of one rank, used by the engine's thread and the copy thread. No call waits for
    the daemon or raises if there is none.

    ``registration`` carries this rank and its layout. Call ``start`` once in the worker process:
    until every rank has registered, every lookup is a miss. Call ``complete`` instead if the
    registration is ``incomplete``. ``wants_arena``: False for a rank whose shard another rank of
    the same process reads and writes.
    """

    def __init__(
        self,
        socket: str,
        registration: Register,
        *,
        wants_arena: bool = True,
        incomplete: bool = False,
        daemon_uid: int | None = None,
    ) -> None:
        super().__init__(
            socket,
            registration,
            wants_arena=wants_arena,
            incomplete=incomplete,
            daemon_uid=daemon_uid,
        )
        self._rank = registration.rank
        self._unsaid: deque[Abort | Release] = deque(maxlen=MOST_UNSAID)
        self._connections: list[DaemonConnection] = []
        """The current connection, and lost ones whose arena is in use."""
        self._drained = True
        """Whether nothing that the current connection does not know of is in use, and the daemon
        has been told."""

    def register_as(self, registration: Register) -> None:
        with self.lock:
            self._rank = registration.rank
            super().register_as(registration)

    def arena(self, boot: bytes, given_s: float = math.inf) -> ArenaLease | None:
        """The arena of ``boot``, to copy rows given at ``given_s`` (by default now).

        None: this rank is not connected to that boot, or registered after ``given_s``. In that case
        an EOF has settled what this rank owed, and its slots may belong to others by now.
        """
        self.start()
        with self.lock:
            connection = self.connection
            if connection is None or connection.boot != boot or connection.registered_s > given_s:
                return None
            connection.users += 1
            return ArenaLease(self, connection)

    def commit(self, boot: bytes, reservation: int) -> None:
        """This rank has written its shard of every row of ``reservation``."""
        self.post(Commit(boot=boot, reservation=reservation, rank=self._rank))

    def abort(self, boot: bytes, reservation: int) -> None:
        self._give_back(Abort(boot=boot, reservation=reservation, rank=self._rank))

    def release(self, boot: bytes, lease: int) -> None:
        self._give_back(Release(boot=boot, lease=lease, rank=self._rank))

    def _give_back(self, message: Abort | Release) -> None:
        with self.lock:
            if not self.post(message) and self.connection is None:
                self._unsaid.append(message)

    def leave(self, connection: DaemonConnection) -> None:
        super().leave(connection)
        with self.lock:
            self._tell_drained()

    def _on_connected(self) -> None:
        assert self.connection is not None
        self._connections = [each for each in self._connections if each.users] + [self.connection]
        self._drained = False
        self._tell_drained()
        while self._unsaid:
            self.post(self._unsaid.popleft())

    def _tell_drained(self) -> None:
        """Say ``Drained`` on a new connection once no copy of an earlier one is under way."""
        connection = self.connection
        if self._drained or connection is None or any(s.users for s in self._connections[:-1]):
            return
        self._drained = True
        if DRAINED in connection.welcome.features:
            self.post(Drained(boot=connection.boot), connection)
