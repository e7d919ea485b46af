"""Which windows of which arenas are registered with the device.

Laws of this file:

- A mapping is registered before a copy uses it, and unregistered before it goes away: copies hold
  the arena's array, and what is registered holds the mapping under it.
- An arena is not kept alive for being registered: when its array ends, whoever brings that about,
  its windows are unregistered by the copy thread, and then a daemon that ended gets its memory
  back. The other may be the engine's thread, which would have to wait for the driver.
- A registration that fails is not tried again, and costs speed only.
- What the daemon has not populated is not registered: doing that would fault it in here, so that
  this process is charged for the daemon's memory and waits for it. Until then copies cost speed.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

import numpy as np

from kvass.transfer.base import U8Array
from kvass.transfer.runtime import Fault, Runtime
from kvass.types import I64Array

WINDOW_BYTES: Final = 1 << 30
PATIENCE_S: Final = 5.0
"""For how long all is unregistered in the end; what is left then the process's end does."""

_log = logging.getLogger(__name__)
_left: Final[list[object]] = []
"""What is registered until this process ends, and therefore mapped."""


class Pinned:
    """One mapping, and which windows of it are registered.

    Holds what lies under the array, not the array. What numpy allocated itself goes away with its
    array, so that is never registered.
    """

    def __init__(self, runtime: Runtime, arena: U8Array, window: int, quiet: bool = False) -> None:
        self.address = arena.ctypes.data
        self.registered = set[int]()
        self._runtime = runtime
        self._mapping = arena.base
        self.window = window
        self._bytes = arena.nbytes
        self._refused: set[int] = set()
        self._quiet = quiet

    def want(self, windows: Iterable[int], populated: int) -> bool:
        """Register those of ``windows`` that are not, were not refused and lie within the first
        ``populated`` bytes; whether all of them are now. Takes its time."""
        all_are = True
        for one in windows:
            if one not in self.registered and one not in self._refused:
                self._register(one, populated)
            all_are = all_are and one in self.registered
        return all_are

    def _register(self, one: int, populated: int) -> None:
        begin = one * self.window
        end = min(begin + self.window, self._bytes)
        if end > populated or self._mapping is None:
            return
        fault = self._runtime.register(self.address + begin, end - begin)
        if fault is not None:
            self._refuse(one, end - begin, fault)
        else:
            self.registered.add(one)

    def are(self, windows: I64Array) -> np.ndarray:
        """Of each window, whether it is registered."""
        return np.isin(windows, np.fromiter(self.registered, np.int64, len(self.registered)))

    def let_go(self) -> bool:
        """Unregister a window; whether there is none any more. Nothing copies to or from this
        mapping."""
        for one in list(self.registered)[:1]:
            fault = self._runtime.unregister(self.address + one * self.window)
            self.registered.discard(one)
            if fault is not None:
                _log.warning("kvass could not unpin a part of the arena: %s", fault.text)
                _left.append(self._mapping)
        if not self.registered:
            self.drop()
        return not self.registered

    def drop(self) -> None:
        """Nothing of it is registered."""
        self._mapping = None

    def _refuse(self, one: int, count: int, fault: Fault) -> None:
        if not self._refused and not self._quiet:
            _log.warning(
                "kvass could not pin %d MiB of the arena (%s): copies to and from there are right "
                "but several times slower; raise the limit of locked memory (ulimit -l) or use a "
                "smaller arena",
                count >> 20,
                fault.text,
            )
        self._refused.add(one)


class Pins:
    """The arenas that jobs named so far. ``wake`` is called, on any thread, when one of them ended:
    then ``reap`` is due. ``quiet``: of refusals no word."""

    def __init__(
        self,
        runtime: Runtime,
        window: int = WINDOW_BYTES,
        quiet: bool = False,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._runtime, self._quiet, self._wake, self._clock = runtime, quiet, wake, clock
        self._abandoned = False
        self.window = window
        self._pid = os.getpid()
        self._next_s = 0.0
        self._ended = deque[Pinned]()
        self._known: dict[int, tuple[Pinned, weakref.finalize[..., U8Array]]] = {}

    def of(self, arena: U8Array) -> Pinned:
        """What is registered of the mapping under ``arena``."""
        root = arena
        while isinstance(root.base, np.ndarray):
            root = root.base
        for key in [k for k, (_, end) in self._known.items() if not end.alive]:
            del self._known[key]
        known = self._known.get(id(root))
        if known is None:
            pinned = Pinned(self._runtime, root, self.window, self._quiet)
            end = weakref.finalize(root, self._end, pinned)
            end.atexit = False
            known = self._known[id(root)] = (pinned, end)
        return known[0]

    def _end(self, pinned: Pinned) -> None:
        if os.getpid() != self._pid:  # a child: the lock that ``wake`` takes may be held for good
            pinned.drop()
            return
        self._ended.append(pinned)
        self._wake()

    @property
    def ended(self) -> bool:
        """Whether there are arenas that ended and are to be unregistered."""
        return bool(self._ended) and not self._abandoned

    def reap(self) -> bool:
        """Unregister a window of what ended; whether one was due. As long as it took nothing is
        done next: it takes the driver's locks from the engine. Of a job that is settled no copy
        runs."""
        begin = self._clock()
        due = self.ended and begin >= self._next_s
        if due:
            self._reap()
            end = self._clock()
            self._next_s = end + (end - begin)
        return due

    def _reap(self) -> None:
        one = self._ended[0]
        if one.let_go():
            self._ended.remove(one)

    def let_go(self) -> None:
        """Unregister all, as long as there is time. No copy runs."""
        for _, end in self._known.values():
            end()
        self._known.clear()
        until = self._clock() + PATIENCE_S
        while self.ended and self._clock() < until:
            self._reap()
        if self.ended:
            self.abandon()

    def abandon(self) -> None:
        """Unregister nothing, ever: the device is dead, or silent, or there is no time. What is
        registered stays mapped: the driver goes by addresses, and takes what comes there next for
        pinned."""
        self._abandoned = True
        for _, end in self._known.values():
            end.detach()
        _left.append(self)
