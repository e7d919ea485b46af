"""A simulated tier: what it has, and how long it takes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt

from kvass.core import effects
from kvass.core.effects import Event
from kvass.types import U64Array

_PROBE_S: Final = 0.0002


class SimulatedStore:
    """The records of a tier of ``capacity_bytes``, with LRU eviction. Several daemons may share
    it."""

    def __init__(self, capacity_bytes: int) -> None:
        self._sizes, self._room = OrderedDict[bytes, int](), capacity_bytes

    def holds(self, key: bytes) -> bool:
        return key in self._sizes

    def use(self, key: bytes) -> None:
        """Note a use of a record that it holds."""
        self._sizes.move_to_end(key)

    def add(self, key: bytes, size: int) -> None:
        """Add a record that it does not hold."""
        self._sizes[key] = size
        self._room -= size
        while self._room < 0:
            self._room += self._sizes.popitem(last=False)[1]

    def clear(self) -> None:
        self._room += sum(self._sizes.values())
        self._sizes.clear()


class SimulatedTier:
    """A daemon's way to ``store``, ``bytes_s`` fast in each direction. It does not write a record
    that is there. ``stored_bytes``, ``loaded_bytes``: all that it wrote and read."""

    def __init__(self, store: SimulatedStore, bytes_s: float) -> None:
        self._store, self._bytes_s = store, bytes_s
        self._free_s = dict[type, float]()
        self.stored_bytes = self.loaded_bytes = 0

    def holds(self, group: int, keys: U64Array) -> npt.NDArray[np.bool_]:
        """Which rows it has."""
        return np.array([self._store.holds(name) for name in _names(group, keys)], np.bool_)

    def carry_out(self, effect: effects.ToTier, now: float) -> tuple[float, Event]:
        """The time at which ``effect`` ends, and the event that says so."""
        match effect:
            case effects.TierProbe():
                held = [self._store.holds(k) for batch in effect.batches for k in _keys(batch)]
                return now + _PROBE_S, effects.Probed(effect.op, np.array(held, np.bool_))
            case effects.TierStore():
                keys = _keys(effect.records)
                new, size = [k for k in keys if not self._store.holds(k)], sum(effect.shard_bytes)
                for key in new:
                    self._store.add(key, size)
                self.stored_bytes += len(new) * size
                held = [self._store.holds(key) for key in keys]
                end = self._busy_until(effect, now, len(new) * size)
                return end, effects.Stored(effect.op, np.array(held, np.bool_))
            case effects.TierLoad():
                keys = _keys(effect.records)
                held = [self._store.holds(key) for key in keys]
                for key, there in zip(keys, held, strict=True):
                    if there:
                        self._store.use(key)
                size = len(keys) * sum(effect.shard_bytes)
                self.loaded_bytes += size
                end = self._busy_until(effect, now, size)
                return end, effects.Loaded(effect.op, np.array(held, np.bool_))
            case effects.TierEpoch():
                return now, effects.EpochIs(effect.op, 1)
            case effects.TierClear():
                self._store.clear()
                return now, effects.Emptied(effect.op, True)
        return now, effect.failed()

    def _busy_until(self, effect: effects.ToTier, now: float, size: int) -> float:
        """The time at which it has moved ``size`` more bytes. Loads and stores do not slow each
        other down."""
        end = max(now, self._free_s.get(type(effect), 0.0)) + size / self._bytes_s
        self._free_s[type(effect)] = end
        return end


def _keys(records: effects.Records) -> list[bytes]:
    return _names(records.group, records.keys)


def _names(group: int, keys: U64Array) -> list[bytes]:
    head = bytes([group])
    return [head + key.tobytes() for key in keys]
