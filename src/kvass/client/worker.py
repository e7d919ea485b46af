"""A worker rank: it maps the arena, and tells the daemon what it has written and read.

Laws of this file: nothing here waits for the daemon; a boot names one arena, no buffer of another
boot is given out; a mapping ends when its last user left it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvass.client.client import Client, Endpoint
from kvass.client.reconnect import Reconnector
from kvass.client.session import SLICE_BYTES, DaemonSession
from kvass.messages import Abort, Commit, Register, Release
from kvass.types import Slots


class ArenaLease:
    """The right to read and write one boot's arena: ``with lease as buffer``; enter it once.

    It counts as used from ``WorkerClient.arena`` on, so leave it (or ``close`` it) in every case.
    """

    def __init__(self, connection: Reconnector, session: DaemonSession) -> None:
        assert session.arena is not None
        self.boot = session.boot
        self.buffer: npt.NDArray[np.uint8] = session.arena.buffer
        """The whole arena: uint8, shape ``(arena_bytes,)``. Keep no view of it after leaving."""
        self.populated = session.watermark
        """How many bytes of it, from its beginning, the daemon had populated by now."""
        self._connection = connection
        self._session: DaemonSession | None = session

    def __enter__(self) -> npt.NDArray[np.uint8]:
        return self.buffer

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            self.buffer = np.empty(0, np.uint8)
            self._connection.leave(session)


class WorkerClient(Endpoint):
    """Thread-safe: engine thread and copy thread. No call blocks or raises for an absent daemon.

    ``registration`` carries this rank and its layout. Call ``start`` once in the worker process:
    until every rank registered, the namespace is incomplete and every lookup a miss. Of an
    ``incomplete`` registration, ``complete`` it instead.
    """

    def __init__(self, socket: str, registration: Register, *, incomplete: bool = False) -> None:
        self._rank = registration.rank
        self._shard = registration.shard
        layout, many = registration.layout, registration.world_size > 1
        groups = layout.groups if layout is not None and many else ()
        self._shard_bytes = [g.shard_bytes(registration.chunk_tokens) for g in groups]
        """By group; none if a row has one shard, for then all of the arena is populated."""
        self._client = Client(socket, registration, wants_arena=True, incomplete=incomplete)
        super().__init__(self._client.connection)

    def arena(
        self, boot: bytes, given_s: float = math.inf, slots: Sequence[Slots] = ()
    ) -> ArenaLease | None:
        """The arena of ``boot``, to copy what the daemon gave at ``given_s``; the default is now.

        ``slots``, per group, are the rows to copy: this rank's shards of them, and what lies around
        those, are populated in the background. None if we are connected to another boot, to none,
        or only since later: the EOF between settled what this rank owed, and those slots may be
        another's.
        """
        session = self.connection.enter(boot, given_s, self._slices(slots))
        return None if session is None else ArenaLease(self.connection, session)

    def _slices(self, slots: Sequence[Slots]) -> set[int]:
        """The slices of the arena in which this rank's shards of these rows lie."""
        found = set[int]()
        for where, size in zip(slots, self._shard_bytes, strict=False):
            bytes_ = np.minimum(np.arange(0, size + SLICE_BYTES - 1, SLICE_BYTES), size - 1)
            within = where.offsets(self._shard, size)[:, None] + bytes_
            found.update(np.unique(within // SLICE_BYTES).tolist())
        return found

    def commit(self, boot: bytes, reservation: int) -> None:
        """This rank has written its shard of every row of ``reservation``."""
        self.connection.post(Commit(boot=boot, reservation=reservation, rank=self._rank))

    def abort(self, boot: bytes, reservation: int) -> None:
        """This rank will not write any more."""
        self.connection.post(Abort(boot=boot, reservation=reservation, rank=self._rank))

    def release(self, boot: bytes, lease: int) -> None:
        """This rank has read."""
        self.connection.post(Release(boot=boot, lease=lease, rank=self._rank))
