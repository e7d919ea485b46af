"""A worker rank: the arena mapped, and its debts settled.

Laws of this file: nothing here waits for the daemon; a boot names one arena, no buffer of another
boot is given out; a mapping ends when its last user left it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvass.messages import Register


class ArenaLease:
    """The right to read and write one boot's arena: ``with lease as buffer``; enter it once.

    It counts as used from ``WorkerClient.arena`` on, so leave it (or ``close`` it) in every case.
    """

    boot: bytes
    buffer: npt.NDArray[np.uint8]
    """The whole arena: uint8, shape ``(arena_bytes,)``. Keep no view of it after leaving."""

    def __enter__(self) -> npt.NDArray[np.uint8]:
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Leave. Idempotent."""
        raise NotImplementedError


class WorkerClient:
    """Thread-safe: engine thread and copy thread. No call blocks or raises for an absent daemon.

    ``registration`` carries this rank and its layout. Call ``start`` once in the worker process:
    until every rank registered, the namespace is incomplete and every lookup a miss.
    """

    def __init__(self, socket: str, registration: Register) -> None:
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """Whether a daemon is there."""
        raise NotImplementedError

    @property
    def counters(self) -> Counter[str]:
        """As ``SchedulerClient.counters``."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin connecting in the background, in this process (after any fork). Never blocks."""
        raise NotImplementedError

    def arena(self, boot: bytes) -> ArenaLease | None:
        """The arena of ``boot``; None if we are connected to another boot, or to none."""
        raise NotImplementedError

    def commit(self, boot: bytes, reservation: int) -> None:
        """This rank has written its shard of every row of ``reservation``."""
        raise NotImplementedError

    def abort(self, boot: bytes, reservation: int) -> None:
        """This rank will not write any more."""
        raise NotImplementedError

    def release(self, boot: bytes, lease: int, bad: Sequence[int] = ()) -> None:
        """This rank has read; ``bad`` are indices into the lease's chunks that proved wrong."""
        raise NotImplementedError

    def close(self) -> None:
        """End the session. Only after copies drained: a buffer in use defers it."""
        raise NotImplementedError
