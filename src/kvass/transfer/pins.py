"""The windows of arenas that are registered (pinned) with the device.

- A window is registered before a copy uses it, and unregistered before its mapping ends: jobs hold
  the arena's array, and ``Pinned`` holds the mapping under it.
- A registered window does not keep the arena's array alive. When the array is gone, the copy thread
  unregisters its windows. Then the memory of a daemon that has ended is freed.
- A window that the daemon has not populated is not registered: this process would wait for the
  memory, and it would count as this process's memory.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from time import monotonic
from typing import Final

import numpy as np
import numpy.ma  # np.unique would import it when first called, which takes 20 ms
import numpy.typing as npt

from kvass.transfer.base import U8Array
from kvass.transfer.device import DeviceRuntime
from kvass.types import I64Array

BoolArray = npt.NDArray[np.bool_]

WINDOW_BYTES: Final = 1 << 30

_log = logging.getLogger(__name__)
_kept: Final[list[object]] = []
"""Mappings that stay registered, and therefore mapped, until this process ends. The driver knows
pinned memory by its address, and would take the next mapping at that address for pinned."""


class Pinned:
    """The registered windows of one arena.

    Memory that numpy allocated is freed with its array, so it is never registered.
    """

    def __init__(self, runtime: DeviceRuntime, arena: U8Array, window: int) -> None:
        self.arena = weakref.ref(arena)
        self.address = arena.ctypes.data
        self.window = window
        self.registered = set[int]()
        self._runtime = runtime
        self._mapping = arena.base
        self._bytes = arena.nbytes
        self._refused = set[int]()

    def want(self, windows: I64Array, populated: int) -> BoolArray:
        """Register those of ``windows`` that lie within the first ``populated`` bytes. Returns
        which of ``windows`` are registered then. This is slow."""
        for window in np.unique(windows).tolist():
            if window not in self.registered and window not in self._refused:
                self._register(window, populated)
        return np.isin(windows, list(self.registered))

    def _register(self, window: int, populated: int) -> None:
        begin = window * self.window
        end = min(begin + self.window, self._bytes)
        if end > populated or self._mapping is None:
            return
        fault = self._runtime.register(self.address + begin, end - begin)
        if fault is None:
            self.registered.add(window)
            return
        if not self._refused:
            _log.warning(
                "kvass could not pin a part of the arena (%s): copies to and from there are right "
                "but several times slower; raise the limit of locked memory (ulimit -l) or use a "
                "smaller arena",
                fault.text,
            )
        self._refused.add(window)

    def let_go(self) -> None:
        """Unregister one window. No copy may be using this arena."""
        window = self.registered.pop()
        fault = self._runtime.unregister(self.address + window * self.window)
        if fault is not None:
            _log.warning("kvass could not unpin a part of the arena: %s", fault.text)
            _kept.append(self._mapping)


class Pins:
    """The arenas of all jobs so far. Only the copy thread uses this."""

    def __init__(
        self, runtime: DeviceRuntime, window: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._runtime, self._window, self._clock = runtime, window, clock
        self._arenas: list[Pinned] = []
        self._next_s = 0.0

    def of(self, arena: U8Array) -> Pinned:
        """The registered windows of the mapping under ``arena``."""
        root = arena
        while isinstance(root.base, np.ndarray):
            root = root.base
        for pinned in self._arenas:
            if pinned.arena() is root:
                return pinned
        self._arenas.append(Pinned(self._runtime, root, self._window))
        return self._arenas[-1]

    def reap(self) -> bool:
        """Unregister one window of an arena that is gone. Returns whether there was such an arena.

        After that it does nothing for as long as unregistering took, because that holds locks of
        the driver that the engine needs. No copy uses such an arena, because its jobs have ended.
        """
        begin = self._clock()
        gone = next((pinned for pinned in self._arenas if pinned.arena() is None), None)
        if gone is None or begin < self._next_s:
            return False
        if gone.registered:
            gone.let_go()
            end = self._clock()
            self._next_s = end + (end - begin)
        if not gone.registered:
            self._arenas.remove(gone)
        return True

    def close(self) -> None:
        for pinned in self._arenas:
            while pinned.registered:
                pinned.let_go()
        self._arenas = []

    def abandon(self) -> None:
        """Keep everything registered until this process ends, because the device is dead."""
        _kept.extend(self._arenas)
        self._arenas = []
