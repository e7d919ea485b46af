"""The write budget of the disk tier: a token bucket of bytes, kept in a file of the tier's folder.

The bucket fills evenly, so much a day, and holds what comes in ``_HOURS``. A write takes its bytes.
Writes are never refused, so the level may be below zero, but by no more than the bucket holds. The
file has a checksum, then the level and the time.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import xxhash

from kvass.folder import Folder
from kvass.types import Size

_HOURS: Final = 6.0
_DAY_S: Final = 86_400.0
_SAVE_S: Final = 60.0
"""The least time between two saves while the tier is used."""
_FILE: Final = "written"
_LEVEL: Final = struct.Struct("<dd")
_CHECK: Final = struct.Struct("<Q")
_log = logging.getLogger("kvass.tiers")


class WriteBudget:
    """``day_bytes`` a day. ``clock`` is seconds that go on while no process runs. Thread-safe."""

    def __init__(
        self, folder: Folder, day_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder, self._day, self._clock = folder, day_bytes, clock
        self._most = day_bytes * _HOURS / 24
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._level, self._at = self._read() or (self._most, clock())
        self._saved = clock()

    def spend(self, size: int) -> None:
        """Count ``size`` bytes that are written."""
        with self._lock:
            self._level = max(self._fill() - size, -self._most)

    def report(self) -> dict[str, Any]:
        """The fields of ``kvass status``."""
        with self._lock:
            left = int(self._fill())
        return {
            "over_budget": left <= 0,
            "write_budget_bytes": self._day,
            "write_budget_left_bytes": left,
        }

    def save_if_due(self) -> None:
        """``save``, unless that was less than a minute ago. A clock that was set back counts as a
        minute."""
        if not 0 <= self._clock() - self._saved < _SAVE_S:
            self.save()

    def save(self) -> None:
        """Write the file. If that fails, the log says so; a restart then finds an older level."""
        with self._lock:
            raw = _LEVEL.pack(self._fill(), self._at)
        with self._saving:
            self._saved = self._clock()
            try:
                self._folder.check()
                self._folder.replace(_FILE, _CHECK.pack(xxhash.xxh3_64_intdigest(raw)) + raw)
            except OSError as error:
                text = "%s: the write budget is not saved: %s"
                _log.warning(text, self._folder.path, error.strerror)

    def _fill(self) -> float:
        """Add what has come since the last call; returns the level. A clock that was set back adds
        nothing."""
        now = self._clock()
        self._level += max(0.0, now - self._at) * self._day / _DAY_S
        self._level, self._at = min(self._level, self._most), now
        return self._level

    def _read(self) -> tuple[float, float] | None:
        """The level and its time of the file. None: it is absent; or damaged, and the log says
        so. Raises ``OSError``."""
        try:
            with os.fdopen(self._folder.open(_FILE, os.O_RDONLY), "rb") as file:
                raw = file.read(_CHECK.size + _LEVEL.size + 1)
        except FileNotFoundError:
            return None
        check, body = raw[: _CHECK.size], raw[_CHECK.size :]
        if len(body) != _LEVEL.size or check != _CHECK.pack(xxhash.xxh3_64_intdigest(body)):
            text = "%s: the file %r is damaged: the write budget of %s a day begins anew"
            _log.warning(text, self._folder.path, _FILE, Size(self._day))
            return None
        level, at = _LEVEL.unpack(body)
        return max(level, -self._most), at
