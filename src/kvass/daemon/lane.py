"""One kind of work for one tier: a bounded queue and the few threads that serve it.

Law of this file: nobody who puts something here waits. The threads are daemons over a plain queue,
and not a ``ThreadPoolExecutor``, which Python joins before it exits: a call that hangs may keep
nobody from leaving.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvass.core.effects import ToTier


class Lane:
    """``work(effect)`` of each one put here, by ``threads`` threads; at most ``room`` wait.

    ``nice``: by how much the threads give way to the one that answers engines (and to engines).
    """

    def __init__(
        self,
        name: str,
        threads: int,
        room: int,
        work: Callable[[ToTier], None],
        clock: Callable[[], float],
        nice: int = 0,
    ) -> None:
        self._nice = nice
        self._room = room
        self._work = work
        self._clock = clock
        self._queue: SimpleQueue[ToTier | None] = SimpleQueue()
        self._running: dict[int, tuple[float, ToTier]] = {}
        """Thread -> what it is at, and since when."""
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        self._starting = threading.Lock()
        self._started = False

    def put(self, effect: ToTier) -> bool:
        """Queue it; False: there is no room."""
        if self._queue.qsize() >= self._room:
            return False
        self._queue.put(effect)
        return True

    def start(self) -> None:
        """Start the threads, once."""
        if self._started:
            return
        with self._starting:
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()

    def stop(self) -> None:
        """Have each thread end after what it is at and what is queued."""
        for _ in self._threads:
            self._queue.put(None)

    @property
    def queued(self) -> int:
        """What no thread has begun yet."""
        return self._queue.qsize()

    @property
    def running(self) -> list[tuple[float, ToTier]]:
        """What the threads are at, and since when."""
        return list(self._running.values())  # in one step

    def drain(self) -> list[ToTier]:
        """Take out all that no thread has begun."""
        taken: list[ToTier] = []
        while True:
            try:
                effect = self._queue.get_nowait()
            except Empty:
                return taken
            if effect is None:
                self._queue.put(None)
                return taken
            taken.append(effect)

    def _serve(self) -> None:
        me = threading.get_ident()
        if self._nice:  # on Linux a thread has its own, and hands it on to those it starts
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while (effect := self._queue.get()) is not None:
            self._running[me] = self._clock(), effect
            try:
                self._work(effect)
            finally:
                del self._running[me]
