"""The records that a store answers for but refuses: how many, why, and which cannot be read.

A store that finds a record there does not write it. So a record that cannot be read would stay so
for ever. ``Refusals`` remembers it, and the tier says that it is absent until it was stored again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from kvass.errors import ItemRefused, ItemUnreadable

_MOST_REASONS: Final = 16
_OTHERS: Final = "other reasons"
_REASON_CHARS: Final = 160
_MOST_KEYS: Final = 16_384
"""Above it, those that were refused first are forgotten: they are refused once more."""
_REMEMBERED_S: Final = 600.0
"""Somebody else may have made a record readable. With ``--flush none`` nobody here stores it."""
_log = logging.getLogger("kvass.tiers")


class Refusals:
    """What the store ``name`` refused. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._reasons: Counter[str] = Counter()
        self._until: dict[bytes, float] = {}
        """Key -> until when its record counts as absent. The first one was refused first."""

    def count(self, outcomes: Sequence[object]) -> None:
        """Count the outcomes that are refusals. Log each reason once."""
        for outcome in outcomes:
            if isinstance(outcome, ItemRefused):
                self._count(self._reason(outcome))

    def loaded(self, keys: Sequence[bytes], outcomes: Sequence[object]) -> None:
        """Remember the records that could not be read."""
        until = time.monotonic() + _REMEMBERED_S
        with self._lock:
            for key, outcome in zip(keys, outcomes, strict=True):
                if isinstance(outcome, ItemUnreadable):
                    self._until.pop(key, None)
                    self._until[key] = until
            while len(self._until) > _MOST_KEYS:
                del self._until[next(iter(self._until))]

    def stored(self, keys: Sequence[bytes], held: Sequence[bool]) -> None:
        """Forget the records that were written anew."""
        with self._lock:
            for key, now in zip(keys, held, strict=True) if self._until else ():
                if now:
                    self._until.pop(key, None)

    def readable(self, keys: Sequence[bytes], held: list[bool]) -> list[bool]:
        """Return ``held``, without the records that cannot be read."""
        with self._lock:
            if not self._until:
                return held
            now = time.monotonic()
            return [
                one and self._until.get(key, now) <= now
                for key, one in zip(keys, held, strict=True)
            ]

    def report(self) -> dict[str, Any]:
        """Return fields of the tier's report: the number of refusals, and that of each reason."""
        with self._lock:
            return {"refused_records": self._reasons.total(), "refusals": dict(self._reasons)}

    def _reason(self, refusal: ItemRefused) -> str:
        text = " ".join(str(refusal).removeprefix(f"{self._name}: ").split())
        return text.encode("ascii", "replace").decode()[:_REASON_CHARS]

    def _count(self, reason: str) -> None:
        with self._lock:
            if reason not in self._reasons and len(self._reasons) >= _MOST_REASONS:
                reason = _OTHERS
            self._reasons[reason] += 1
            new = self._reasons[reason] == 1
        if new:
            _log.warning("%s: it refuses a record, the tier goes on: %s", self._name, reason)
