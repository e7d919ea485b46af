"""The threads of a tier that asks a server for one record at a time.

Law of this file: what all calls of a tier have in flight together is bounded, in threads and in
bytes, and no thread works for a call that has returned. A batch that meets nothing but trouble, or
once a long silence, is given up: a server that answers nobody costs the time of one request, not of
a thousand.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final, TypeAlias

from kvass.errors import TierDown

Answer: TypeAlias = "bool | TierDown"

_GIVE_UP: Final = 3
"""Requests in a row that met trouble, after which a batch begins no more."""


class WorkerPool:
    """``size`` threads that keep at most ``room`` bytes in memory, or one record that is larger.

    Trouble that takes ``long_s`` seconds to show ends a batch.
    """

    def __init__(self, name: str, size: int, room: int, long_s: float) -> None:
        self._long_s = long_s
        self._pool = ThreadPoolExecutor(size, thread_name_prefix=name)
        self._room = self._free = room
        self._freed = threading.Condition()
        self._turn = threading.Lock()  # who needs much room waits before who came later

    def each(self, work: Callable[[int], bool], bytes_of: Sequence[int]) -> list[Answer]:
        """``work(i)`` for every ``i``, at once; a ``TierDown`` that it raises is its answer.

        ``bytes_of[i]`` is what ``work(i)`` needs of the room.
        """
        batch = _Batch()
        begun: list[Future[Answer]] = []
        try:
            for i, need in enumerate(bytes_of):
                self._take(need)
                begun.append(self._pool.submit(self._one, batch, work, i, need))
        finally:
            wait(begun)  # whatever happens here: they read and write what our caller owns
        return [future.result() for future in begun]

    def close(self) -> None:
        """After the last call."""
        self._pool.shutdown()

    def _one(self, batch: _Batch, work: Callable[[int], bool], i: int, need: int) -> Answer:
        begun = time.monotonic()
        try:
            if batch.lost is not None:
                return batch.lost
            answer = work(i)
            batch.answered()
            return answer
        except TierDown as error:
            batch.failed(error, for_all=time.monotonic() - begun >= self._long_s)
            return error
        finally:
            self._give(need)

    def _take(self, need: int) -> None:
        need = min(need, self._room)
        with self._turn, self._freed:
            self._freed.wait_for(lambda: self._free >= need)
            self._free -= need

    def _give(self, need: int) -> None:
        with self._freed:
            self._free += min(need, self._room)
            self._freed.notify_all()


class _Batch:
    """How it goes for the requests of one call."""

    def __init__(self) -> None:
        self.lost: TierDown | None = None
        """Why nothing more shall be begun."""
        self._lock = threading.Lock()
        self._failures = 0

    def answered(self) -> None:
        with self._lock:
            self._failures = 0

    def failed(self, error: TierDown, *, for_all: bool) -> None:
        with self._lock:
            self._failures += 1
            if for_all or self._failures >= _GIVE_UP:
                self.lost = error
