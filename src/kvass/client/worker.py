"""A worker rank: it maps the arena, and tells the daemon what it has written and read.

Laws of this file: nothing here waits for the daemon; a boot names one arena, no buffer of another
boot is given out; a mapping ends when its last user left it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kvass.client.endpoint import Endpoint
from kvass.client.session import DaemonSession
from kvass.messages import Abort, Commit, Register, Release


class ArenaLease:
    """The right to read and write one boot's arena: ``with lease as buffer``; enter it once.

    It counts as used from ``WorkerClient.arena`` on, so leave it (or ``close`` it) in every case.
    """

    def __init__(self, endpoint: Endpoint, session: DaemonSession) -> None:
        assert session.arena is not None
        self.buffer: npt.NDArray[np.uint8] = session.arena.buffer
        """The whole arena: uint8, shape ``(arena_bytes,)``. Keep no view of it after leaving."""
        self.populated = session.watermark
        """How many bytes of it, from its beginning, the daemon had populated by now."""
        self._endpoint = endpoint
        self._session: DaemonSession | None = session

    def prepare(self, lo: int, hi: int) -> None:
        """Have memory for bytes ``[lo, hi)``, which the daemon may not have populated. Raises
        ``OSError`` if there is none: who touches them then is killed (SIGBUS)."""
        assert self._session is not None, "the lease was left"
        assert self._session.arena is not None
        if hi > self.populated:
            self._session.arena.populate(lo, hi)

    def __enter__(self) -> npt.NDArray[np.uint8]:
        return self.buffer

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self.buffer = np.empty(0, np.uint8)
            self._endpoint.leave(session)


class WorkerClient(Endpoint):
    """Used by the engine's thread and the copy thread. No call blocks or raises for an absent
    daemon.

    ``registration`` carries this rank and its layout. Call ``start`` once in the worker process:
    until every rank registered, the namespace is incomplete and every lookup a miss. Of an
    ``incomplete`` registration, ``complete`` it instead.
    """

    def __init__(
        self,
        socket: str,
        registration: Register,
        *,
        incomplete: bool = False,
        daemon_uid: int | None = None,
    ) -> None:
        super().__init__(
            socket, registration, wants_arena=True, incomplete=incomplete, daemon_uid=daemon_uid
        )
        self._rank = registration.rank

    def arena(self, boot: bytes, given_s: float = math.inf) -> ArenaLease | None:
        """The arena of ``boot``, to copy what the daemon gave at ``given_s``; the default is now.

        None if we are connected to another boot, to none, or only since later: the EOF between
        settled what this rank owed, and those slots may be another's.
        """
        self.start()
        with self.lock:
            session = self.session
            if session is None or session.boot != boot or session.registered_s > given_s:
                return None
            session.users += 1
            return ArenaLease(self, session)

    def commit(self, boot: bytes, reservation: int) -> None:
        """This rank has written its shard of every row of ``reservation``."""
        self.post(Commit(boot=boot, reservation=reservation, rank=self._rank))

    def abort(self, boot: bytes, reservation: int) -> None:
        self.post(Abort(boot=boot, reservation=reservation, rank=self._rank))

    def release(self, boot: bytes, lease: int) -> None:
        self.post(Release(boot=boot, lease=lease, rank=self._rank))
