"""Which windows of which arenas are registered with the device.

Laws of this file:

- A mapping is registered before a copy uses it, and unregistered before it goes away: copies hold
  the arena's array, and its end, whoever brings it about, unregisters first (numpy tells those who
  watch an array before it lets go of the memory under it).
- An arena is not kept alive for being registered: a daemon that ended gets its memory back.
- A registration that fails is not tried again, and costs speed only.
- What the daemon has not populated is not registered: doing that would fault it in here, so that
  this process is charged for the daemon's memory and waits for it. Until then copies cost speed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvass.transfer.base import U8Array
from kvass.transfer.runtime import Fault, Runtime
from kvass.types import I64Array

WINDOW_BYTES: Final = 1 << 30

_log = logging.getLogger(__name__)


class Pinned:
    """One mapping: ``shift[i]`` leads from an address in window ``i`` to the kernels' address.

    Holds no array, and is used by the copy thread; ``let_go`` comes from any.
    """

    def __init__(self, runtime: Runtime, arena: U8Array, window: int, quiet: bool = False) -> None:
        self.address = arena.ctypes.data
        self.shift: dict[int, int] = {}
        self._runtime = runtime
        self.window = window
        self._bytes = arena.nbytes
        self._refused: set[int] = set()
        self._quiet = quiet

    def want(self, windows: Iterable[int], populated: int) -> bool:
        """Register those of ``windows`` that are not, were not refused and lie within the first
        ``populated`` bytes; whether all of them are now. Takes its time."""
        all_are = True
        for one in windows:
            if one not in self.shift and one not in self._refused:
                self._register(one, populated)
            all_are = all_are and one in self.shift
        return all_are

    def _register(self, one: int, populated: int) -> None:
        begin = one * self.window
        end = min(begin + self.window, self._bytes)
        if end > populated:
            return
        got = self._runtime.register(self.address + begin, end - begin)
        if isinstance(got, Fault):
            self._refuse(one, end - begin, got)
        else:
            self.shift[one] = got - (self.address + begin)

    def are(self, windows: I64Array) -> np.ndarray:
        """Of each window, whether it is registered."""
        return np.isin(windows, np.fromiter(self.shift, np.int64, len(self.shift)))

    def shifts(self, windows: I64Array) -> I64Array:
        """``shift`` of each window; all are registered."""
        unique, where = np.unique(windows, return_inverse=True)
        return np.array([self.shift[w] for w in unique.tolist()], np.int64)[where]

    def let_go(self) -> None:
        """Unregister everything. Nothing copies to or from this mapping any more."""
        while self.shift:
            one, _ = self.shift.popitem()
            fault = self._runtime.unregister(self.address + one * self.window)
            if fault is not None:
                _log.warning("kvass could not unpin a part of the arena: %s", fault.text)

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
    """The arenas that jobs named so far, and are still mapped. ``quiet``: of refusals no word."""

    def __init__(self, runtime: Runtime, window: int = WINDOW_BYTES, quiet: bool = False) -> None:
        self._quiet = quiet
        self.window = window
        self._runtime = runtime
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
            end = weakref.finalize(root, pinned.let_go)
            end.atexit = False
            known = self._known[id(root)] = (pinned, end)
        return known[0]

    def let_go(self) -> None:
        """Unregister all. No copy runs."""
        for _, end in self._known.values():
            end()
        self._known.clear()

    def abandon(self) -> None:
        """Unregister nothing, ever: the device is dead."""
        for _, end in self._known.values():
            end.detach()
        self._known.clear()
